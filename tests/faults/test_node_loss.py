"""A machine dies while it writes a file, or seems to: the run ends well on the others, and the bytes are right."""

from __future__ import annotations

from pathlib import Path

from tests.faults.programs import told_by
from tests.faults.targets import NUM_FILES, Reader, leftovers, published


def test_lost_machines_and_their_zombies(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with Reader(tmp_path) as reader:
        told = told_by("tests.faults.two_nodes", tmp_path)
    assert told["silent"]["zombie_wrote"]
    assert told["machine"]["retries"] >= 1, "nothing was lost"
    for name, seen in told.items():
        assert seen["files"] == NUM_FILES
        assert published(tmp_path / name) == undisturbed, name
        assert leftovers(tmp_path / name) == [], name
    assert (reader.faults, reader.num_seen) == ([], 2)
