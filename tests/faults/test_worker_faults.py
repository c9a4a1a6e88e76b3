"""What happens to single workers of a real Ray, while the run goes on: kills, errors that pass, errors that stay."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.status import in_words, status
from tasks.faults import VARIABLE, WORKER_POINTS
from tests.faults.programs import command, start, told_by
from tests.faults.targets import NUM_FILES, WORDS, Reader, leftovers, num_records, published
from tests.servers import S3Server

KILLS = [*((point, 1) for point in WORKER_POINTS), ("window-written", 4), ("file-committed", NUM_FILES)]
OTHERS = {
    "passes": ("window-written:raise:3",),
    "passes twice": ("file-written:raise:2", "record-written:raise:3"),
    "stays": ("file-written:raise:always",),
    "crashes for ever": ("file-committed:kill:always",),
    "cannot be mended": ("window-written:fail:3",),
    "cannot be planned": ("slice-planned:raise:always",),
}
AGAIN = ("stays", "crashes for ever", "cannot be mended", "cannot be planned")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def reader(targets: Path) -> Reader:
    return Reader(targets)


@pytest.fixture(scope="module")
def told(targets: Path, reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases on one Ray, each into a target of its own; status and the state of the target in between."""
    folder = tmp_path_factory.mktemp("faults")
    kills = {f"{point} {count}": (f"{point}:kill:{count}",) for point, count in KILLS}
    cases = [
        {"name": name, "faults": faults, "words": [*words_into(targets / name)]}
        for name, faults in {**kills, **OTHERS}.items()
    ]
    with reader:
        return told_by("tests.faults.sessions", folder, text=json.dumps(cases))


@pytest.fixture(scope="module")
def finished(told: dict[str, Any], targets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run those that failed once more, after a look at what they left."""
    for name in AGAIN:
        state = status(str(targets / name)) if (targets / name).exists() else None
        told[name]["status"] = state
        told[name]["manifest"] = (targets / name / "manifest.json").exists()
    cases = [{"name": name, "faults": [], "words": words_into(targets / name)} for name in AGAIN]
    return told_by("tests.faults.sessions", tmp_path_factory.mktemp("faults"), text=json.dumps(cases))


def words_into(target: Path) -> list[str]:
    return [WORDS[0], str(target), *WORDS[1:]]


@pytest.mark.parametrize(("point", "count"), KILLS)
def test_a_killed_worker_costs_one_retry(
    point: str, count: int, told: dict[str, Any], targets: Path, undisturbed: dict[str, bytes]
) -> None:
    seen = told[f"{point} {count}"]
    assert seen["code"] == 0, seen["said"]
    assert seen["happened"] == [f"{point}:happened"]
    assert 1 <= seen["result"]["retries"] <= 2
    assert "retrying" in seen["said"]
    assert published(targets / f"{point} {count}") == undisturbed
    assert leftovers(targets / f"{point} {count}") == []


@pytest.mark.parametrize("name", ["passes", "passes twice"])
def test_an_error_that_passes_is_retried_and_told(
    name: str, told: dict[str, Any], targets: Path, undisturbed: dict[str, bytes]
) -> None:
    seen = told[name]
    assert seen["code"] == 0, seen["said"]
    assert seen["result"]["retries"] == len(OTHERS[name]) == seen["said"].count("retrying write")
    assert "after attempt 1: TransientStorageError" in seen["said"]
    assert f"{targets / name}/" in seen["said"], "the file is named"
    assert published(targets / name) == undisturbed


@pytest.mark.parametrize(("name", "cause"), [("stays", "TransientStorageError"), ("crashes for ever", "WorkerCrashed")])
def test_what_fails_too_often_ends_the_run_with_5_and_status_tells_it(
    name: str, cause: str, told: dict[str, Any], finished: dict[str, Any], targets: Path, undisturbed: dict[str, bytes]
) -> None:
    seen = told[name]
    assert seen["code"] == seen["result"]["exit_code"] == 5
    assert "failed after 4 attempts" in seen["said"]
    assert cause in seen["said"]
    assert "next:" in seen["said"]
    assert seen["manifest"] is False
    assert seen["status"]["state"] == "stopped"
    assert "write_target_shard write" in seen["status"]["failure"]
    assert cause in in_words(seen["status"])
    assert finished[name]["code"] == 0, finished[name]["said"]
    assert published(targets / name) == undisturbed
    assert leftovers(targets / name) == []


def test_an_error_that_does_not_pass_ends_the_run_at_once_and_names_the_file(
    told: dict[str, Any], finished: dict[str, Any], targets: Path, undisturbed: dict[str, bytes]
) -> None:
    seen = told["cannot be mended"]
    assert (seen["code"], seen["said"].count("retrying")) == (5, 0)
    assert "error[injected]" in seen["said"]
    assert f"{targets}/cannot be mended/checkpoint_last-model_part-" in seen["said"]
    assert "error[injected]" in seen["status"]["failure"]
    assert finished["cannot be mended"]["code"] == 0
    assert published(targets / "cannot be mended") == undisturbed


def test_a_failure_before_the_first_write_leaves_no_target(
    told: dict[str, Any], finished: dict[str, Any], targets: Path, undisturbed: dict[str, bytes]
) -> None:
    seen = told["cannot be planned"]
    assert seen["code"] == 5
    assert seen["status"] is None, "there is not even a folder"
    assert finished["cannot be planned"]["code"] == 0
    assert published(targets / "cannot be planned") == undisturbed


def test_killed_workers_on_s3(
    s3_bucket: str, s3_server: S3Server, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    points = ("window-written:kill:4", "file-written:kill:3", "file-committed:kill:2", "record-written:kill:4")
    words = [WORDS[0], f"{s3_bucket}/out", *WORDS[1:]]
    cases = [{"name": "all", "faults": points, "words": words}]
    seen = told_by("tests.faults.sessions", tmp_path, text=json.dumps(cases), **s3_server.environment())["all"]
    assert seen["code"] == 0, seen["said"]
    assert len(seen["happened"]) == len(points)
    assert published(f"{s3_bucket}/out") == undisturbed


@pytest.mark.parametrize("fault", ["files-finished:kill:1", "window-written:pause:4"])
def test_a_killed_driver_takes_its_workers_along_and_the_same_command_finishes(
    fault: str, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    target, faults = tmp_path / "out", tmp_path / "faults"
    faults.mkdir()
    (faults / fault).touch()
    happened = faults / f"{fault.partition(':')[0]}:happened"
    words = ("pipeline.reshard", *words_into(target), "--json")
    with start(*words, **{VARIABLE: str(faults)}) as driver:
        deadline = time.monotonic() + 60
        while not happened.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert happened.exists()
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
    assert not (target / "manifest.json").exists()
    kept = num_records(target)
    again = command(*words)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["kept"] >= kept
    assert published(target) == undisturbed
    assert leftovers(target) == []


def test_no_reader_of_the_manifest_ever_saw_something_half_written(
    told: dict[str, Any], reader: Reader, targets: Path
) -> None:
    assert reader.faults == []
    assert reader.num_seen == sum(seen["code"] == 0 for seen in told.values())
    assert reader.num_looks > 100
