"""A target without room, or without the right to write: code 5, the path, nothing published; mended, the rerun ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.children import Job
from tests.faults.targets import NUM_FILES, OPTIONS, SOURCE, leftovers, num_records, published


def mount(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Give a file system of 100 kB, and what mounts it again with other options."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system that is full or read-only")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = mount("-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder))
    if done.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")

    def again(options: str) -> None:
        assert mount("-o", f"remount,{options}", str(folder)).returncode == 0

    try:
        yield folder, again
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_room_lets_it_finish(
    small_disk: tuple[Path, Callable[[str], None]], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    disk, mount_again = small_disk
    target = disk / "out"
    job = Job(SOURCE, target, tmp_path, OPTIONS)
    code, said = job.run()
    assert code == 5
    assert f"{target}/" in said
    assert "No space left on device" in said
    assert "free some space" in said
    assert not (target / "manifest.json").exists()
    assert leftovers(target) == [], "the file without room takes none"
    kept = num_records(target)
    assert 0 < kept < NUM_FILES
    code, said = job.run()
    assert code == 5
    mount_again("size=10m")
    code, said = job.run()
    assert code == 0, said
    assert f'"kept": {kept}' in said
    assert published(target) == undisturbed


def test_a_read_only_target_is_refused_and_writable_again_it_is_finished(
    small_disk: tuple[Path, Callable[[str], None]], tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    disk, mount_again = small_disk
    job = Job(SOURCE, disk / "out", tmp_path, OPTIONS)
    mount_again("size=10m,ro")
    code, said = job.run()
    assert code == 5
    assert str(disk / "out") in said
    assert "Read-only file system" in said
    assert "not mounted read-only" in said
    assert list(disk.iterdir()) == []
    mount_again("rw")
    job.plan("record-written", "pause", 2)
    child = job.start()
    while not job.happened("record-written").exists():
        child.process.join(0.01)
    mount_again("ro")  # in the middle of the run
    job.happened("record-written").unlink()
    assert child.wait() == 5
    assert "Read-only file system" in child.said
    assert not (disk / "out" / "manifest.json").exists()
    mount_again("rw")
    code, said = job.run()
    assert code == 0, said
    assert published(disk / "out") == undisturbed
    assert leftovers(disk / "out") == []
    mount_again("ro")
    code, said = job.run()
    assert code == 0, "what is done needs no writing"
    assert '"already_done": true' in said
