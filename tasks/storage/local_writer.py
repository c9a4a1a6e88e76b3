"""Atomic, durable writes of local and mounted files.

A file is written under a temporary name, synced, and renamed. An error of fsync or close means that bytes are lost: the
temporary file is dropped and nobody syncs it again, since a second fsync may say "well" over lost pages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from types import TracebackType
from typing import Self

from tasks.storage import urls
from tasks.storage.interface import FileIdentity
from tasks.storage.local_errors import writing
from tasks.storage.local_reader import identity_of
from tasks.storage.problems import check_room, check_whole

# Larger windows give no more speed on local disks or NFS (whose wsize is 1 MiB at most), smaller ones cost calls.
_WINDOW_BYTES = 4 << 20
# How much is written before the disk is told to begin with it, so that little is left when fsync asks. 32 and 64 MiB
# measured alike on ext4 (2 GB: 1.5 s without, 1.05 s with); 8 MiB was less steady where two workers wrote at once.
_BEHIND_BYTES = 32 << 20
# Keeps the temporary name under the 255 bytes of a name for every alphabet.
_NAME_CHARACTERS = 40


class LocalWriter:
    """Write one file; see the module for how it appears."""

    def __init__(self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool = True) -> None:
        self.window_bytes = _WINDOW_BYTES
        self._durable = durable
        self._url = url
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._begun_bytes = 0
        self._descriptor = -1
        with writing(url):
            make_directory(urls.parent(url))
        with writing(temporary_directory):
            make_directory(temporary_directory)
            self._temporary, self._descriptor = open_temporary(temporary_directory, urls.basename(url))

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, self._written_bytes, len(view))
        with writing(self._url):
            write_all(self._descriptor, view)
        self._written_bytes += len(view)
        if self._durable and self._written_bytes - self._begun_bytes >= _BEHIND_BYTES:
            self._begin_writeback()

    def commit(self) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._written_bytes)
        with writing(self._url):
            if self._durable:
                os.fsync(self._descriptor)
            self._close()
            os.replace(self._temporary, self._url)
            self._temporary = ""
            if self._durable:
                sync_directory(urls.parent(self._url))
            return identity_of(self._url, os.stat(self._url))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")

    def _begin_writeback(self) -> None:
        """Let the disk begin with what it was not yet told of, without waiting for it.

        Linux writes the range out before it drops what is clean already. Errors stay for fsync to tell.
        """
        length_bytes = self._written_bytes - self._begun_bytes
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, self._begun_bytes, length_bytes, os.POSIX_FADV_DONTNEED)
        self._begun_bytes = self._written_bytes

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_temporary(directory: str, name: str) -> tuple[str, int]:
    """Create a file nobody else has, in this directory; return its path and descriptor."""
    path = urls.join(directory, f".{name[:_NAME_CHARACTERS]}.{uuid.uuid4().hex}.part")
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def is_temporary(name: str) -> bool:
    """Tell whether a file was made by `open_temporary`."""
    return re.fullmatch(r"\..*\.[0-9a-f]{32}\.part", name, re.DOTALL) is not None


def write_all(descriptor: int, view: memoryview) -> None:
    """Write until nothing is left: one call may take less than it was given (2 GiB at most)."""
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: str) -> None:
    """Make the names in a directory durable; a file system which cannot is left in peace."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: str) -> None:
    """Make a directory and those above it, durably; one that is there already is fine."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = urls.parent(path)
    for name in reversed(missing):
        # Another node may have made it in the meantime, unseen through this node's cache.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name)
        sync_directory(urls.parent(name))
