"""What a real NFS server and two clients of it do to the promises of storage, and to runs. Runs in the guest only."""

# ruff: noqa: PT012 - what a context does when it is left is what is tested

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
import uuid
import zlib
from pathlib import Path

import pytest

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tasks.storage import TransientStorageError, limited
from tests.faults.children import Job
from tests.faults.targets import NUM_FILES, OPTIONS, SOURCE, leftovers, published, result_of
from tests.tasks.storage.contract import StorageContract, problem

if "RESHARD_NFS_VERSION" not in os.environ:
    pytest.skip("make test-servers runs these in a guest that has NFS", allow_module_level=True)

FIRST, SECOND, FULL, SERVER = (Path("/mnt", name) for name in ("first", "second", "full", "export"))
_CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def folder() -> str:
    """The name of a new folder that both clients see."""
    name = uuid.uuid4().hex
    (SERVER / name).mkdir()
    return name


class TestNfs(StorageContract):
    """The contract of all storages, by one client."""

    @pytest.fixture
    def root(self, folder: str) -> str:
        return str(FIRST / folder)

    def put(self, url: str, data: bytes) -> storage.FileIdentity:
        tick()
        identity = super().put(url, data)
        tick()
        return identity


def tick() -> None:
    """Wait until the clock of the guest's file system has moved on: two changes in one tick look the same."""
    time.sleep(0.03)


def write_units(root: str, size: int, numbers: list[int], seed: int) -> None:
    url, place = storage.join(root, "large.pt"), storage.join(root, "places", "large")
    unit = storage.unit_bytes(url, size)
    assert unit is not None
    with storage.open_pieces(url, size, place=place) as writer:
        for number in numbers:
            writer.write(number * unit, bytes([seed + number]) * min(unit, size - number * unit))
        writer.finish()


def test_two_machines_write_units_of_one_file_at_once(folder: str) -> None:
    size = 40_000_003
    roots = [str(FIRST / folder), str(SECOND / folder)]
    workers = [
        _CONTEXT.Process(target=write_units, args=(root, size, list(range(number, 10, 2)), 65))
        for number, root in enumerate(roots)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    url, place = storage.join(roots[1], "large.pt"), storage.join(roots[1], "places", "large")
    expected = b"".join(bytes([65 + number]) * min(4 << 20, size - number * (4 << 20)) for number in range(10))
    assert storage.holds(place, [(0, size, zlib.crc32(expected))], ())
    with storage.open_pieces(url, size, place=place, receipts=()) as last:
        last.finish()
        last.commit(())
    assert storage.read_small(storage.join(roots[0], "large.pt")) == expected
    assert (SERVER / folder / "large.pt").read_bytes() == expected


def test_of_creators_on_two_machines_one_wins(folder: str) -> None:
    def create(root: str, number: int) -> None:
        if storage.create_only(storage.join(root, "only"), str(number).encode()):
            Path(root, f"won-{number}").touch()

    workers = [
        _CONTEXT.Process(target=create, args=(str((FIRST, SECOND)[number % 2] / folder), number)) for number in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    won = [path.name for path in (SERVER / folder).iterdir() if path.name.startswith("won-")]
    assert won == [f"won-{(SERVER / folder / 'only').read_text()}"]


def test_a_file_replaced_on_another_machine_is_noticed(folder: str) -> None:
    url = str(FIRST / folder / "a.pt")
    storage.write_small(url, b"before")
    tick()
    with pytest.raises(ReshardError) as caught, storage.open_reader(storage.stat(url)) as reader:
        assert reader.read(0, 6) == b"before"
        (SERVER / folder / "a.pt").unlink()  # a handle to what is gone: ESTALE
        (SERVER / folder / "a.pt").write_bytes(b"after!")
        subprocess.run(["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"], check=True)
        reader.read(0, 6)
    assert problem(caught) == (ErrorKind.SOURCE, "source-changed")


def test_a_file_made_on_another_machine_is_seen_at_once(folder: str) -> None:
    here, there = str(FIRST / folder / "a.pt"), str(SECOND / folder / "a.pt")
    assert not storage.exists(here)
    assert storage.list_files(storage.parent(here)) == ()
    storage.write_small(there, b"1")
    assert [(file.name, file.size_bytes) for file in storage.list_files(storage.parent(here))] == [("a.pt", 1)]
    assert storage.read_small(here) == b"1"
    tick()
    storage.write_small(there, b"22")
    assert storage.stat(here).size_bytes == 2
    assert storage.read_small(here) == b"22"


def test_a_full_server_is_a_clear_error_and_leaves_nothing() -> None:
    url = str(FULL / "large.pt")
    with (
        pytest.raises(ReshardError) as caught,
        storage.open_writer(url, 30_000_000, temporary_directory=str(FULL)) as writer,
    ):
        for _ in range(30):
            writer.write(bytes(1_000_000))
        writer.commit()
    assert problem(caught) == (ErrorKind.TASK, "cannot-write")
    assert "space" in str(caught.value)
    # Not counting what the client itself keeps of a file that is deleted while it is written back (.nfs...).
    assert storage.list_files(str(FULL)) == ()


@pytest.mark.parametrize("count", [1, 4, NUM_FILES])
def test_a_run_killed_on_one_machine_is_finished_on_the_other(folder: str, count: int, tmp_path: Path) -> None:
    job = Job(SOURCE, SERVER / folder / "undisturbed", tmp_path / "undisturbed", OPTIONS)
    assert job.run()[0] == 0
    first = Job(SOURCE, FIRST / folder / "out", tmp_path / "first", OPTIONS)
    first.plan("record-written", "kill", count)
    assert first.run()[0] == -signal.SIGKILL
    code, said = Job(SOURCE, SECOND / folder / "out", tmp_path / "second", OPTIONS).run()
    assert code == 0, said
    assert result_of(said)["kept"] == count
    assert published(SERVER / folder / "out") == published(SERVER / folder / "undisturbed")
    assert published(FIRST / folder / "out") == published(SERVER / folder / "undisturbed")
    assert leftovers(SERVER / folder / "out") == []


def test_a_server_that_is_gone_is_waited_for_no_longer_than_said(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_PATIENCE_SECONDS", "2")
    url = str(SECOND / folder / "a.pt")
    storage.write_small(url, bytes(1_000_000))
    subprocess.run(["rpc.nfsd", "0"], check=True)
    ended = threading.Event()

    @limited
    def write() -> None:
        try:
            storage.write_small(url, bytes(2_000_000))
        finally:
            ended.set()

    try:
        with pytest.raises(TransientStorageError, match="no answer for"):
            write()
    finally:
        subprocess.run(["rpc.nfsd", "4"], check=True)
    assert ended.wait(120)
    assert storage.read_small(str(FIRST / folder / "a.pt")) == bytes(1_000_000)
