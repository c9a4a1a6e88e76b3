"""Read ranges of one file through a function, keep what was read, count the requests.

The index of a checkpoint needs a few small pieces of the file; each piece is asked for once. Does not know formats.

>>> content = RangedFile(lambda offset, length: b"abcdef"[offset:offset + length], 6, "a.pt")
>>> content.read(2, 4), content.read(3, 2), content.num_requests
(b'cdef', b'de', 1)
"""

from __future__ import annotations

from collections.abc import Callable

from tasks.errors import ErrorKind, error

ReadRange = Callable[[int, int], bytes]
"""``read(offset, length)`` gives exactly ``length`` bytes; whole ranges only."""


# The head, the tail, the table and the pickle; local headers of a file packed again, one a tensor, are not kept.
_MAX_PIECES = 16


class RangedFile:
    """One file of known size. Keeps the first pieces read: for indexes, not for tensor data."""

    def __init__(self, read: ReadRange, size_bytes: int, name: str) -> None:
        self._read = read
        self._pieces: list[tuple[int, bytes]] = []
        self.size_bytes = size_bytes
        self.name = name
        self.num_requests = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return a range, from a kept piece where one has all of it. Raises SOURCE where it leaves the file."""
        for start, piece in self._pieces:
            if start <= offset and offset + length <= start + len(piece):
                return piece[offset - start : offset - start + length]
        if offset < 0 or offset + length > self.size_bytes:
            raise error(
                ErrorKind.SOURCE,
                "truncated-file",
                f"{self.name} is cut off",
                context=(f"declared: bytes {offset} to {offset + length}", f"actual: {self.size_bytes} bytes"),
                hint="copy the file again from where it was saved",
            )
        piece = self._read(offset, length)
        self.num_requests += 1
        if len(piece) != length:
            raise error(
                ErrorKind.SOURCE,
                "short-read",
                f"{self.name}: the storage gave fewer bytes than asked for",
                context=(f"asked: {length} bytes at {offset}", f"actual: {len(piece)} bytes"),
                hint="the file was replaced or cut while it was read: try again when nobody writes it",
            )
        if len(self._pieces) < _MAX_PIECES:
            self._pieces.append((offset, piece))
        return piece
