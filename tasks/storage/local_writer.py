"""Atomic, durable writes of local and mounted files: under a temporary name, synced, and renamed.

A whole file has one writer and a name nobody else uses. One that several processes write has a name they agree on; what
is there stays when they die.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from isal import isal_zlib

from tasks.errors import ReshardError
from tasks.storage import urls
from tasks.storage.interface import FileIdentity
from tasks.storage.local_errors import writing
from tasks.storage.local_reader import fresh_stat
from tasks.storage.problems import PiecesLostError, check_room, check_whole
from tasks.storage.unpublished_file import UnpublishedFile, make_directory

# Larger windows give no more speed on local disks or NFS (whose wsize is 1 MiB at most), smaller ones cost calls. Also
# the unit of files with several writers: on NFS two nodes must never write parts of one page.
WINDOW_BYTES = 4 << 20
# Keeps the temporary name under the 255 bytes of a name for every alphabet.
_NAME_CHARACTERS = 40


class LocalWriter:
    """Write one file; see the module for how it appears."""

    def __init__(self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool = True) -> None:
        self.window_bytes = WINDOW_BYTES
        self._url = url
        self._size_bytes = size_bytes
        self._written_bytes = 0
        with writing(url):
            make_directory(urls.parent(url))
        with writing(temporary_directory):
            make_directory(temporary_directory)
            path = temporary_path(temporary_directory, urls.basename(url))
            self._file = UnpublishedFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, url, durable=durable)
        self._published = False
        try:
            self._file.reserve(0, size_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, self._written_bytes, len(view))
        self._file.write(self._written_bytes, view)
        self._written_bytes += len(view)

    def commit(self) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._written_bytes)
        self._file.sync()
        with writing(self._url):
            try:
                identity = self._file.publish()
            except FileNotFoundError as cause:  # whoever has taken the target over has removed it
                raise FileNotFoundError(errno.ENOENT, "the unfinished file was removed", self._file.path) from cause
        self._published = True
        return identity

    def abort(self) -> None:
        with contextlib.suppress(OSError, ReshardError), writing(self._url):
            self._file.close()
        if not self._published:
            self._published = True
            with contextlib.suppress(OSError, ReshardError), writing(self._url):
                os.unlink(self._file.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")


class LocalPieceWriter:
    """Write units of one file by position; the unfinished file stands at `place`."""

    def __init__(self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, *, durable: bool) -> None:
        self._url = url
        self._size_bytes = size_bytes
        begun = receipts is not None
        with writing(place):
            make_directory(urls.parent(place))
            try:
                flags = os.O_RDWR if begun else os.O_RDWR | os.O_CREAT
                self._file = UnpublishedFile(place, flags, url, durable=durable)
            except FileNotFoundError:
                if not begun:
                    raise
                raise PiecesLostError(place) from None
            self._receipt = _receipt(os.fstat(self._file.descriptor))
        if any(receipt != self._receipt for receipt in receipts or ()):
            self._file.close()
            raise PiecesLostError(place)

    def write(self, offset_bytes: int, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, offset_bytes, len(view))
        if offset_bytes % WINDOW_BYTES == 0:
            # Unit by unit: other writers' ranges are theirs to reserve, and a full disk shows here as well.
            self._file.reserve(offset_bytes, min(WINDOW_BYTES, self._size_bytes - offset_bytes))
        self._file.write(offset_bytes, view)

    def finish(self) -> tuple[str, ...]:
        self._file.sync()
        with writing(self._url):
            self._file.close()  # without a sync, NFS tells only here what it could not keep
        return (self._receipt,)

    def commit(self, receipts: Sequence[str]) -> FileIdentity:
        with writing(self._url):
            make_directory(urls.parent(self._url))
            try:
                found = fresh_stat(self._file.path)
                if any(receipt != _receipt(found) for receipt in (*receipts, self._receipt)):
                    raise PiecesLostError(self._file.path)
                check_whole(self._url, self._size_bytes, found.st_size)
                return self._file.publish()
            except FileNotFoundError:
                # Committed by another attempt, or removed by who has taken the target over.
                raise PiecesLostError(self._file.path) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, ReshardError), writing(self._url):
            self._file.close()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")


def _receipt(found: os.stat_result) -> str:
    """Name the file that was written to: the one at a place may be another by now. NFS gives all nodes this number."""
    return f"file {found.st_ino}"


def holds(place: str, ranges: Sequence[tuple[int, int, int]]) -> tuple[str, ...] | None:
    """Read what is there: a record may be older than a crash that took the bytes along.

    Others may write to the file meanwhile, so its size and time of change say nothing.
    """
    buffer = bytearray(max((length for _, length, _ in ranges), default=0))
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        for begin, length, crc32 in ranges:
            view = memoryview(buffer)[:length]
            done = 0
            while done < length and (count := os.preadv(descriptor, [view[done:]], begin + done)):
                done += count
            if done < length or isal_zlib.crc32(view) != crc32:
                return None
        return (_receipt(os.fstat(descriptor)),)
    finally:
        os.close(descriptor)


def temporary_path(directory: str, name: str) -> str:
    """Make a name in this directory that nobody else has."""
    return urls.join(directory, f".{name[:_NAME_CHARACTERS]}.{uuid.uuid4().hex}.part")


def is_temporary(name: str) -> bool:
    """Tell whether a name was made by `temporary_path`."""
    return re.fullmatch(r"\..*\.[0-9a-f]{32}\.part", name, re.DOTALL) is not None
