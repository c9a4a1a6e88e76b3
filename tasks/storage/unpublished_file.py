"""A local file that is not there yet under its name: written by position, then synced and renamed.

An error of fsync or close means that bytes are lost: whoever wrote them writes them again, and nobody syncs them once
more, since a second fsync may say "well" over lost pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys

from tasks.storage import urls
from tasks.storage.interface import FileIdentity
from tasks.storage.local_errors import writing
from tasks.storage.local_reader import identity_of
from tasks.storage.patience import call

# How much is written before the disk is told to begin with it, so that little is left when fsync asks. 32 and 64 MiB
# measured alike on ext4 (2 GB: 1.5 s without, 1.05 s with); 8 MiB was less steady where two workers wrote at once.
_BEHIND_BYTES = 32 << 20
# Below this the call costs more than it saves.
_WORTH_RESERVING_BYTES = 1 << 20


class UnpublishedFile:
    """Owns the descriptor; `url` is the name that errors tell and that the file gets in the end."""

    def __init__(self, path: str, flags: int, url: str, *, durable: bool) -> None:
        self.path = path
        self._url = url
        self._durable = durable
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self._begun_bytes = self._written_bytes = 0

    def reserve(self, offset_bytes: int, length_bytes: int) -> None:
        """Take the room on the disk: a full disk is noticed before the work, and ext4 writes a third faster.

        Not posix_fallocate: where the file system cannot, the C library would write into each block.
        """
        if length_bytes >= _WORTH_RESERVING_BYTES and sys.platform == "linux":
            arguments = (ctypes.c_int(0), ctypes.c_int64(offset_bytes), ctypes.c_int64(length_bytes))
            with writing(self._url):
                if _libc().fallocate(ctypes.c_int(self._descriptor), *arguments):
                    code = ctypes.get_errno()
                    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise OSError(code, os.strerror(code))

    def write(self, offset_bytes: int, view: memoryview) -> None:
        """Write all of it: one call may take less than it was given (2 GiB at most)."""
        if offset_bytes != self._written_bytes:
            self._begun_bytes = offset_bytes
        self._written_bytes = offset_bytes + len(view)
        with writing(self._url):
            while view:
                count = os.pwrite(self._descriptor, view, offset_bytes)
                view, offset_bytes = view[count:], offset_bytes + count
        if self._durable and self._written_bytes - self._begun_bytes >= _BEHIND_BYTES:
            self._begin_writeback()

    def sync(self) -> None:
        if self._durable:
            with writing(self._url):
                os.fsync(self._descriptor)

    def publish(self) -> FileIdentity:
        """Give the file its name; the caller has synced it. Raises OSErrors as they are: what they mean differs."""
        self.close()
        os.replace(self.path, self._url)
        if self._durable:
            sync_directory(urls.parent(self._url))
        return identity_of(self._url, os.stat(self._url))

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin_writeback(self) -> None:
        """Let the disk begin with what it was not yet told of, without waiting for it.

        Linux writes the range out before it drops what is clean already. Errors stay for fsync to tell.
        """
        length_bytes = self._written_bytes - self._begun_bytes
        with contextlib.suppress(OSError), call(self._url):
            os.posix_fadvise(self._descriptor, self._begun_bytes, length_bytes, os.POSIX_FADV_DONTNEED)
        self._begun_bytes = self._written_bytes


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


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
