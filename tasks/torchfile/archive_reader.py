"""Find where the records of a torch archive lie, by a few ranged reads; no tensor data is read.

Offsets of data follow from torch's alignment rule; where a file does not keep it (packed again by another tool), the
local header of the record is read. Everything that torch.load would take silently and wrongly is an error here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from isal import isal_zlib

from tasks.errors import ErrorKind, Problem, raise_if
from tasks.torchfile.objects import StorageRef
from tasks.torchfile.ranged_file import RangedFile, ReadRange
from tasks.torchfile.unpickler import check_pickle_size
from tasks.torchfile.zip_directory import COPY_AGAIN, Entry, bad_archive, read_directory
from tasks.torchfile.zip_records import LOCAL_HEADER_BYTES, data_offset, descriptor_size

# Covers the table of about 700 records: one request for the files of most models. Object stores want more.
DEFAULT_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an archive."""

    name: str
    "without the archive's directory, as data/0"
    offset_bytes: int
    "where the data itself begins in the file"
    size_bytes: int
    crc32: int
    "as the archive declares it; 0 may mean that its writer left it out"


@dataclass(frozen=True, slots=True)
class Archive:
    """The table of one file."""

    name: str
    "of the file, for errors"
    prefix: str
    "the directory inside the archive"
    records: Mapping[str, Record]
    pickle_data: bytes
    num_requests: int

    def storage_location(self, storage: StorageRef) -> tuple[int, int]:
        """Give (offset, size) of a storage's data in the file, in bytes."""
        record = self.records[f"data/{storage.key}"]
        return record.offset_bytes, record.size_bytes


def read_archive(read: ReadRange, size_bytes: int, name: str, tail_bytes: int = DEFAULT_TAIL_BYTES) -> Archive:
    """Read the table of a torch archive and its data.pkl: two or three requests, one for a small file.

    Raises ReshardError, kind SOURCE, for all that is wrong with the file.
    """
    return read_archive_of(RangedFile(read, size_bytes, name), tail_bytes=tail_bytes)


def read_archive_of(file: RangedFile, *, tail_bytes: int = DEFAULT_TAIL_BYTES) -> Archive:
    """Read the table of a file of which pieces may have been read already."""
    if file.size_bytes == 0:
        raise bad_archive(file, "empty-file", "is empty", "declared: a torch archive", "actual: 0 bytes")
    # The shortest archive is far longer; a file below that is no zip at all.
    if file.size_bytes < 22:
        raise bad_archive(file, "truncated-file", "is too short for an archive", f"actual: {file.size_bytes} bytes")
    entries, directory_offset = read_directory(file, tail_bytes=tail_bytes)
    prefix = _check_entries(file, entries)
    records = _locate(file, entries, directory_offset, prefix)
    _check_byteorder(file, records)
    pickle_data = _read_pickle(file, records)
    return Archive(file.name, prefix, MappingProxyType(records), pickle_data, file.num_requests)


def check_storages(storages: Iterable[StorageRef], archive: Archive) -> None:
    """Raise all storages that the pickle names otherwise than the archive has them, at once."""
    problems = []
    for storage in storages:
        record = archive.records.get(f"data/{storage.key}")
        actual = "no record" if record is None else f"{record.size_bytes} bytes"
        if record is None or record.size_bytes != storage.size_bytes:
            problems.append(
                Problem(
                    ErrorKind.SOURCE,
                    "storage-size-differs",
                    f"{archive.name}: storage {storage.key!r} is not as its tensors need it",
                    (f"declared: {storage.num_elements} x {storage.dtype} = {storage.size_bytes} bytes", actual),
                    COPY_AGAIN,
                )
            )
    raise_if(problems)


