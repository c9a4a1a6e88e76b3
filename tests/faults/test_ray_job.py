"""Jobs on a cluster by `ray job submit`: what an operator sees of a run that ends well, badly, or is stopped."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.status import status
from tests.benchmarks.make_checkpoint import make_checkpoint
from tests.benchmarks.model_shape import ModelShape
from tests.faults.ray_head import Head, NoDashboard, ray_head
from tests.running import FIXTURES, reshard_here

ROOT = Path(__file__).parent.parent.parent
SOURCE = FIXTURES / "mp2dp4-fp16-fused"

# So many small files that a stop comes in the middle: 8 s with one worker at a time.
NUM_PARTS, NUM_SHARDS = 2, 500

# Ray kills what has not ended by then (RAY_JOB_STOP_WAIT_TIME_S).
STOP_SECONDS = 3.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    try:
        with ray_head(num_cpus=2) as running:
            yield running
    except NoDashboard as fault:
        pytest.skip(f"no job server: {fault}")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder of what is sent along: the code folders, and nothing else."""
    folder = tmp_path_factory.mktemp("code")
    for name in ("pipeline", "tasks", "cluster"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def submit(head: Head, code: Path, name: str, *words: object, wait: bool = True) -> tuple[int, str]:
    """Submit `python -m ...` and return the exit code of `ray job submit`, and what it said."""
    waiting = [] if wait else ["--no-wait"]
    done = head.ray_job(
        "submit", *waiting, "--submission-id", name, "--working-dir", code, "--", "python", "-m", *words
    )
    return done.returncode, done.stdout + done.stderr


def after_ray(logs: str) -> list[str]:
    """Leave out the lines that Ray's job server writes before the driver starts; the rest are plain lines."""
    lines = logs.split("\n")
    (start,) = (number for number, line in enumerate(lines) if line.startswith("Running entrypoint for job "))
    told = lines[start + 1 :]
    assert all(line.isprintable() for line in told), logs
    assert told.pop() == "", "the last line is ended"
    return told


def json_result(head: Head, name: str) -> dict[str, Any]:
    """Read the result from the end of a log, as a program would: from the last line that is `{` alone."""
    lines = after_ray(head.logs(name))
    start = max(number for number, line in enumerate(lines) if line == "{")
    result = json.loads("\n".join(lines[start:]))
    assert isinstance(result, dict)
    return result


def checkpoint_files(target: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in target.glob("*.pt")}


def test_a_job_ends_with_code_0_and_its_summary_in_plain_lines(head: Head, code: Path, tmp_path: Path) -> None:
    words = ["pipeline.reshard", SOURCE, tmp_path / "out", "--mp", "1", "--dp", "6", "--state", "drop"]
    exit_code, said = submit(head, code, "well", *words)
    assert exit_code == 0, said
    details = head.details("well")
    assert (details["status"], details["driver_exit_code"]) == ("SUCCEEDED", 0)
    told = after_ray(head.logs("well"))
    assert told[-3:] == [
        "done: manifest.json names 6 files",
        "dropped: last_optimizer_state",
        "dropped: extra_state.rng_tracker_states",
    ]
    assert "\n".join(told) in said
    assert "\n".join(told) in head.ray_job("logs", "well").stdout

    reshard_here(SOURCE, tmp_path / "here", mp=1, dp=6)
    assert checkpoint_files(tmp_path / "out") == checkpoint_files(tmp_path / "here")
    assert head.processes("pipeline.reshard") == []


def test_the_json_result_is_the_end_of_the_log(head: Head, code: Path, tmp_path: Path) -> None:
    words = ["pipeline.reshard", SOURCE, tmp_path / "out", "--mp", "1", "--dp", "6", "--state", "drop", "--json"]
    submit(head, code, "json", *words, wait=False)
    assert head.wait("json")["driver_exit_code"] == 0, head.logs("json")
    result = json_result(head, "json")
    assert (result["exit_code"], len(result["files"])) == (0, 6)


def test_a_bad_source_has_its_own_code_in_the_job_api_only(head: Head, code: Path, tmp_path: Path) -> None:
    exit_code, said = submit(
        head, code, "bad", "pipeline.reshard", FIXTURES / "bad-truncated", tmp_path / "out", "--mp", "1"
    )
    assert exit_code == 1
    assert "error[truncated-file]" in said
    details = head.details("bad")
    assert (details["status"], details["driver_exit_code"]) == ("FAILED", 3)
    assert "failed with exit code 3" in details["message"]
    assert head.ray_job("status", "bad").returncode == 0, "the command tells of a failure in words only"
    again, said = submit(head, code, "bad", "pipeline.status", tmp_path)
    assert again == 1
    assert "use a different submission_id" in said


def test_a_stopped_job_ends_in_order_and_another_takes_up_its_work(head: Head, code: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", ModelShape(1, 256, 1024, 4, 2048), 2, 2)
    target = tmp_path / "out"
    words = ["pipeline.reshard", tmp_path / "source", target, "--mp", NUM_PARTS, "--dp", NUM_SHARDS]
    # Holding both CPUs, one task runs at a time.
    exit_code, said = submit(head, code, "stopped", *words, "--resources", "num_cpus=2", wait=False)
    assert exit_code == 0, said
    wait_for_records(head, target, 20)
    began = time.monotonic()
    stopping = head.ray_job("stop", "--no-wait", "stopped")
    assert stopping.returncode == 0, stopping.stdout + stopping.stderr
    details = head.wait("stopped")
    assert (details["status"], details["driver_exit_code"]) == ("STOPPED", None)
    assert time.monotonic() - began < 2 * STOP_SECONDS
    # Nothing was killed: the driver told how far it had come, and gave its lease back.
    told = after_ray(head.logs("stopped"))
    assert told[-2].startswith("error[interrupted]: stopped on request: ")
    assert told[-1] == "  next: run the same command again; what is finished is kept"
    (lease,) = (target / ".reshard" / "lease").glob("*.json")
    assert json.loads(lease.read_text())["released"] is True
    assert head.processes("pipeline.reshard") == []
    assert not [line for line in head.processes("ray::") if "write_target_shard" in line]
    assert not (target / "manifest.json").exists()

    between = status(str(target))
    assert between["state"] == "stopped"
    assert 20 <= between["finished"] < NUM_PARTS * NUM_SHARDS
    assert between["failure"].startswith("stopped on request")

    submit(head, code, "taken-up", *words, "--json", wait=False)
    assert head.wait("taken-up")["driver_exit_code"] == 0, head.logs("taken-up")
    assert json_result(head, "taken-up")["kept"] == between["finished"]
    assert status(str(target))["state"] == "done"

    reshard_here(tmp_path / "source", tmp_path / "here", mp=NUM_PARTS, dp=NUM_SHARDS, keep_state=True)
    assert checkpoint_files(target) == checkpoint_files(tmp_path / "here")


def wait_for_records(head: Head, target: Path, count: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if len(list((target / ".reshard" / "records").glob("*.json"))) >= count:
            return
        time.sleep(0.02)
    raise TimeoutError(head.logs("stopped"))
