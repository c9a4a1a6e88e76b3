"""The contract on a local directory, and what only local files have: links, errno, descriptors."""

# ruff: noqa: PT012 - what a context does when it is left is what is tested

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tests.tasks.storage.contract import StorageContract, problem


class TestLocal(StorageContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path)

    def assert_nothing_left(self, temporary: str) -> None:
        assert os.listdir(temporary) == []

    def test_commit_leaves_nothing_in_the_temporary_directory(self, root: str, temporary: str) -> None:
        with storage.open_writer(storage.join(root, "a"), 3, temporary_directory=temporary) as writer:
            writer.write(b"123")
            assert len(os.listdir(temporary)) == 1
            writer.commit()
        assert os.listdir(temporary) == []

    def test_a_longest_name_can_be_written(self, root: str) -> None:
        name = "ü" * 127
        storage.write_small(storage.join(root, name), b"1")
        assert os.listdir(root) == [name]

    def test_a_file_cut_while_it_is_read_is_noticed_at_the_read(self, root: str) -> None:
        url = storage.join(root, "a.pt")
        identity = self.put(url, b"0123456789")
        with pytest.raises(ReshardError) as caught, storage.open_reader(identity) as reader:
            os.truncate(url, 5)
            reader.read(3, 7)
        assert problem(caught) == (ErrorKind.SOURCE, "source-changed")

    def test_a_file_deleted_while_it_is_read_is_noticed(self, root: str) -> None:
        url = storage.join(root, "a.pt")
        identity = self.put(url, b"0123456789")
        with pytest.raises(ReshardError) as caught, storage.open_reader(identity):
            os.unlink(url)
        assert problem(caught) == (ErrorKind.SOURCE, "source-changed")

    def test_links_are_followed_and_told(self, root: str) -> None:
        target = storage.join(root, "blobs", "abc")
        self.put(target, b"12345")
        snapshot = storage.join(root, "snapshot")
        os.mkdir(snapshot)
        os.symlink("../blobs/abc", storage.join(snapshot, "a.pt"))
        (listed,) = storage.list_files(snapshot)
        assert (listed.name, listed.size_bytes, listed.link_target) == ("a.pt", 5, "../blobs/abc")
        assert listed.identity == storage.stat(listed.identity.url)
        assert storage.read_small(listed.identity.url) == b"12345"
        os.unlink(target)
        with pytest.raises(ReshardError) as caught:
            storage.list_files(snapshot)
        assert problem(caught) == (ErrorKind.SOURCE, "broken-link")

    def test_leftovers_of_nfs_are_not_listed(self, root: str) -> None:
        Path(root, ".nfs0001").write_bytes(b"1")
        Path(root, "a.pt").write_bytes(b"1")
        assert [file.name for file in storage.list_files(root)] == ["a.pt"]

    def test_a_pipe_is_no_file(self, root: str) -> None:
        os.mkfifo(storage.join(root, "pipe"))
        assert storage.list_files(root) == ()
        with pytest.raises(ReshardError):
            storage.stat(storage.join(root, "pipe"))

    def test_a_component_which_is_a_file_cannot_be_written_below(self, root: str) -> None:
        self.put(storage.join(root, "a"), b"1")
        with pytest.raises(ReshardError) as caught:
            storage.write_small(storage.join(root, "a", "b"), b"1")
        assert problem(caught) == (ErrorKind.TASK, "cannot-write")
        assert not storage.exists(storage.join(root, "a", "b"))

    def test_another_file_system_for_the_temporary_file_is_refused(self, root: str) -> None:
        if os.stat("/dev/shm").st_dev == os.stat(root).st_dev or not os.access("/dev/shm", os.W_OK):
            pytest.skip("needs two file systems")
        with (
            pytest.raises(ReshardError) as caught,
            storage.open_writer(storage.join(root, "a"), 1, temporary_directory="/dev/shm") as writer,
        ):
            writer.write(b"1")
            writer.commit()
        assert problem(caught) == (ErrorKind.TASK, "cannot-write")
        assert "same file system" in str(caught.value)
        assert os.listdir(root) == []

    @pytest.fixture
    def small_limit(self) -> Iterator[None]:
        """A real limit on the size of files: writes come back short, then fail with EFBIG."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    @pytest.mark.usefixtures("small_limit")
    def test_a_write_that_stops_half_way_leaves_nothing(self, root: str, temporary: str) -> None:
        with (
            pytest.raises(ReshardError) as caught,
            storage.open_writer(storage.join(root, "a"), 3_000_000, temporary_directory=temporary) as writer,
        ):
            writer.write(bytes(3_000_000))
        assert problem(caught) == (ErrorKind.TASK, "cannot-write")
        assert storage.join(root, "a") in str(caught.value)
        assert os.listdir(temporary) == []

    def test_no_descriptor_is_left_open(self, root: str, temporary: str) -> None:
        def use() -> None:
            identity = self.put(storage.join(root, "a"), b"1")
            with storage.open_reader(identity) as reader:
                reader.read(0, 1)
            storage.create_only(storage.join(root, "b"), b"1")
            with storage.open_writer(storage.join(root, "c"), 1, temporary_directory=temporary):
                pass
            with pytest.raises(ReshardError):
                storage.open_reader(storage.FileIdentity(identity.url, 99, "0"))

        use()
        before = len(os.listdir("/proc/self/fd"))
        use()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_rival_that_took_the_name_and_cleaned_up_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, link = tmp_path / "lease.json", os.link

    def link_late(source: str, target: str) -> None:
        url.write_bytes(b"theirs")
        os.unlink(source)
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert storage.create_only(str(url), b"ours") is False
    assert url.read_bytes() == b"theirs"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=2000), max_size=8), cuts=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_any_pieces_and_any_range_are_exact(tmp_path: Path, pieces: list[bytes], cuts: list[float]) -> None:
    data = b"".join(pieces)
    url = str(tmp_path / "a.pt")
    with storage.open_writer(url, len(data), temporary_directory=str(tmp_path)) as writer:
        for piece in pieces:
            writer.write(piece)
        identity = writer.commit()
    start, stop = sorted(int(cut * len(data)) for cut in cuts)
    with storage.open_reader(identity) as reader:
        assert reader.read(start, stop - start) == data[start:stop]
