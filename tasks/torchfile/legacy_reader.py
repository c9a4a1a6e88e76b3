"""Find where the storages of a file lie that torch wrote before its zip format, by one growing read of the head.

The file is four or five pickles (magic number, protocol, system, objects, sorted storage keys), then per storage its
length in eight bytes and its data. All offsets follow from the pickles. Writing this format is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.errors import ErrorKind, ReshardError, error
from tasks.torchfile.objects import StorageRef
from tasks.torchfile.opcode_scan import PickleForbiddenError, PickleTruncatedError, scan_pickle
from tasks.torchfile.ranged_file import RangedFile, ReadRange
from tasks.torchfile.unpickler import MAX_PICKLE_BYTES, LoadedPickle, bad_pickle, check_pickle_size, load_with_storages

MAGIC_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of every such file of protocol 2: the number 0x1950a86a20f9469cfc6c."""

PROTOCOL_VERSION = 1001
# One request for most files: names and shapes of about 300 tensors.
_HEAD_BYTES = 65536
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """The index of one file."""

    root: object
    storages: tuple[StorageRef, ...]
    locations: Mapping[StorageRef, tuple[int, int]]
    "(offset, size) of each storage's data in the file, in bytes"
    pickle_size_bytes: int
    num_requests: int


class _Head:
    """The beginning of the file, read further when a pickle does not end in it."""

    def __init__(self, file: RangedFile, max_pickle_bytes: int) -> None:
        self.file = file
        self.data = file.read(0, min(_HEAD_BYTES, file.size_bytes))
        self.position = 0
        self.max_pickle_bytes = max_pickle_bytes

    def pickle(self) -> bytes:
        """Return the next pickle. Scans it again after each read; the data grows fourfold, so the cost stays linear."""
        start = self.position
        while True:
            try:
                self.position = scan_pickle(self.data, start)
            except PickleTruncatedError as fault:
                if len(self.data) == self.file.size_bytes:
                    raise _truncated(self.file, "its pickles do not end", str(fault)) from fault
                check_pickle_size(self.file.name, len(self.data) + 1, self.max_pickle_bytes)
                self._grow()
            except PickleForbiddenError as fault:
                raise bad_pickle(self.file.name, fault) from fault
            else:
                return self.data[start : self.position]

    def _grow(self) -> None:
        have = len(self.data)
        self.data += self.file.read(have, min(3 * have, self.file.size_bytes - have, self.max_pickle_bytes))


def read_legacy(read: ReadRange, size_bytes: int, name: str) -> LegacyFile:
    """Read the objects and storage locations of a non-zip file. Raises ReshardError, kind SOURCE."""
    return read_legacy_of(RangedFile(read, size_bytes, name))


def read_legacy_of(file: RangedFile, *, max_pickle_bytes: int = MAX_PICKLE_BYTES) -> LegacyFile:
    """Read a file of which pieces may have been read already."""
    head = _Head(file, max_pickle_bytes)
    magic, version, _system = (head.pickle() for _ in range(3))
    if magic != MAGIC_PICKLE or load_with_storages(version, file.name).root != PROTOCOL_VERSION:
        raise error(
            ErrorKind.SOURCE,
            "not-a-torch-file",
            f"{file.name} is not a file of torch.save",
            hint="give checkpoint files that torch.save wrote",
        )
    objects = head.pickle()
    loaded = load_with_storages(objects, file.name)
    keys = load_with_storages(head.pickle(), file.name).root
    locations = _locate(file, loaded, keys, head.position)
    _check_first_length(file, head, loaded, keys)
    return LegacyFile(loaded.root, loaded.storages, locations, len(objects), file.num_requests)


def _locate(file: RangedFile, loaded: LoadedPickle, keys: object, position: int) -> dict[StorageRef, tuple[int, int]]:
    by_key = {storage.key: storage for storage in loaded.storages}
    if (
        not isinstance(keys, list)
        or not all(type(key) is str for key in keys)
        or len(keys) != len(by_key)
        or {*keys} != {*by_key}
    ):
        raise error(
            ErrorKind.SOURCE,
            "bad-pickle",
            f"{file.name}: the list of storages is not the one that the objects name",
            context=(f"declared: {len(by_key)} storages", f"actual: {type(keys).__name__}"),
            hint="copy the file again from where it was saved",
        )
    locations = {}
    for key in keys:
        storage = by_key[key]
        locations[storage] = (position + _LENGTH_BYTES, storage.size_bytes)
        position += _LENGTH_BYTES + storage.size_bytes
    if position > file.size_bytes:
        raise _truncated(
            file, "the storages do not fit", f"declared: {position} bytes", f"actual: {file.size_bytes} bytes"
        )
    if position < file.size_bytes:
        raise error(
            ErrorKind.SOURCE,
            "storage-size-differs",
            f"{file.name} is longer than its tensors need",
            context=(f"declared: {position} bytes", f"actual: {file.size_bytes} bytes"),
            hint="load it with torch.load and save it again with torch.save",
        )
    return {storage: locations[storage] for storage in loaded.storages}


def _check_first_length(file: RangedFile, head: _Head, loaded: LoadedPickle, keys: object) -> None:
    """Compare the first storage's stored length, if the head has it: tells a shifted file without a request."""
    stored = head.data[head.position : head.position + _LENGTH_BYTES]
    if not isinstance(keys, list) or not keys or len(stored) < _LENGTH_BYTES:
        return
    declared = next(storage.num_elements for storage in loaded.storages if storage.key == keys[0])
    actual = int.from_bytes(stored, "little")
    if actual != declared:
        raise error(
            ErrorKind.SOURCE,
            "storage-size-differs",
            f"{file.name}: storage {keys[0]!r} is not as its tensors need it",
            context=(f"declared: {declared} elements", f"actual: {actual}"),
            hint="copy the file again from where it was saved",
        )


def _truncated(file: RangedFile, message: str, *context: str) -> ReshardError:
    return error(
        ErrorKind.SOURCE,
        "truncated-file",
        f"{file.name} is cut off: {message}",
        context=context,
        hint="copy the file again from where it was saved",
    )
