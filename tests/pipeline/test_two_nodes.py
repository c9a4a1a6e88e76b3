"""One job on a cluster of two nodes: both work, and the bytes are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.running import FIXTURES, reshard_here

ROOT = Path(__file__).parent.parent.parent


def test_two_nodes_share_the_work_and_give_the_same_bytes(tmp_path: Path) -> None:
    source = FIXTURES / "mp2dp2-fp16-fused"
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.two_nodes", str(source), str(tmp_path / "cluster")],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "disabled",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["files"] == sum(told["workers"]) == 32
    assert len(told["workers"]) == 2, "both nodes wrote files"
    reshard_here(source, tmp_path / "here", mp=2, dp=16, flat=True)
    for path in (tmp_path / "here").glob("*.pt"):
        assert path.read_bytes() == (tmp_path / "cluster" / path.name).read_bytes(), path.name
