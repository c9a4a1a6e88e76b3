"""What every backend must do, as tests; a backend's test file subclasses this and gives the fixture `root`."""

# ruff: noqa: PT012 - what a context does when it is left is what is tested

from __future__ import annotations

import os
import pickle
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks import storage
from tasks.errors import ErrorKind, ReshardError

STRANGE_NAMES = ("a b.pt", "ü-ß-日本.pt", "1+1=2.pt", "100%.pt", "a&b#c.pt", "it's.pt")


def problem(caught: pytest.ExceptionInfo[ReshardError]) -> tuple[ErrorKind, str]:
    first = caught.value.problems[0]
    return first.kind, first.reference


class StorageContract:
    """Subclasses give `root`: the URL of an empty directory."""

    large_bytes = 20_000_001
    "more than one window of every backend, and no multiple of anything"

    num_leftovers = 1
    "that one killed writer leaves where others see it"

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def temporary(self, root: str) -> str:
        return storage.join(root, "tmp")

    def put(self, url: str, data: bytes) -> storage.FileIdentity:
        storage.write_small(url, data)
        return storage.stat(url)

    def test_written_bytes_are_read_back_exactly(self, root: str, temporary: str) -> None:
        data = os.urandom(self.large_bytes)
        url = storage.join(root, "large.pt")
        with storage.open_writer(url, len(data), temporary_directory=temporary) as writer:
            for start in range(0, len(data), 3_333_333):
                writer.write(memoryview(data)[start : start + 3_333_333])
            identity = writer.commit()
        assert identity == storage.stat(url)
        assert identity.size_bytes == len(data)
        buffer = bytearray(len(data))
        with storage.open_reader(identity) as reader:
            reader.read_into(0, memoryview(buffer))
            assert buffer == data
            assert reader.read(17_000_000, 1_234_567) == data[17_000_000:18_234_567]
            assert reader.read(len(data), 0) == b""

    def test_what_a_killed_writer_left_can_be_found_and_removed(self, root: str, temporary: str) -> None:
        assert storage.leftovers(storage.join(root, "missing")) == ()
        self.put(storage.join(root, "other.pt"), b"there")
        writer = storage.open_writer(storage.join(root, "large.pt"), self.large_bytes, temporary_directory=root)
        writer.write(bytes(self.large_bytes))
        names = {file.name for file in storage.list_files(root)} - {"other.pt"}
        found = storage.leftovers(root)
        assert len(found) == self.num_leftovers
        for remove in found:
            remove()
        assert storage.leftovers(root) == ()
        assert {file.name for file in storage.list_files(root)} == {"other.pt"}
        if self.num_leftovers:
            # The writer was not dead after all. Now it must not publish.
            with pytest.raises((ReshardError, storage.TransientStorageError)):
                writer.commit()
        writer.abort()
        assert len(names) <= 1
        assert not storage.exists(storage.join(root, "large.pt"))

    def test_a_file_is_written_in_pieces_by_several_writers(self, root: str) -> None:
        url, place = storage.join(root, "large.pt"), storage.join(root, "places", "large")
        data = os.urandom(self.large_bytes)
        unit = storage.unit_bytes(url, len(data))
        if unit is None:
            with pytest.raises(NotImplementedError):
                storage.open_pieces(url, len(data), place=place)
            return
        units = [(at, memoryview(data)[at : at + unit]) for at in range(0, len(data), unit)]
        with storage.open_pieces(url, len(data), place=place) as second:
            with storage.open_pieces(url, len(data), place=place) as first:
                first.write(*units[1])
                first_receipts = first.finish()
            for at, view in reversed(units[2:]):
                second.write(at, view[: len(view) // 3])
                second.write(at + len(view) // 3, view[len(view) // 3 :])
            receipts = (*first_receipts, *second.finish())
        assert not storage.exists(url)
        ranges = [(at, len(view), zlib.crc32(view)) for at, view in units[1:]]
        assert storage.holds(place, ranges, receipts)
        assert storage.leftovers(root, places=[place]) == ()
        with storage.open_pieces(url, len(data), place=place, receipts=receipts) as last:
            last.write(*units[0])
            identity = last.commit((*receipts, *last.finish()))
        assert identity == storage.stat(url)
        assert storage.read_small(url) == data
        assert storage.holds(place, ranges, receipts) is None
        with pytest.raises(storage.PiecesLostError):
            storage.open_pieces(url, len(data), place=place, receipts=receipts)
        storage.drop_pieces(place)
        assert storage.read_small(url) == data
        assert storage.leftovers(root) == ()

    def test_pieces_that_are_dropped_are_gone(self, root: str) -> None:
        url, place = storage.join(root, "large.pt"), storage.join(root, "places", "large")
        if (unit := storage.unit_bytes(url, self.large_bytes)) is None:
            return
        with storage.open_pieces(url, self.large_bytes, place=place) as writer:
            writer.write(0, bytes(unit))
            receipts = writer.finish()
        assert storage.holds(place, [(0, unit, zlib.crc32(bytes(unit)))], receipts)
        for _ in range(2):
            storage.drop_pieces(place)
            assert storage.holds(place, [(0, unit, zlib.crc32(bytes(unit)))], receipts) is None
        assert storage.leftovers(root) == ()
        with storage.open_pieces(url, self.large_bytes, place=place) as writer:
            assert not storage.exists(url)
        storage.drop_pieces(place)

    def test_writes_of_whole_windows_are_exact(self, root: str, temporary: str) -> None:
        url = storage.join(root, "windows.pt")
        window_bytes = 16 << 20
        buffer = bytearray(8 << 20)
        with storage.open_writer(url, window_bytes, temporary_directory=temporary) as writer:
            for value in (1, 2):
                buffer[:] = bytes([value]) * len(buffer)
                writer.write(memoryview(buffer))
            buffer[:] = bytes(len(buffer))
            identity = writer.commit()
        with storage.open_reader(identity) as reader:
            assert reader.read((8 << 20) - 1, 2) == b"\1\2"
            assert reader.read(window_bytes - 1, 1) == b"\2"

    def test_an_empty_file_is_written_and_read(self, root: str, temporary: str) -> None:
        url = storage.join(root, "empty")
        with storage.open_writer(url, 0, temporary_directory=temporary) as writer:
            identity = writer.commit()
        assert identity.size_bytes == 0
        with storage.open_reader(identity) as reader:
            assert reader.read(0, 0) == b""

    def test_a_file_is_seen_only_after_its_commit(self, root: str, temporary: str) -> None:
        url = storage.join(root, "a.pt")
        with storage.open_writer(url, 10_000_000, temporary_directory=temporary) as writer:
            writer.write(bytes(10_000_000))
            assert not storage.exists(url)
            writer.commit()
            assert storage.exists(url)

    def test_a_replaced_file_is_whole_at_all_times(self, root: str, temporary: str) -> None:
        url = storage.join(root, "a.pt")
        self.put(url, b"old")
        with storage.open_writer(url, 7, temporary_directory=temporary) as writer:
            writer.write(b"new")
            assert storage.read_small(url) == b"old"
            writer.write(b"+new")
            writer.commit()
        assert storage.read_small(url) == b"new+new"

    def test_leaving_without_commit_leaves_nothing(self, root: str, temporary: str) -> None:
        storage.make_directory(temporary)
        url = storage.join(root, "a.pt")
        with pytest.raises(KeyError), storage.open_writer(url, 20_000_000, temporary_directory=temporary) as writer:
            writer.write(bytes(19_000_000))
            raise KeyError
        assert not storage.exists(url)
        self.assert_nothing_left(temporary)

    def assert_nothing_left(self, temporary: str) -> None:
        """Backends with more to check override this."""

    def test_a_file_of_the_wrong_length_is_not_published(self, root: str, temporary: str) -> None:
        url = storage.join(root, "a.pt")
        with (
            pytest.raises(ReshardError) as caught,
            storage.open_writer(url, 5, temporary_directory=temporary) as writer,
        ):
            writer.write(b"1234")
            writer.commit()
        assert problem(caught) == (ErrorKind.TASK, "wrong-length")
        with (
            pytest.raises(ReshardError) as caught,
            storage.open_writer(url, 5, temporary_directory=temporary) as writer,
        ):
            writer.write(b"123456")
        assert problem(caught) == (ErrorKind.TASK, "wrong-length")
        assert not storage.exists(url)

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (11, 1), (100, 5), (-1, 2)])
    def test_reading_past_the_end_is_an_error(self, root: str, offset: int, length: int) -> None:
        identity = self.put(storage.join(root, "a.pt"), b"0123456789")
        with storage.open_reader(identity) as reader, pytest.raises(ReshardError) as caught:
            reader.read_into(offset, memoryview(bytearray(length)))
        assert problem(caught) == (ErrorKind.SOURCE, "short-read")
        assert identity.url in str(caught.value)

    @pytest.mark.parametrize("changed", [b"0123456", b"0123456789ab", b"9876543210"])
    def test_a_file_changed_since_its_stat_is_refused(self, root: str, changed: bytes) -> None:
        url = storage.join(root, "a.pt")
        identity = self.put(url, b"0123456789")
        storage.write_small(url, changed)
        with pytest.raises(ReshardError) as caught:
            storage.open_reader(identity)
        assert problem(caught) == (ErrorKind.SOURCE, "source-changed")

    def test_a_file_changed_while_it_is_read_is_noticed(self, root: str) -> None:
        url = storage.join(root, "a.pt")
        identity = self.put(url, b"0123456789")
        with pytest.raises(ReshardError) as caught, storage.open_reader(identity) as reader:
            assert reader.read(0, 3) == b"012"
            storage.write_small(url, b"abcdefghij")
            assert reader.read(3, 3) == b"345"
        assert problem(caught) == (ErrorKind.SOURCE, "source-changed")

    def test_a_missing_file_is_named(self, root: str) -> None:
        url = storage.join(root, "missing.pt")
        with pytest.raises(ReshardError) as caught:
            storage.stat(url)
        assert problem(caught) == (ErrorKind.SOURCE, "no-such-file")
        assert url in str(caught.value)
        assert not storage.exists(url)

    def test_a_missing_directory_is_named(self, root: str) -> None:
        with pytest.raises(ReshardError) as caught:
            storage.list_files(storage.join(root, "missing"))
        assert problem(caught) == (ErrorKind.SOURCE, "no-such-directory")

    def test_a_directory_is_no_file(self, root: str) -> None:
        self.put(storage.join(root, "directory", "a.pt"), b"1")
        assert storage.exists(storage.join(root, "directory"))
        with pytest.raises(ReshardError) as caught:
            storage.stat(storage.join(root, "directory"))
        assert problem(caught) == (ErrorKind.SOURCE, "no-such-file")

    def test_a_listing_has_the_files_directly_inside(self, root: str) -> None:
        directory = storage.join(root, "run")
        identities = [self.put(storage.join(directory, name), name.encode()) for name in ("b.pt", "a.pt", "c.txt")]
        self.put(storage.join(directory, "below", "d.pt"), b"1")
        listed = storage.list_files(directory + "/")
        assert [file.name for file in listed] == ["a.pt", "b.pt", "c.txt"]
        assert {file.identity for file in listed} == set(identities)
        assert [file.name for file in storage.glob_files(storage.join(directory, "*.pt"))] == ["a.pt", "b.pt"]

    def test_a_listing_is_never_old(self, root: str) -> None:
        directory = storage.join(root, "run")
        self.put(storage.join(directory, "a.pt"), b"1")
        assert len(storage.list_files(directory)) == 1
        self.put(storage.join(directory, "b.pt"), b"1")
        assert len(storage.list_files(directory)) == 2
        storage.delete(storage.join(directory, "a.pt"))
        assert [file.name for file in storage.list_files(directory)] == ["b.pt"]

    def test_a_listing_has_all_of_many_files(self, root: str) -> None:
        directory = storage.join(root, "many")
        names = [f"part-{number:05}.pt" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: storage.create_only(storage.join(directory, name), b""), names))
        assert [file.name for file in storage.list_files(directory)] == names

    @pytest.mark.parametrize("name", STRANGE_NAMES)
    def test_strange_names_are_kept(self, root: str, name: str) -> None:
        url = storage.join(root, "strange names", name)
        identity = self.put(url, name.encode())
        assert identity.url == url
        assert [file.identity for file in storage.list_files(storage.parent(url))] == [identity]
        assert storage.read_small(url) == name.encode()

    def test_of_many_creators_one_wins(self, root: str) -> None:
        url = storage.join(root, "committed.json")
        start = threading.Barrier(6)

        def create(number: int) -> bool:
            start.wait()
            return storage.create_only(url, b"%d" % number)

        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(create, range(6)))
        assert sum(won) == 1
        assert storage.read_small(url) == b"%d" % won.index(True)
        assert not storage.create_only(url, b"late")
        assert len(storage.list_files(root)) == 1

    def test_deleting_twice_is_fine(self, root: str) -> None:
        url = storage.join(root, "a.pt")
        self.put(url, b"1")
        storage.delete(url)
        assert not storage.exists(url)
        storage.delete(url)

    def test_threads_share_a_reader(self, root: str) -> None:
        data = os.urandom(400_000)
        identity = self.put(storage.join(root, "a.pt"), data)
        with storage.open_reader(identity) as reader, ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda number: reader.read(number * 1000, 1000), range(400)))
        assert b"".join(parts) == data

    def test_identities_travel_and_handles_stay(self, root: str, temporary: str) -> None:
        identity = self.put(storage.join(root, "a.pt"), b"1")
        assert pickle.loads(pickle.dumps(identity)) == identity
        with storage.open_reader(identity) as reader, pytest.raises(TypeError):
            pickle.dumps(reader)
        with (
            storage.open_writer(identity.url, 1, temporary_directory=temporary) as writer,
            pytest.raises(TypeError),
        ):
            pickle.dumps(writer)
