"""Large files, written in pieces: killed anywhere, and only what has no record is done again."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.status import in_words, status
from tasks import storage
from tasks.errors import ReshardError
from tasks.unflatten_source_shard import unflatten_source_shard
from tests.faults.children import Job
from tests.faults.programs import told_by
from tests.faults.targets import IN_PIECES, LARGE_SHAPE, leftovers, published, records, result_of
from tests.faults.test_takeover import believe_dead, let_go, paused_at
from tests.running import reshard_here
from tests.servers import S3Server

# (point, how often it is reached before the kill): each state that a file in pieces can be in
MOMENTS = [
    ("window-written", 1),
    ("window-written", 4),
    ("piece-written", 1),
    ("piece-written", 3),
    ("piece-recorded", 4),
    ("piece-recorded", 1),
    ("file-written", 1),
    ("file-committed", 1),
    ("record-written", 1),
    ("files-finished", 1),
]


def kill(job: Job, point: str, count: int = 1) -> None:
    """Run a job that is killed at a point."""
    job.plan(point, "kill", count)
    code, said = job.run()
    assert code == -signal.SIGKILL, said


def test_pieces_make_the_same_file_and_leave_nothing_else(
    large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    code, said = Job(large_source, tmp_path / "out", tmp_path, IN_PIECES).run()
    assert code == 0, said
    assert published(tmp_path / "out") == whole
    assert [name for name in records(tmp_path / "out") if ".piece-" in name] == []
    assert list((tmp_path / "out" / ".reshard" / "pieces").iterdir()) == []
    assert result_of(said)["bytes_written"] == sum(map(len, whole.values())) - len(whole["manifest.json"])


@pytest.mark.parametrize(("point", "count"), MOMENTS)
def test_a_killed_run_writes_only_the_pieces_that_have_no_record(
    point: str, count: int, large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    job = Job(large_source, target, tmp_path, IN_PIECES)
    kill(job, point, count)
    assert not (target / "manifest.json").exists()
    pieces = [name for name in records(target) if ".piece-" in name]
    told = status(str(target))
    assert (told["state"], told["to_do"] == []) == ("stopped", point in ("record-written", "files-finished"))
    if pieces and told["to_do"]:
        assert f"({len(pieces)} of 4 pieces are there)" in in_words(told)
    code, said = job.run()
    assert code == 0, said
    assert published(target) == whole
    assert leftovers(target) == []
    assert list((target / ".reshard" / "pieces").iterdir()) == []
    result = result_of(said)
    size = len(whole[next(name for name in whole if name.endswith(".pt"))])
    if told["to_do"]:
        # Each piece leaves at most two units to the node of the file.
        assert size - result["bytes_written"] >= len(pieces) * ((8 << 20) - 2 * (4 << 20))
        assert ("were written already" in said) == bool(pieces and result["bytes_written"] < size)
    else:
        assert (result["kept"], result["bytes_written"]) == (1, 0)


def test_rows_that_two_files_share_are_read_once_also_after_a_kill(large_source: Path, tmp_path: Path) -> None:
    """Files of parts that take columns of the same rows are written side by side, and have records of their own."""
    together = {**IN_PIECES, "mp": 4, "piece_bytes": 512 << 20}
    alone = reshard_here(large_source, tmp_path / "whole", **{**together, "memory_bytes": 24 << 20})
    expected = published(tmp_path / "whole")
    target = tmp_path / "out"
    job = Job(large_source, target, tmp_path, together)
    kill(job, "piece-recorded", 1)
    assert len(records(target)) == 1
    code, said = job.run()
    assert code == 0, said
    assert published(target) == expected
    assert leftovers(target) == []
    undisturbed = reshard_here(large_source, tmp_path / "again", **together)
    assert published(tmp_path / "again") == expected
    needed, spans = undisturbed["bytes_needed"], undisturbed["span_bytes"]
    assert spans > 1.2 * needed, "each file alone would read what the other one needs"
    assert undisturbed["bytes_read"] < 1.05 * needed
    num_storages = 2 * 4 * (LARGE_SHAPE.layers + 1) + 2  # flat parameters in each file, and a version for each part
    assert undisturbed["source_records_proven"] == num_storages
    assert alone["source_records_proven"] < num_storages, "spans that overlap prove less"


def test_a_flipped_bit_in_rows_that_files_share_is_found(large_source: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(large_source, source)
    victim = source / "checkpoint_last-model_part-1-shard2.pt"
    index = unflatten_source_shard(storage.stat(str(victim)), 1, 2)
    tensor = max(index.tensors, key=lambda each: each.shape)
    with victim.open("r+b") as file:
        file.seek(tensor.offset_bytes + tensor.shape[0])  # its middle, at two bytes an element
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(ReshardError) as caught:
        reshard_here(source, tmp_path / "out", **{**IN_PIECES, "mp": 4, "piece_bytes": 512 << 20})
    assert caught.value.exit_code == 3
    assert victim.name in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_so_are_those_of_files_on_s3(large_source: Path, tmp_path: Path, s3_bucket: str) -> None:
    together = {**IN_PIECES, "mp": 4, "piece_bytes": 512 << 20}
    reshard_here(large_source, tmp_path / "alone", **{**together, "memory_bytes": 24 << 20})
    result = reshard_here(large_source, f"{s3_bucket}/out", **together)
    expected, found = published(tmp_path / "alone"), published(f"{s3_bucket}/out")
    del expected["manifest.json"], found["manifest.json"]
    assert found == expected
    assert result["bytes_read"] < 1.05 * result["bytes_needed"]


@pytest.mark.parametrize("damage", ["bit", "short", "gone", "record"])
def test_a_piece_whose_bytes_are_not_those_of_its_record_is_written_again(
    damage: str, large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    job = Job(large_source, target, tmp_path, IN_PIECES)
    kill(job, "piece-recorded", 3)
    (unfinished,) = (target / ".reshard" / "pieces").iterdir()
    first = next((target / ".reshard" / "records").glob("*.piece-0-of-4.json"))
    if damage == "bit":
        with unfinished.open("r+b") as file:
            file.seek(5_000_000)
            byte = file.read(1)
            file.seek(5_000_000)
            file.write(bytes([byte[0] ^ 1]))
    elif damage == "short":
        with unfinished.open("r+b") as file:
            file.truncate(6_000_000)
    elif damage == "gone":
        unfinished.unlink()
    else:
        first.write_bytes(first.read_bytes()[:-10])
    code, said = job.run()
    assert code == 0, said
    assert published(target) == whole
    assert result_of(said)["bytes_written"] > 8 << 20


def test_pieces_of_a_published_file_are_not_mixed_with_those_of_a_new_one(
    large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """Killed behind the commit, begun anew with other pieces, and resumed with the first ones."""
    target = tmp_path / "out"
    first = Job(large_source, target, tmp_path / "first", IN_PIECES)
    kill(first, "file-committed")
    second = Job(large_source, target, tmp_path / "second", {**IN_PIECES, "piece_bytes": 16 << 20})
    kill(second, "piece-recorded")
    code, said = Job(large_source, target, tmp_path / "third", IN_PIECES).run()
    assert code == 0, said
    assert published(target) == whole


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_record_of_a_piece_that_a_power_cut_took_does_no_harm(
    lost: int, large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    job = Job(large_source, target, tmp_path, IN_PIECES)
    kill(job, "file-committed")
    (target / ".reshard" / "records" / f"checkpoint_last.pt.piece-{lost}-of-4.json").unlink()
    code, said = job.run()
    assert code == 0, said
    assert published(target) == whole
    assert list((target / ".reshard" / "pieces").iterdir()) == []


def test_the_second_of_two_attempts_finds_the_work_of_the_first(
    large_source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """As where a machine is believed dead and is not: both commit."""
    target = tmp_path / "out"
    sleeper = Job(large_source, target, tmp_path / "sleeper", IN_PIECES)
    child = paused_at(sleeper, "commit-allowed")
    believe_dead(target)
    code, said = Job(large_source, target, tmp_path / "second", IN_PIECES).run()
    assert code == 0, said
    let_go(sleeper, "commit-allowed")
    assert child.wait() in (5, 7), child.said
    assert "No such file" not in child.said
    assert published(target) == whole


def test_another_plan_forgets_the_pieces(large_source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    job = Job(large_source, target, tmp_path, IN_PIECES)
    kill(job, "piece-recorded", 2)
    reshard_here(large_source, target, mp=2, dp=2, overwrite=True)
    assert list((target / ".reshard" / "pieces").iterdir()) == []
    assert [name for name in records(target) if ".piece-" in name] == []


def test_killed_workers_of_pieces(large_source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    options = ["--mp", "1", "--dp", "1", "--layout", "unflat", "--state", "drop", "--piece", "8MiB"]
    points = ("window-written", "piece-recorded", "file-committed")
    words = {point: [str(large_source), str(tmp_path / "out" / point), *options] for point in points}
    cases = [{"name": point, "faults": [f"{point}:kill:1"], "words": words[point]} for point in points]
    (tmp_path / "faults").mkdir()
    told = told_by("tests.faults.sessions", tmp_path / "faults", text=json.dumps(cases))
    for point in points:
        seen = told[point]
        assert seen["code"] == 0, seen["said"]
        assert seen["happened"] == [f"{point}:happened"]
        assert published(tmp_path / "out" / point) == whole


@pytest.mark.parametrize(("point", "count"), [*MOMENTS[1:9:2], ("piece-recorded", 3)])
def test_a_killed_run_into_s3_goes_on_with_its_upload(
    point: str,
    count: int,
    large_source: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    s3_bucket: str,
    s3_server: S3Server,
) -> None:
    target = f"{s3_bucket}/out"
    job = Job(large_source, target, tmp_path, IN_PIECES, s3_server.environment())
    kill(job, point, count)
    pieces = [name for name in records(target) if ".piece-" in name]
    code, said = job.run()
    assert code == 0, said
    assert published(target) == whole
    assert storage.leftovers(target) == ()
    assert not storage.exists(f"{target}/.reshard/pieces")
    result = result_of(said)
    size = len(whole[next(name for name in whole if name.endswith(".pt"))])
    if pieces:
        assert ("were written already" in said) == (0 < result["bytes_written"] < size)
