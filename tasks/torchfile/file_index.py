"""Open a torch file of either format: its objects, and where the bytes of each storage lie. The way in for readers.

The format is told by content, never by the file's name. No tensor data is read.

    torch_file = open_torch_file(read, size_bytes, "checkpoint_last.pt")
    offset, size, crc32 = torch_file.locations[tensor.storage]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from tasks.errors import ErrorKind, error
from tasks.torchfile.archive_reader import DEFAULT_TAIL_BYTES, check_storages, read_archive_of
from tasks.torchfile.legacy_reader import MAGIC_PICKLE, read_legacy_of
from tasks.torchfile.objects import StorageRef
from tasks.torchfile.ranged_file import RangedFile, ReadRange
from tasks.torchfile.unpickler import load_with_storages

_ZIP_START = b"PK\3\4"
_TAR_MARK = (257, b"ustar")
# Enough for the pickles of a legacy file with some 300 tensors: one request tells the format and reads the index.
_HEAD_BYTES = 65536


class TorchFormat(Enum):
    """What torch.save wrote."""

    ZIP = "zip"
    LEGACY = "legacy"


class Location(NamedTuple):
    """Where a storage's data lies in its file, in bytes."""

    offset: int
    size: int
    crc32: int | None
    "as stored in the file; None where it has none"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The index of one file."""

    name: str
    format: TorchFormat
    root: object
    "the object tree; tensors are TensorRef"
    storages: tuple[StorageRef, ...]
    "in the order of their first mention"
    locations: Mapping[StorageRef, Location]
    pickle_size_bytes: int
    num_requests: int


def open_torch_file(read: ReadRange, size_bytes: int, name: str, *, tail_bytes: int = DEFAULT_TAIL_BYTES) -> TorchFile:
    """Read the index of a file: usually two requests, one where the file is no longer than ``tail_bytes``.

    Raises ReshardError, kind SOURCE, naming the file.
    """
    file = RangedFile(read, size_bytes, name)
    if size_bytes == 0:
        raise error(
            ErrorKind.SOURCE,
            "empty-file",
            f"{name} is empty",
            context=("declared: a torch file", "actual: 0 bytes"),
            hint="copy the file again from where it was saved",
        )
    if size_bytes <= tail_bytes:
        file.read(0, size_bytes)
        return _open(file, tail_bytes)
    tail = file.read(size_bytes - tail_bytes, tail_bytes)
    # The 64-bit end record, its locator and the end record close every torch archive: no look at the head is needed.
    if tail[-98:-94] == b"PK\6\6" and tail[-22:-18] == b"PK\5\6":
        return _open_zip(file, tail_bytes)
    return _open(file, tail_bytes)


def _open(file: RangedFile, tail_bytes: int) -> TorchFile:
    head = file.read(0, min(_HEAD_BYTES, file.size_bytes))
    if head.startswith(_ZIP_START):
        return _open_zip(file, tail_bytes)
    if head.startswith(MAGIC_PICKLE) or (head and MAGIC_PICKLE.startswith(head)):
        return _open_legacy(file)
    is_tar = head[_TAR_MARK[0] :].startswith(_TAR_MARK[1])
    raise error(
        ErrorKind.SOURCE,
        "legacy-tar-file" if is_tar else "not-a-torch-file",
        f"{file.name} is a tar archive, as torch wrote before 0.1.10"
        if is_tar
        else f"{file.name} is not a file of torch.save",
        context=(f"actual: begins with {head[:8]!r}",),
        hint="load it with an old torch and save it again"
        if is_tar
        else "give checkpoint files that torch.save wrote, not configurations or links",
    )


def _open_zip(file: RangedFile, tail_bytes: int) -> TorchFile:
    archive = read_archive_of(file, tail_bytes=tail_bytes)
    loaded = load_with_storages(archive.pickle_data, f"{file.name}: data.pkl")
    check_storages(loaded.storages, archive)
    locations = {}
    for storage in loaded.storages:
        record = archive.records[f"data/{storage.key}"]
        locations[storage] = Location(record.offset_bytes, record.size_bytes, record.crc32)
    return TorchFile(
        file.name,
        TorchFormat.ZIP,
        loaded.root,
        loaded.storages,
        MappingProxyType(locations),
        len(archive.pickle_data),
        file.num_requests,
    )


def _open_legacy(file: RangedFile) -> TorchFile:
    legacy = read_legacy_of(file)
    locations = {storage: Location(*place, None) for storage, place in legacy.locations.items()}
    return TorchFile(
        file.name,
        TorchFormat.LEGACY,
        legacy.root,
        legacy.storages,
        MappingProxyType(locations),
        legacy.pickle_size_bytes,
        file.num_requests,
    )
