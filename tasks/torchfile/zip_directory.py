"""Find and read the central directory of a zip archive, 64-bit fields too. Does not look at the records' data."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812

from tasks.errors import ErrorKind, ReshardError, error
from tasks.torchfile.ranged_file import RangedFile
from tasks.torchfile.zip_records import CENTRAL_HEADER_BYTES, END64_BYTES, END_BYTES, LIMIT_32, LOCATOR_BYTES

_END = Struct("<4s4H2LH")
_LOCATOR = Struct("<4sLQL")
_END64 = Struct("<4sQHHLLQQQQ")
_CENTRAL = Struct("<4s6H3L5H2L")

# Some three million records: every tensor of the largest checkpoint has one.
_MAX_DIRECTORY_BYTES = 1 << 28

COPY_AGAIN = "copy the file again from where it was saved"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record as the central directory declares it."""

    name: str
    name_size_bytes: int
    header_offset_bytes: int
    size_bytes: int
    stored_size_bytes: int
    crc32: int
    flags: int
    method: int
    is_torch_style: bool
    "times and versions are zero, as only torch's writer leaves them"


def bad_archive(file: RangedFile, reference: str, message: str, *context: str, hint: str = COPY_AGAIN) -> ReshardError:
    """Make the error for an archive that is not as it should be."""
    return error(ErrorKind.SOURCE, reference, f"{file.name} {message}", context=context, hint=hint)


def read_directory(file: RangedFile, *, tail_bytes: int) -> tuple[tuple[Entry, ...], int]:
    """Return the entries and the offset of the central directory. One request, or two if the tail does not hold it."""
    tail_start = max(0, file.size_bytes - tail_bytes)
    tail = file.read(tail_start, file.size_bytes - tail_start)
    end = _find_end(file, tail)
    _, disk, _, _, count, size, offset, _ = _END.unpack_from(tail, end)
    locator = tail_start + end - LOCATOR_BYTES
    if locator >= 0:
        signature, _, end64, _ = _LOCATOR.unpack(file.read(locator, LOCATOR_BYTES))
        if signature == b"PK\6\7":
            found, _, _, _, disk, _, _, count, size, offset = _END64.unpack(file.read(end64, END64_BYTES))
            if found != b"PK\6\6":
                raise bad_archive(file, "bad-archive", "has no 64-bit end record where it says", f"offset: {end64}")
    if size > _MAX_DIRECTORY_BYTES:
        raise bad_archive(file, "bad-archive", "has a table of records of impossible size", f"declared: {size} bytes")
    limit = tail_start + end
    if disk or offset + size > limit:
        raise bad_archive(
            file,
            "truncated-file",
            "is cut off or damaged: its table of records does not fit",
            f"declared: {size} bytes at {offset}",
            f"actual: the file's end record begins at {limit}",
        )
    return _parse(file, file.read(offset, size), count), offset


def _find_end(file: RangedFile, tail: bytes) -> int:
    """Return where the end record begins in the tail; a comment may follow it."""
    end = len(tail) - END_BYTES
    while end >= 0:
        end = tail.rfind(b"PK\5\6", 0, end + 4)
        if end < 0:
            break
        if end + END_BYTES + int.from_bytes(tail[end + 20 : end + 22], "little") == len(tail):
            return end
        end -= 1
    raise bad_archive(
        file,
        "truncated-file",
        "is cut off: it begins as a torch archive and has no end record",
        f"actual: {file.size_bytes} bytes",
    )


def _parse(file: RangedFile, directory: bytes, count: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    position = 0
    try:
        while position < len(directory):
            entry, position = _entry(directory, position)
            entries.append(entry)
    except (StructError, ValueError) as fault:
        raise bad_archive(
            file, "bad-archive", "has a damaged table of records", f"record {len(entries)}: {fault}"
        ) from fault
    if len(entries) != count:
        raise bad_archive(
            file, "bad-archive", "has a damaged table of records", f"declared: {count}", f"actual: {len(entries)}"
        )
    return tuple(entries)


def _entry(directory: bytes, position: int) -> tuple[Entry, int]:
    (
        signature, made_by, needed, flags, method, time, date, crc32, stored, size,
        name_size, extra_size, comment_size, _, _, _, offset,
    ) = _CENTRAL.unpack_from(directory, position)  # fmt: skip
    if signature != b"PK\1\2":
        raise ValueError(f"no signature at {position}")
    name_end = position + CENTRAL_HEADER_BYTES + name_size
    extra_end = name_end + extra_size
    if extra_end + comment_size > len(directory):
        raise ValueError(f"entry at {position} leaves the table")
    name = directory[position + CENTRAL_HEADER_BYTES : name_end].decode("utf-8")
    if LIMIT_32 in (size, stored, offset):
        size, stored, offset = _wide(directory[name_end:extra_end], size, stored, offset)
    entry = Entry(name, name_size, offset, size, stored, crc32, flags, method, not (made_by or needed or time or date))
    return entry, extra_end + comment_size


def _wide(extra: bytes, *fields: int) -> list[int]:
    """Replace the fields that are 0xffffffff by those of the 64-bit extra field."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = (
            int.from_bytes(extra[position : position + 2], "little"),
            extra[position + 2] | extra[position + 3] << 8,
        )
        body = extra[position + 4 : position + 4 + length]
        if tag == 1:
            values = iter([int.from_bytes(body[at : at + 8], "little") for at in range(0, len(body) - 7, 8)])
            return [next(values, field) if field == LIMIT_32 else field for field in fields]
        position += 4 + length
    return list(fields)
