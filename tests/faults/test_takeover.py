"""Two runs, one target: the second is refused, or takes over from the dead; what the dead still write is harmless."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tasks import storage
from tasks.storage import TransientStorageError
from tests.faults.children import Child, Job
from tests.faults.programs import command
from tests.faults.targets import OPTIONS, SOURCE, WORDS, leftovers, published
from tests.running import reshard_here
from tests.servers import S3Server

OTHER_PLAN = {"mp": 1, "dp": 3, "prefix": "checkpoint_last"}


def paused_at(job: Job, point: str, count: int = 1) -> Child:
    job.plan(point, "pause", count)
    child = job.start()
    deadline = time.monotonic() + 30
    while not job.happened(point).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert job.happened(point).exists(), child.said
    return child


def let_go(job: Job, point: str) -> None:
    job.happened(point).unlink()


def believe_dead(target: Path | str) -> None:
    """Make the holder of the lease look like a process that is gone."""
    folder = storage.join(str(target), ".reshard", "lease")
    newest = max(file.name for file in storage.list_files(folder) if file.name.endswith(".json"))
    url = storage.join(folder, newest)
    storage.write_small(url, json.dumps({**json.loads(storage.read_small(url)), "born": "long ago"}).encode())


@pytest.mark.parametrize("point", ["lease-taken", "window-written", "files-finished"])
def test_a_second_run_is_refused_while_the_first_is_at_work(
    point: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    first, second = (Job(SOURCE, tmp_path / "out", tmp_path / name, OPTIONS) for name in ("first", "second"))
    child = paused_at(first, point)
    code, said = second.run()
    assert code == 7
    assert f"in use by process {child.process.pid}" in said
    assert "next:" in said
    let_go(first, point)
    assert child.wait() == 0, child.said
    assert published(tmp_path / "out") == undisturbed


def test_the_command_itself_is_refused_with_7(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    job = Job(SOURCE, tmp_path / "out", tmp_path, OPTIONS)
    child = paused_at(job, "window-written")
    done = command("pipeline.reshard", WORDS[0], tmp_path / "out", *WORDS[1:])
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert f"in use by process {child.process.pid}" in done.stderr
    let_go(job, "window-written")
    assert child.wait() == 0, child.said
    assert published(tmp_path / "out") == undisturbed


def test_a_dead_run_whose_parent_has_not_noticed_is_dead(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """As in a container whose first process does not care for its children."""
    job = Job(SOURCE, tmp_path / "out", tmp_path, OPTIONS)
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            from pipeline.lease import Lease  # a process of three lines, which ends without a goodbye

            Lease(str(tmp_path / "out" / ".reshard" / "lease"), "plan").__enter__()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        os._exit(0)
    try:
        lease = tmp_path / "out" / ".reshard" / "lease" / "000001.json"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not (lease.exists() and state_of(holder_of(lease)) == "Z"):
            time.sleep(0.01)
        assert state_of(holder_of(lease)) == "Z"
        code, said = job.run()
        assert code == 0, said
        assert published(tmp_path / "out") == undisturbed
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)


def holder_of(lease: Path) -> int:
    return int(json.loads(lease.read_text())["process"])


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "point", ["window-written", "file-written", "commit-allowed", "file-committed", "record-written"]
)
@pytest.mark.parametrize("plan", ["same", "other"])
def test_a_run_that_was_believed_dead_and_wakes_up_spoils_nothing(
    point: str, plan: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    target = tmp_path / "out"
    options: dict[str, Any] = OPTIONS if plan == "same" else OTHER_PLAN
    sleeper = Job(SOURCE, target, tmp_path / "sleeper", options)
    child = paused_at(sleeper, point)
    believe_dead(target)
    code, said = Job(SOURCE, target, tmp_path / "second", {**OPTIONS, "overwrite": plan == "other"}).run()
    assert code == 0, said
    assert published(target) == undisturbed
    let_go(sleeper, point)
    assert child.wait() in (5, 7), child.said
    assert published(target) == undisturbed
    assert leftovers(target) == []


@pytest.mark.parametrize("point", ["file-written", "commit-allowed"])
def test_a_run_that_wakes_up_spoils_nothing_on_s3(
    point: str, tmp_path: Path, undisturbed: dict[str, bytes], s3_bucket: str, s3_server: S3Server
) -> None:
    target = f"{s3_bucket}/out"
    sleeper = Job(SOURCE, target, tmp_path / "sleeper", OTHER_PLAN, s3_server.environment())
    child = paused_at(sleeper, point)
    believe_dead(target)
    again = {**OPTIONS, "overwrite": True}
    code, said = Job(SOURCE, target, tmp_path / "second", again, s3_server.environment()).run()
    assert code == 0, said
    let_go(sleeper, point)
    assert child.wait() in (5, 7), child.said
    assert published(target) == undisturbed
    assert storage.leftovers(target) == ()


def test_a_takeover_that_was_killed_is_taken_up(
    tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sleeping worker of another plan left must be gone before a run goes on, also if that is a later run."""
    target = tmp_path / "out"
    sleeper = Job(SOURCE, target, tmp_path / "sleeper", OTHER_PLAN)
    child = paused_at(sleeper, "commit-allowed")
    believe_dead(target)
    second = Job(SOURCE, target, tmp_path / "second", {**OPTIONS, "overwrite": True})
    second.plan("fence-begun", "kill")
    assert second.run()[0] == -signal.SIGKILL

    def fails() -> None:
        raise TransientStorageError("cannot be removed")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "leftovers", lambda *_, **__: (fails,))
        for overwrite in (True, False):
            with pytest.raises(TransientStorageError, match="cannot be removed"):
                reshard_here(SOURCE, target, keep_state=True, **{**OPTIONS, "overwrite": overwrite})
    code, said = second.run()
    assert code == 0, said
    let_go(sleeper, "commit-allowed")
    assert child.wait() in (5, 7), child.said
    assert published(target) == undisturbed


@pytest.mark.parametrize("folder", [".", ".reshard", ".reshard/temporary", ".reshard/lease"])
def test_what_a_kill_behind_the_manifest_left_is_removed_by_the_next_run(folder: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    reshard_here(SOURCE, target, keep_state=True, **OPTIONS)
    (target / folder / f".000001.json.{'0f' * 16}.part").touch()
    for _ in range(2):
        code, said = Job(SOURCE, target, tmp_path / "scratch", OPTIONS).run()
        assert (code, '"already_done": true' in said) == (0, True), said
        assert leftovers(target) == []
    leases = list((target / ".reshard" / "lease").glob("*.json"))
    assert len(leases) == 2, "a lease is taken only where there is something to remove"
