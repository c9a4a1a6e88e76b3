"""What storage promises: one file with an identity, exact reads, writes which appear whole.

Three backends keep these promises: local.py (disks and NFS), s3.py, and generic.py (any other fsspec protocol).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One state of one file: enough to notice that it is no longer the file that was planned for."""

    url: str
    "canonical: an absolute path for a local file, else with its protocol; never with credentials"
    size_bytes: int
    version: str
    "S3: the ETag; local: the modification time in ns; others: what the file system tells; empty if nothing"

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"{self.url}: a size of {self.size_bytes} bytes")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One entry of a directory listing."""

    name: str
    "the last component only"
    size_bytes: int
    identity: FileIdentity
    link_target: str | None = None
    "what a local symbolic link says, unresolved; the other fields describe the file it leads to"


class ByteReader(AbstractContextManager["ByteReader"], Protocol):
    """Read ranges of one file. Leaving the context checks a last time that the file has not changed."""

    identity: FileIdentity

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fill the whole buffer from this offset, or raise; never short, never with holes."""

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return exactly this many bytes, or raise."""


class TargetWriter(AbstractContextManager["TargetWriter"], Protocol):
    """Write one file front to back. Leaving the context without a commit aborts and leaves nothing behind."""

    window_bytes: int
    "the preferred size of one write; every other size works as well"

    def write(self, buffer: memoryview | bytes) -> None:
        """Append a copy of the buffer; the caller may use the buffer again at once."""

    def commit(self) -> FileIdentity:
        """Make the file appear, whole and durable, under its final name; raise if bytes are missing."""

    def abort(self) -> None:
        """Drop all that was written; harmless after a commit and when repeated."""


class PieceWriter(AbstractContextManager["PieceWriter"], Protocol):
    """Write units of one file, while other processes write others; the file appears when one of them commits.

    What was written stays when the context is left, so that it can be taken up later. Writers with equal bytes for a
    unit do not disturb each other.
    """

    def write(self, offset_bytes: int, buffer: memoryview | bytes) -> None:
        """Write a copy of the buffer; a unit is written from its beginning to its end, units in any order."""

    def finish(self) -> tuple[str, ...]:
        """Make what was written here durable; return receipts for the commit."""

    def commit(self, receipts: Sequence[str]) -> FileIdentity:
        """Make the file appear; `receipts` are those of all units, of this and other writers."""


class Backend(Protocol):
    """What a kind of storage must offer; every URL is already normalised."""

    def stat(self, url: str) -> FileIdentity: ...

    def exists(self, url: str) -> bool: ...

    def list_files(self, url: str) -> tuple[ListedFile, ...]: ...

    def open_reader(self, identity: FileIdentity) -> ByteReader: ...

    def open_writer(
        self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool, fenced: bool
    ) -> TargetWriter: ...

    def buffered_bytes(self, size_bytes: int, *, sharing: int) -> int: ...

    def unit_bytes(self, size_bytes: int) -> int | None: ...

    def open_pieces(
        self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, *, durable: bool, sharing: int
    ) -> PieceWriter: ...

    def holds(
        self, place: str, ranges: Sequence[tuple[int, int, int]], receipts: Sequence[str]
    ) -> tuple[str, ...] | None: ...

    def drop_pieces(self, place: str) -> None: ...

    def create_only(self, url: str, data: bytes) -> bool: ...

    def delete(self, url: str) -> None: ...

    def leftovers(self, url: str, places: Sequence[str]) -> tuple[Callable[[], None], ...]: ...

    def make_directory(self, url: str) -> None: ...
