"""Overlaps making the bytes of a file with writing them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from isal import isal_zlib

from tasks.errors import ErrorKind, error

Put = Callable[[int, memoryview], None]
"Writes bytes at an offset of the file."


class WriteBehind:
    """Writes one window while the caller makes the next: a buffer may be used again after the next `write`."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._pool = ThreadPoolExecutor(1, "write-behind")
        self._pending: Future[None] | None = None

    def write(self, offset_bytes: int, data: memoryview, crc32: int) -> None:
        """Wait until the window before is written, then hand this one over."""
        self._wait()
        self._pending = self._pool.submit(self._put_and_check, offset_bytes, data, crc32)

    def _put_and_check(self, offset_bytes: int, data: memoryview, crc32: int) -> None:
        """Write a window, and see that it still holds what it held when its CRC32 was made: 2 ms for 64 MiB."""
        self._put(offset_bytes, data)
        if isal_zlib.crc32(data) != crc32:
            raise error(
                ErrorKind.TASK,
                "window-changed",
                f"the window at {offset_bytes} changed while it was written",
                hint="nothing was published; the machine's memory is at fault, or this program: please report it",
            )

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown(wait=True)