def _check_entries(file: RangedFile, entries: Sequence[Entry]) -> str:
    """Return the archive's directory. Raises for records that a torch archive cannot have."""
    for entry in entries:
        if entry.flags & 0x2041:
            raise bad_archive(file, "encrypted-record", f"has an encrypted record {entry.name!r}", hint="decrypt it")
        if entry.method or entry.size_bytes != entry.stored_size_bytes:
            raise bad_archive(
                file,
                "compressed-record",
                f"has a compressed record {entry.name!r}",
                "declared: stored",
                f"actual: method {entry.method}, {entry.stored_size_bytes} bytes for {entry.size_bytes}",
                hint="load it with torch.load and save it again with torch.save",
            )
    names = {entry.name for entry in entries}
    if len(names) != len(entries):
        raise bad_archive(file, "duplicate-record", "has two records of one name", f"records: {len(entries)}")
    roots = sorted({entry.name.partition("/")[0] if "/" in entry.name else "" for entry in entries})
    if len(roots) != 1 or roots[0] == "" or f"{roots[0]}/data.pkl" not in names:
        raise bad_archive(
            file,
            "not-a-torch-file",
            "is a zip archive, but not one of torch.save",
            "declared: one directory with data.pkl",
            f"actual: {len(entries)} records under {', '.join(map(repr, roots[:5])) or 'nothing'}",
            hint="give checkpoint files that torch.save wrote",
        )
    return roots[0]


def _locate(file: RangedFile, entries: Sequence[Entry], directory_offset: int, prefix: str) -> dict[str, Record]:
    records: dict[str, Record] = {}
    ordered = sorted(entries, key=lambda entry: entry.header_offset_bytes)
    limits = [entry.header_offset_bytes for entry in ordered[1:]] + [directory_offset]
    for entry, limit in zip(ordered, limits, strict=True):
        header, size = entry.header_offset_bytes, entry.size_bytes
        offset = data_offset(header, entry.name_size_bytes, size)
        if not entry.is_torch_style or offset + size + descriptor_size(header, size) != limit:
            offset = _read_local_header(file, entry)
        if offset + size > limit:
            raise bad_archive(
                file,
                "truncated-file" if offset + size > file.size_bytes else "overlapping-records",
                f"is cut off or damaged: record {entry.name!r} reaches into what follows it",
                f"declared: {size} bytes at {offset}",
                f"actual: {limit - offset} bytes up to the next record",
            )
        name = entry.name[len(prefix) + 1 :]
        records[name] = Record(name, offset, size, entry.crc32)
    return {entry.name[len(prefix) + 1 :]: records[entry.name[len(prefix) + 1 :]] for entry in entries}


def _read_local_header(file: RangedFile, entry: Entry) -> int:
    """Return where the data begins, from the record's own header."""
    header = file.read(entry.header_offset_bytes, LOCAL_HEADER_BYTES)
    if header[:4] != b"PK\3\4":
        raise bad_archive(
            file, "bad-archive", f"has no record {entry.name!r} where it says", f"offset: {entry.header_offset_bytes}"
        )
    sizes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return entry.header_offset_bytes + LOCAL_HEADER_BYTES + sizes


def _check_byteorder(file: RangedFile, records: Mapping[str, Record]) -> None:
    """Refuse big-endian files; the record's size tells, so its content is not read. No record means little-endian."""
    record = records.get("byteorder")
    if record is not None and (
        record.size_bytes != len(b"little") or record.crc32 not in (0, isal_zlib.crc32(b"little"))
    ):
        raise bad_archive(
            file,
            "big-endian-file",
            "was written on a big-endian machine",
            "declared: little",
            f"actual: a byteorder record of {record.size_bytes} bytes",
            hint="load it with torch.load on a little-endian machine and save it again",
        )


def _read_pickle(file: RangedFile, records: Mapping[str, Record]) -> bytes:
    record = records["data.pkl"]
    check_pickle_size(file.name, record.size_bytes)
    data = file.read(record.offset_bytes, record.size_bytes)
    actual = isal_zlib.crc32(data)
    if record.crc32 not in (0, actual):
        raise bad_archive(
            file,
            "corrupt-record",
            "is damaged: data.pkl is not what was written",
            f"declared: CRC32 {record.crc32:#010x}",
            f"actual: CRC32 {actual:#010x}",
        )
    return data
