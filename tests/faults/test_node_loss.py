"""A machine dies while it writes a file, or seems to: the run ends well on the others, and the bytes are right."""

from __future__ import annotations

from pathlib import Path

from tasks import storage
from tests.faults.programs import told_by
from tests.faults.targets import NUM_FILES, Reader, leftovers, published
from tests.servers import S3Server


def test_lost_machines_and_their_zombies(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with Reader(tmp_path) as reader:
        told = told_by("tests.faults.two_nodes", tmp_path, tmp_path)
    assert told["silent"]["zombie_wrote"]
    assert told["machine"]["retries"] >= 1, "nothing was lost"
    for name, seen in told.items():
        assert seen["files"] == NUM_FILES
        assert published(tmp_path / name) == undisturbed, name
        assert leftovers(tmp_path / name) == [], name
    assert (reader.faults, reader.num_seen) == ([], 2)


def test_lost_machines_that_write_to_s3(
    tmp_path: Path, undisturbed: dict[str, bytes], s3_bucket: str, s3_server: S3Server
) -> None:
    told = told_by("tests.faults.two_nodes", tmp_path, s3_bucket, **s3_server.environment())
    assert told["machine"]["retries"] >= 1, "nothing was lost"
    for name, seen in told.items():
        assert seen["files"] == NUM_FILES
        assert published(f"{s3_bucket}/{name}") == undisturbed, name
        assert storage.leftovers(f"{s3_bucket}/{name}") == (), name
