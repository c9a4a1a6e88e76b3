"""Exact reads of local and mounted files."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from types import TracebackType
from typing import Self

from tasks.storage.interface import FileIdentity
from tasks.storage.local_errors import reading
from tasks.storage.problems import check_range, no_such_file, short_read, source_changed

# NFSv3 answers ESTALE when the file was replaced or its server restarted; a new open settles which. More than a few in
# a row means that the export is gone.
_REOPEN_ATTEMPTS = 5


def identity_of(path: str, found: os.stat_result) -> FileIdentity:
    """Make the identity of a regular file from its stat."""
    return FileIdentity(path, found.st_size, str(found.st_mtime_ns))


def fresh_stat(path: str) -> os.stat_result:
    """Describe a file as it is now. A stat may be a minute old on NFS; opening a file asks the server."""
    # Without O_NONBLOCK, a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


class LocalReader:
    """Read one file by position; several threads may share it."""

    def __init__(self, identity: FileIdentity) -> None:
        self.identity = identity
        with reading(identity.url):
            self._descriptor = self._open()

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        check_range(self.identity, offset_bytes, len(view))
        done_bytes = 0
        with reading(self.identity.url):
            while done_bytes < len(view):
                count = self._read_some(offset_bytes + done_bytes, view[done_bytes:])
                if count == 0:
                    self._check(os.fstat(self._descriptor))
                    raise short_read(self.identity, offset_bytes, len(view), f"the end after {done_bytes} bytes")
                done_bytes += count

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        check_range(self.identity, offset_bytes, length_bytes)
        buffer = bytearray(length_bytes)
        self.read_into(offset_bytes, memoryview(buffer))
        return bytes(buffer)

    def close(self) -> None:
        """Let go of the file without a last check."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            with reading(self.identity.url):
                try:
                    found = fresh_stat(self.identity.url)
                except FileNotFoundError:
                    raise source_changed(self.identity, "nothing") from None
            self._check(found)

    def __reduce__(self) -> str:
        raise TypeError("a reader belongs to its process; send the identity instead")

    def _read_some(self, offset_bytes: int, view: memoryview) -> int:
        for _ in range(_REOPEN_ATTEMPTS):
            try:
                return os.preadv(self._descriptor, [view], offset_bytes)
            except OSError as cause:
                if cause.errno != errno.ESTALE:
                    raise
                fresh = self._open()
                # The stale number now leads to the fresh file, also for a thread which reads at this moment.
                os.dup2(fresh, self._descriptor, inheritable=False)
                os.close(fresh)
        return os.preadv(self._descriptor, [view], offset_bytes)

    def _open(self) -> int:
        descriptor = os.open(self.identity.url, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat_module.S_ISREG(found.st_mode):
                raise no_such_file(self.identity.url)
            self._check(found)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, found: os.stat_result) -> None:
        actual = identity_of(self.identity.url, found)
        if actual != self.identity:
            raise source_changed(self.identity, f"{actual.size_bytes} bytes, version {actual.version}")
