"""Kill -9 of a run at every point there is: the same command completes, redoes what was unfinished, leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.status import status
from tasks import storage
from tasks.faults import DRIVER_POINTS, WORKER_POINTS
from tests.conftest import STORE
from tests.faults.children import Job
from tests.faults.targets import NUM_FILES, OPTIONS, SOURCE, Reader, leftovers, num_records, published, result_of
from tests.running import reshard_here
from tests.servers import S3Server

# (point, how often it is reached before the kill): a row for each kind of thing that a crash can leave behind
MOMENTS = [
    *[(point, 1) for point in WORKER_POINTS + DRIVER_POINTS if point != "old-manifest-removed"],
    ("source-indexed", 3),
    ("slice-planned", 2),
    ("plan-saved", 2),
    ("window-written", 3),
    ("window-written", NUM_FILES),
    ("file-written", 4),
    ("file-committed", 4),
    ("record-written", 4),
    ("record-written", NUM_FILES),
    ("name-taken", 2),  # the manifest's: the first is the lease's
]
DONE = {("manifest-written", 1), ("name-taken", 2)}
# There, names are taken in one request, without a moment in between.
S3_MOMENTS = [(point, 3 if point in WORKER_POINTS[3:] else 1) for point in WORKER_POINTS + DRIVER_POINTS]
S3_MOMENTS = [moment for moment in S3_MOMENTS if moment[0] not in ("old-manifest-removed", "name-taken")]
if STORE != "ceph":  # all of them by `make test-servers`, to save a minute here
    S3_MOMENTS = S3_MOMENTS[3::2]


@pytest.mark.parametrize(("point", "count"), MOMENTS)
def test_a_killed_run_is_finished_by_the_same_command(
    point: str, count: int, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    target = tmp_path / "targets" / "out"
    job = Job(SOURCE, target, tmp_path, OPTIONS)
    job.plan(point, "kill", count)
    with Reader(tmp_path / "targets") as reader:
        code, said = job.run()
        assert (code, job.happened(point).exists()) == (-signal.SIGKILL, True), said
        done = (target / "manifest.json").exists()
        assert done == ((point, count) in DONE)
        kept = num_records(target)
        code, said = job.run()
        assert code == 0, said
    assert published(target) == undisturbed
    assert leftovers(target) == []
    reader.look(target / "manifest.json")
    assert (reader.num_seen, reader.faults) == (1, [])
    result = result_of(said)
    assert result["already_done"] == done
    assert done or result["kept"] == kept


@pytest.mark.parametrize(("point", "count"), S3_MOMENTS)
def test_the_same_on_s3(
    point: str, count: int, tmp_path: Path, s3_server: S3Server, s3_bucket: str, undisturbed: dict[str, bytes]
) -> None:
    job = Job(SOURCE, f"{s3_bucket}/out", tmp_path, OPTIONS, s3_server.environment())
    job.plan(point, "kill", count)
    code, said = job.run()
    assert (code, job.happened(point).exists()) == (-signal.SIGKILL, True), said
    assert storage.exists(f"{s3_bucket}/out/manifest.json") == (point == "manifest-written")
    kept = num_records(f"{s3_bucket}/out")
    code, said = job.run()
    assert code == 0, said
    assert published(f"{s3_bucket}/out") == undisturbed
    assert point == "manifest-written" or result_of(said)["kept"] == kept


@pytest.mark.parametrize("point", ["old-manifest-removed", "fence-begun", "window-written", "files-finished"])
def test_an_overwrite_that_is_killed_leaves_nothing_of_the_old_target(
    point: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    target = tmp_path / "targets" / "out"
    reshard_here(SOURCE, target, mp=1, dp=7)
    old = {path.name for path in target.glob("*.pt")}
    assert old - undisturbed.keys(), "the old target has files that the new one does not replace"
    job = Job(SOURCE, target, tmp_path, {**OPTIONS, "overwrite": True})
    job.plan(point, "kill")
    with Reader(tmp_path / "targets") as reader:
        assert job.run()[0] == -signal.SIGKILL
        assert not (target / "manifest.json").exists()
        code, said = job.run()
        assert code == 0, said
    assert reader.faults == []
    assert published(target) == undisturbed
    assert leftovers(target) == []


def test_overwriting_an_unfinished_run_removes_its_files(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    target = tmp_path / "out"
    first = Job(SOURCE, target, tmp_path / "first", {"mp": 1, "dp": 7})
    first.plan("files-finished", "kill")
    assert first.run()[0] == -signal.SIGKILL
    code, said = Job(SOURCE, target, tmp_path / "second", OPTIONS).run()
    assert (code, "--overwrite" in said) == (7, True)
    code, said = Job(SOURCE, target, tmp_path / "third", {**OPTIONS, "overwrite": True}).run()
    assert code == 0, said
    assert published(target) == undisturbed


@pytest.mark.parametrize("point", [point for point in DRIVER_POINTS if point != "old-manifest-removed"])
def test_storage_that_fails_the_driver_is_told_as_such(
    point: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    target = tmp_path / "out"
    job = Job(SOURCE, target, tmp_path, OPTIONS)
    job.plan(point, "raise")
    code, said = job.run()
    assert code == 5
    assert "error[storage-unavailable]" in said
    assert str(target) in said
    assert "fault of this tool" not in said
    assert leftovers(target) == []
    code, said = job.run()
    assert code == 0, said
    assert published(target) == undisturbed


def test_a_failure_to_publish_is_in_the_status(tmp_path: Path) -> None:
    job = Job(SOURCE, tmp_path / "out", tmp_path, OPTIONS)
    job.plan("files-finished", "raise")
    assert job.run()[0] == 5
    told = status(str(tmp_path / "out"))
    assert (told["state"], told["finished"]) == ("stopped", NUM_FILES)
    assert "injected at files-finished" in told["failure"]


def test_a_run_that_is_killed_again_and_again_gets_done(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    job = Job(SOURCE, tmp_path / "out", tmp_path, OPTIONS)
    for point in ("planned", "lease-taken", "folder-opened", *WORKER_POINTS, "plan-saved", "files-finished"):
        job.plan(point, "kill")
        assert job.run()[0] == -signal.SIGKILL, point
        job.happened(point).unlink()
    assert job.run()[0] == 0
    assert published(tmp_path / "out") == undisturbed
    assert leftovers(tmp_path / "out") == []
