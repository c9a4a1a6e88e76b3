"""The measurements, interleaved: each round runs everything once, so a busy minute of the machine hits all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cluster.session import ray_session
from tests.benchmarks.copying import copy, settle, undisturbed
from tests.benchmarks.ours import JOBS, Job, run_command, run_tasks, worker_peaks

CP, CP_FSYNC = "cp", "cp + fsync"
OURS, OURS_FSYNC = "ours, --fsync off", "ours, fsync"


@dataclass
class Measured:
    """All numbers, by what was measured; one number a round, where it was measured in rounds."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    loads: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    repeated: int = 0
    "measurements done once more, because the machine's host took memory away meanwhile"

    def peak(self, name: str, num_bytes: int) -> None:
        self.bytes[name] = max(self.bytes[name], num_bytes)


def measure(source: Path, work: Path, gigabytes: float, num_rounds: int) -> Measured:
    """Run all rounds in one Ray session; the first run of each job warms up and is not counted, but compared."""
    measured = Measured()
    ours, older, copied = work / "ours", work / "older", work / "copied"
    with ray_session("local") as session:
        num_workers = int(session.nodes()[0]["CPU"])
        measured.bytes["idle worker"] = max(worker_peaks(num_workers, with_imports=False).values())
        measured.bytes["idle worker with imports"] = max(worker_peaks(num_workers, with_imports=True).values())
        for job in JOBS:
            settle(source, ours, older)
            _, result = run_tasks(job, source, ours, durable=True)
            run_older_way(job, source, older, gigabytes)
            check_equal(ours, older)
            measured.facts[f"equal to the older way, bit for bit: {job.name}"] = True
            amplification = result["bytes_read"] / result["bytes_needed"]
            measured.facts[f"bytes read / bytes needed: {job.name}"] = round(amplification, 2)
        for number in range(num_rounds):
            prepare = partial(settle, source, copied, ours, older)
            for name in (CP, CP_FSYNC):
                copied_seconds, again = undisturbed(prepare, partial(copy, source, copied, durable=name == CP_FSYNC))
                measured.seconds[name].append(copied_seconds)
                measured.repeated += again
            for job in JOBS:
                for kind, durable in ((OURS, False), (OURS_FSYNC, True)):
                    run = partial(run_tasks, job, source, ours, durable=durable)
                    (seconds, result), again = undisturbed(prepare, run)
                    measured.repeated += again
                    measured.seconds[f"{kind}: {job.name}"].append(seconds)
                    measured.peak("beyond the idle worker, by its results", result["peak_memory_bytes"])
                for part in ("unflatten", "regroup", "write"):
                    measured.seconds[f"{part}: {job.name}"].append(result[f"{part}_seconds"])
                settle(source, ours, older)
                told = run_older_way(job, source, older, gigabytes)
                measured.seconds[f"older: {job.name}"].append(told["seconds"])
                measured.peak(f"older way: {job.name}", told["peak_bytes"])
                measured.peak("older way, idle", told["idle_bytes"])
            measured.loads.append(round(os.getloadavg()[0], 1))
            print(f"round {number + 1} of {num_rounds} done, load {measured.loads[-1]}", file=sys.stderr, flush=True)
        measured.bytes["worker"] = max(worker_peaks(num_workers, with_imports=True).values())
    for job in JOBS:
        settle(source, ours, older)
        seconds, result = run_command(job, source, ours)
        measured.seconds[f"command: {job.name}"].append(seconds)
        measured.facts[f"command: {job.name}"] = {name: result[name] for name in result if name.endswith("_seconds")}
    settle(source, ours)
    return measured


def run_older_way(job: Job, source: Path, target: Path, gigabytes: float) -> dict[str, Any]:
    """Run the older way in a process of its own; return its seconds and memory."""
    words = [sys.executable, "-m", "tests.benchmarks.older_way", str(source), str(target), "--source-mp", "2"]
    words += ["--source-dp", "4", "--mp", str(job.mp), "--dp", str(job.dp), "--gigabytes", str(gigabytes)]
    done = subprocess.run([*words, *([] if job.flat else ["--unflat"])], check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def check_equal(ours: Path, other: Path) -> None:
    """Raise if the two folders differ in one bit of the model."""
    words = [sys.executable, "-m", "tests.benchmarks.compare_files", str(ours), str(other)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ours differs from the older way:\n{done.stdout}{done.stderr}")
