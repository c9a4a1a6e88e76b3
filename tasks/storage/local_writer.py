"""Atomic, durable writes of local and mounted files: under a temporary name, synced, and renamed.

A whole file has one writer and a name nobody else uses. One that several processes write has a name they agree on; what
is there stays when they die.
"""

from __future__ import annotations

import contextlib
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
from tasks.storage.local_reader import LocalReader, fresh_stat, identity_of
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
        identity = self._file.publish()
        self._published = True
        return identity

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._published:
            self._published = True
            with contextlib.suppress(OSError):
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

    def write(self, offset_bytes: int, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, offset_bytes, len(view))
        if offset_bytes % WINDOW_BYTES == 0:
            # Unit by unit: other writers' ranges are theirs to reserve, and a full disk shows here as well.
            self._file.reserve(offset_bytes, min(WINDOW_BYTES, self._size_bytes - offset_bytes))
        self._file.write(offset_bytes, view)

    def finish(self) -> tuple[str, ...]:
        self._file.sync()
        return ()

    def commit(self, receipts: Sequence[str]) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._file.size_bytes())
        with writing(self._url):
            make_directory(urls.parent(self._url))
        return self._file.publish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")


def holds(place: str, ranges: Sequence[tuple[int, int, int]]) -> bool:
    """Read what is there: a record may be older than a crash that took the bytes along."""
    buffer = bytearray(max((length for _, length, _ in ranges), default=0))
    try:
        identity = identity_of(place, fresh_stat(place))
        with LocalReader(identity) as reader:
            for begin, length, crc32 in ranges:
                view = memoryview(buffer)[:length]
                reader.read_into(begin, view)
                if isal_zlib.crc32(view) != crc32:
                    return False
    except (OSError, ReshardError):
        return False  # gone, shorter, or written to at this moment
    return True


def temporary_path(directory: str, name: str) -> str:
    """Make a name in this directory that nobody else has."""
    return urls.join(directory, f".{name[:_NAME_CHARACTERS]}.{uuid.uuid4().hex}.part")


def is_temporary(name: str) -> bool:
    """Tell whether a name was made by `temporary_path`."""
    return re.fullmatch(r"\..*\.[0-9a-f]{32}\.part", name, re.DOTALL) is not None
