"""A program: many commands on one local Ray, each with faults planned for its workers. Tells of each what it did.

    echo '[{"name": "a", "faults": ["window-written:kill:3"], "words": ["SOURCE", "TARGET"]}]' | \
        python -m tests.faults.sessions FOLDER

A process of its own, since workers learn of faults by their environment, which is that of the Ray they belong to.
"""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from cluster.session import ray_session
from pipeline.reshard import main as reshard
from tasks.faults import VARIABLE


def carry_out(case: dict[str, Any], faults: Path) -> dict[str, object]:
    for path in faults.iterdir():
        path.unlink()
    for fault in case["faults"]:
        (faults / fault).touch()
    out, said = io.StringIO(), io.StringIO()
    began = time.monotonic()
    with redirect_stdout(out), redirect_stderr(said):
        code = reshard([*case["words"], "--json"])
    return {
        "code": code,
        "result": json.loads(out.getvalue()),
        "said": said.getvalue(),
        "happened": sorted(path.name for path in faults.glob("*:happened")),
        "seconds": round(time.monotonic() - began, 2),
    }


def main(folder: str) -> None:
    cases = json.load(sys.stdin)
    faults = Path(folder)
    faults.mkdir(parents=True, exist_ok=True)
    with ray_session(
        "local", num_cpus=2, object_store_memory_bytes=80 << 20, environment={VARIABLE: str(faults)}
    ) as session:
        del session
        told = {case["name"]: carry_out(case, faults) for case in cases}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
