"""Keeps the readers of recently used files open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tasks.checksums import Trail
from tasks.storage import ByteReader, FileIdentity, open_reader

# A worker seldom reads from more than this many files at a time; open files are a bounded resource.
_MOST_OPEN = 64


class ReaderPool:
    """Readers by file number; counts what is read, and keeps its checksums where a trail is given.

    Leaving the context checks that no file has changed.
    """

    def __init__(self, files: Sequence[FileIdentity], trail: Trail | None = None) -> None:
        self._files = files
        self._trail = trail
        self._open: OrderedDict[int, ByteReader] = OrderedDict()
        self.bytes_read = 0
        self.num_requests = 0

    def read_into(self, file: int, offset_bytes: int, buffer: memoryview) -> int | None:
        """Fill the buffer from a file, or raise; return the CRC32 where a trail is kept."""
        self._reader(file).read_into(offset_bytes, buffer)
        self.bytes_read += buffer.nbytes
        self.num_requests += 1
        return None if self._trail is None else self._trail.add(file, offset_bytes, buffer)

    def read(self, file: int, offset_bytes: int, length_bytes: int) -> bytes:
        """Return exactly these bytes, or raise."""
        data = self._reader(file).read(offset_bytes, length_bytes)
        self.bytes_read += length_bytes
        self.num_requests += 1
        return data

    def _reader(self, file: int) -> ByteReader:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= _MOST_OPEN:
            _, oldest = self._open.popitem(last=False)
            oldest.__exit__(None, None, None)
        reader = open_reader(self._files[file]).__enter__()
        self._open[file] = reader
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            _, reader = self._open.popitem()
            reader.__exit__(kind, fault, trace)
