"""Pure: the bytes around one record of a torch archive, as torch's writer makes them.

Every record is stored, begins at a multiple of 64 and has its CRC behind the data; times and versions are zero. The
64-bit form is used per record, where its size or its header's offset needs it.
"""

from __future__ import annotations

from struct import pack

ALIGNMENT_BYTES = 64
"""torch's default of ``config.save.storage_alignment``; all versions without that setting have the same."""

LIMIT_32 = 0xFFFFFFFF
LOCAL_HEADER_BYTES = 30
CENTRAL_HEADER_BYTES = 46
END_BYTES = 22
END64_BYTES = 56
LOCATOR_BYTES = 20

FLAG_UTF8 = 0x0800
FLAG_DESCRIPTOR = 0x0008


def _flags(size_bytes: int) -> int:
    return FLAG_UTF8 | FLAG_DESCRIPTOR if size_bytes else FLAG_UTF8


def is_64(header_offset: int, size_bytes: int) -> bool:
    return size_bytes >= LIMIT_32 or header_offset >= LIMIT_32


def _extra_64_size(header_offset: int, size_bytes: int) -> int:
    """Size of the 64-bit field of the local and of the central header."""
    if not is_64(header_offset, size_bytes):
        return 0
    return 4 + 16 * (size_bytes >= LIMIT_32) + 8 * (header_offset >= LIMIT_32)


def data_offset(header_offset: int, name_size: int, size_bytes: int) -> int:
    """Where the data of a record begins whose local header begins at ``header_offset``."""
    start = header_offset + LOCAL_HEADER_BYTES + name_size + 4 + _extra_64_size(header_offset, size_bytes)
    return -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def descriptor_size(header_offset: int, size_bytes: int) -> int:
    """Size of what stands behind the data."""
    if not size_bytes:
        return 0
    return 24 if is_64(header_offset, size_bytes) else 16


def local_header(name: bytes, header_offset: int, size_bytes: int) -> bytes:
    """Make the local header with the padding up to the data."""
    extra = b""
    if is_64(header_offset, size_bytes):
        fields = pack("<QQ", size_bytes, 0) if size_bytes >= LIMIT_32 else b""
        fields += pack("<Q", header_offset) if header_offset >= LIMIT_32 else b""
        extra = pack("<HH", 1, len(fields)) + fields
    start = header_offset + LOCAL_HEADER_BYTES + len(name) + len(extra) + 4
    padding = -start % ALIGNMENT_BYTES
    extra += b"FB" + pack("<H", padding) + b"Z" * padding
    return pack("<4s5H3L2H", b"PK\3\4", 0, _flags(size_bytes), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(header_offset: int, size_bytes: int, crc32: int) -> bytes:
    """Make what stands behind the data; nothing for an empty record."""
    if not size_bytes:
        return b""
    layout = "<4sLQQ" if is_64(header_offset, size_bytes) else "<4sLLL"
    return pack(layout, b"PK\7\x08", crc32, size_bytes, size_bytes)


def central_header_size(name_size: int, header_offset: int, size_bytes: int) -> int:
    return CENTRAL_HEADER_BYTES + name_size + _extra_64_size(header_offset, size_bytes)


def central_header(name: bytes, header_offset: int, size_bytes: int, crc32: int) -> bytes:
    """Make a record's entry in the central directory."""
    extra = b""
    if is_64(header_offset, size_bytes):
        fields = pack("<QQ", size_bytes, size_bytes) if size_bytes >= LIMIT_32 else b""
        fields += pack("<Q", header_offset) if header_offset >= LIMIT_32 else b""
        extra = pack("<HH", 1, len(fields)) + fields
    size_32, offset_32 = min(size_bytes, LIMIT_32), min(header_offset, LIMIT_32)
    flags = _flags(size_bytes)
    sizes = (crc32, size_32, size_32, len(name), len(extra))
    fixed = pack("<4s6H3L5H2L", b"PK\1\2", 0, 0, flags, 0, 0, 0, *sizes, 0, 0, 0, 0, offset_32)
    return fixed + name + extra


def end_of_archive(num_records: int, directory_offset: int, directory_size: int) -> bytes:
    """Make the end: the 64-bit record and its locator, always there, and the plain one."""
    count = min(num_records, 0xFFFF)
    place = (directory_size, directory_offset)
    place_32 = (min(directory_size, LIMIT_32), min(directory_offset, LIMIT_32))
    return (
        pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 0x031E, 45, 0, 0, num_records, num_records, *place)
        + pack("<4sLQL", b"PK\6\7", 0, directory_offset + directory_size, 1)
        + pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, *place_32, 0)
    )
