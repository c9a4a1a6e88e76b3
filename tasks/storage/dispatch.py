"""The functions of this package: each finds the backend of its URL. Backends are imported when first needed."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence

from isal import isal_zlib

from tasks.errors import ErrorKind, ReshardError, error
from tasks.storage import urls
from tasks.storage.interface import Backend, ByteReader, FileIdentity, ListedFile, PieceWriter, TargetWriter

# A file that is replaced between its stat and its read is simply read again; a steady stream of changes is an error.
_SMALL_ATTEMPTS = 4
# How much of a file is held to check it.
_CHECKED_BYTES = 16 << 20


def stat(url: str) -> FileIdentity:
    """Describe a file, through symbolic links. Raises `no-such-file`."""
    url = urls.normalise(url)
    return _backend(url).stat(url)


def exists(url: str) -> bool:
    """Tell whether a file or directory is there. On NFS the answer may be 30 s old: list the directory to be sure."""
    url = urls.normalise(url)
    return _backend(url).exists(url)


def list_files(url: str) -> tuple[ListedFile, ...]:
    """List the files directly in a directory, by name, never from a cache. Raises `no-such-directory`."""
    url = urls.normalise(url)
    return _backend(url).list_files(url)


def glob_files(pattern: str) -> tuple[ListedFile, ...]:
    """List the files of a directory whose name matches; wildcards (* ? [abc]) in the last component only."""
    pattern = urls.normalise(pattern)
    directory, name = urls.parent(pattern), urls.basename(pattern)
    if any(mark in directory for mark in "*?["):
        hint = "use wildcards in the last component only"
        raise error(ErrorKind.USAGE, "wildcard-in-directory", f"{pattern}: a directory has a wildcard", hint=hint)
    return tuple(file for file in list_files(directory) if fnmatch.fnmatchcase(file.name, name))


def open_reader(identity: FileIdentity) -> ByteReader:
    """Open a file that must still be the one described. Raises `source-changed`, then and later."""
    return _backend(identity.url).open_reader(identity)


def open_writer(
    url: str, size_bytes: int, *, temporary_directory: str, durable: bool = True, fenced: bool = False
) -> TargetWriter:
    """Open a new file of known size, which appears at its commit.

    `fenced`: once `leftovers` was called and what it found removed, this writer can commit no more. It costs small
    objects of a store two requests; large ones and local files are always so.

    The temporary directory is used by local files only, and must be on their file system; missing directories are made.
    So is `durable`: without it a local file may be lost in a power cut after its commit.
    """
    url = urls.normalise(url)
    backend = _backend(url)
    return backend.open_writer(url, size_bytes, temporary_directory=temporary_directory, durable=durable, fenced=fenced)


def buffered_bytes(url: str, size_bytes: int, *, sharing: int = 1) -> int:
    """Return how much memory the writer of a file of this size holds at most, where so many share a task's memory."""
    url = urls.normalise(url)
    return _backend(url).buffered_bytes(size_bytes, sharing=sharing)


def unit_bytes(url: str, size_bytes: int) -> int | None:
    """Return the unit in which a file of this size can be written piece by piece; None where it cannot."""
    url = urls.normalise(url)
    return _backend(url).unit_bytes(size_bytes)


def open_pieces(
    url: str,
    size_bytes: int,
    *,
    place: str,
    receipts: Sequence[str] | None = None,
    durable: bool = True,
    sharing: int = 1,
) -> PieceWriter:
    """Open a file of known size that several processes write.

    `place` is of this file alone: on a file system the unfinished file itself, else a note of what is on its way. With
    `receipts`, possibly none, something was written before: raises `PiecesLostError` where it is not there any more.
    `sharing`: so many such writers share a task's memory.
    """
    url = urls.normalise(url)
    return _backend(url).open_pieces(url, size_bytes, urls.normalise(place), receipts, durable=durable, sharing=sharing)


def holds(place: str, ranges: Sequence[tuple[int, int, int]], receipts: Sequence[str]) -> tuple[str, ...] | None:
    """Return receipts for the (offset, length, CRC32) that were written piece by piece; None if they are not there."""
    place = urls.normalise(place)
    return _backend(place).holds(place, ranges, receipts)


def drop_pieces(place: str) -> None:
    """Forget a file that was to be written piece by piece; one that was committed stays."""
    place = urls.normalise(place)
    _backend(place).drop_pieces(place)


def read_small(url: str) -> bytes:
    """Read a whole small file in one state."""
    url = urls.normalise(url)
    for _ in range(_SMALL_ATTEMPTS - 1):
        try:
            return _read_whole(url)
        except ReshardError as cause:
            if cause.problems[0].reference != "source-changed":
                raise
    return _read_whole(url)


def checksum(identity: FileIdentity) -> int:
    """Return the CRC32 of a whole file, read in bounded pieces."""
    crc32 = 0
    buffer = memoryview(bytearray(min(_CHECKED_BYTES, identity.size_bytes)))
    with open_reader(identity) as reader:
        for begin in range(0, identity.size_bytes, _CHECKED_BYTES):
            piece = buffer[: min(_CHECKED_BYTES, identity.size_bytes - begin)]
            reader.read_into(begin, piece)
            crc32 = isal_zlib.crc32(piece, crc32)
    return crc32


def write_small(url: str, data: bytes, *, durable: bool = True) -> None:
    """Write or replace a whole small file; readers see the old or the new one. `durable` as for `open_writer`."""
    url = urls.normalise(url)
    with open_writer(url, len(data), temporary_directory=urls.parent(url), durable=durable) as writer:
        writer.write(data)
        writer.commit()


def create_only(url: str, data: bytes) -> bool:
    """Create a small file if its name is free; of several who try, one gets True."""
    url = urls.normalise(url)
    return _backend(url).create_only(url, data)


def delete(url: str) -> None:
    """Delete a file or an empty local directory; a missing one is fine."""
    url = urls.normalise(url)
    _backend(url).delete(url)


def leftovers(url: str, *, places: Sequence[str] = ()) -> tuple[Callable[[], None], ...]:
    """Find what writers that were killed left directly in a directory; calling one of them removes it.

    Writers that are still at work cannot be told from dead ones: theirs fail when they commit, and publish nothing.
    What was written piece by piece, with its note at one of the `places`, is not left over.
    """
    url = urls.normalise(url)
    return _backend(url).leftovers(url, [urls.normalise(place) for place in places])


def make_directory(url: str) -> None:
    """Make a directory and those above it; nothing to do on object stores."""
    url = urls.normalise(url)
    _backend(url).make_directory(url)


def _read_whole(url: str) -> bytes:
    identity = stat(url)
    with open_reader(identity) as reader:
        return reader.read(0, identity.size_bytes)


def _backend(url: str) -> Backend:
    return _backend_of(urls.protocol(url))


@functools.cache
def _backend_of(protocol: str) -> Backend:
    # Importing s3fs and botocore takes most of a second: only those pay who use it.
    if protocol == "file":
        from tasks.storage.local import LocalBackend

        return LocalBackend()
    if protocol == "s3":
        from tasks.storage.s3 import S3Backend

        return S3Backend()
    from tasks.storage.generic import GenericBackend

    return GenericBackend()
