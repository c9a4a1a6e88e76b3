"""Any other fsspec protocol, memory:// included: exact lengths around its cat_file, whole files by pipe or put.

Whether a file appears whole and whether create_only is safe against other machines is as good as the protocol: object
stores publish at the end of an upload; here the lock below makes one process safe against itself.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import fsspec
import fsspec.core

from tasks.errors import ErrorKind, error
from tasks.storage import retry, urls
from tasks.storage.interface import FileIdentity, ListedFile, PieceWriter
from tasks.storage.patience import call
from tasks.storage.problems import (
    TransientStorageError,
    check_range,
    check_room,
    check_whole,
    no_such_directory,
    no_such_file,
    short_read,
    source_changed,
)

_WINDOW_BYTES = 8 << 20
_RANGE_BYTES = 16 << 20
# Up to here a file is published from memory in one call; above, from its spool by put_file.
_PIPED_BYTES = 16 << 20
_TRANSIENT = (TimeoutError, ConnectionError)
# What file systems call the time or digest which changes with the contents, the surest first.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified", "created")

# The memory file system hands every reader the same file object, and looks before it creates without a lock.
_lock = threading.RLock()


class GenericBackend:
    """Files by URL, through fsspec's own instance cache, which knows about forks."""

    def stat(self, url: str) -> FileIdentity:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.SOURCE):
            file_system.invalidate_cache()
            try:
                found = file_system.info(path)
            except FileNotFoundError:
                raise no_such_file(url) from None
        if found["type"] != "file":
            raise no_such_file(url)
        return _identity(url, found)

    def exists(self, url: str) -> bool:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.SOURCE):
            file_system.invalidate_cache()
            return bool(file_system.exists(path))

    def list_files(self, url: str) -> tuple[ListedFile, ...]:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.SOURCE):
            file_system.invalidate_cache()
            if not file_system.isdir(path):
                raise no_such_directory(url)
            entries = [entry for entry in file_system.ls(path, detail=True) if entry["type"] == "file"]
        files = []
        for entry in entries:
            name = urls.basename(entry["name"])
            identity = _identity(urls.join(url, name), entry)
            files.append(ListedFile(name, identity.size_bytes, identity))
        return tuple(sorted(files, key=lambda file: file.name))

    def open_reader(self, identity: FileIdentity) -> GenericReader:
        _check(identity, self.stat(identity.url))
        return GenericReader(identity)

    def open_writer(
        self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool, fenced: bool
    ) -> GenericWriter:
        return GenericWriter(url, size_bytes)

    def buffered_bytes(self, size_bytes: int, *, sharing: int) -> int:
        return min(size_bytes, _PIPED_BYTES)

    def unit_bytes(self, size_bytes: int) -> None:
        return None  # fsspec has no writes by position

    def open_pieces(
        self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, *, durable: bool, sharing: int
    ) -> PieceWriter:
        raise NotImplementedError(f"{url} cannot be written piece by piece")

    def holds(self, place: str, ranges: Sequence[tuple[int, int, int]], receipts: Sequence[str]) -> None:
        return None

    def drop_pieces(self, place: str) -> None:
        self.delete(place)

    def create_only(self, url: str, data: bytes) -> bool:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.TARGET):
            file_system.invalidate_cache()
            if file_system.exists(path):
                return False
            try:
                file_system.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True

    def delete(self, url: str) -> None:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.TARGET), contextlib.suppress(FileNotFoundError):
            file_system.rmdir(path) if file_system.isdir(path) else file_system.rm_file(path)

    def leftovers(self, url: str, places: Sequence[str]) -> tuple[Callable[[], None], ...]:
        """Find nothing: files are published in one call, from a spool that is not in the target."""
        return ()

    def make_directory(self, url: str) -> None:
        file_system, path = _find(url)
        with _exclusive(url), _explained(url, ErrorKind.TARGET):
            file_system.makedirs(path, exist_ok=True)


class GenericReader:
    """Read one file by ranges."""

    def __init__(self, identity: FileIdentity) -> None:
        self.identity = identity
        self._file_system, self._path = _find(identity.url)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        check_range(self.identity, offset_bytes, len(view))
        for start in range(0, len(view), _RANGE_BYTES):
            piece = view[start : start + _RANGE_BYTES]
            piece[:] = self._read_exactly(offset_bytes + start, len(piece))

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        check_range(self.identity, offset_bytes, length_bytes)
        buffer = bytearray(length_bytes)
        self.read_into(offset_bytes, memoryview(buffer))
        return bytes(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            _check(self.identity, GenericBackend().stat(self.identity.url))

    def __reduce__(self) -> str:
        raise TypeError("a reader belongs to its process; send the identity instead")

    def _read_exactly(self, offset_bytes: int, length_bytes: int) -> bytes:
        pauses = retry.delays_seconds()
        while True:
            failure: Exception
            try:
                data = self._read_once(offset_bytes, length_bytes)
                if len(data) == length_bytes:
                    return data
                failure = short_read(self.identity, offset_bytes, length_bytes, f"{len(data)} bytes")
            except TransientStorageError as cause:
                failure = cause
            pause = next(pauses, None)
            if pause is None:
                raise failure
            _check(self.identity, GenericBackend().stat(self.identity.url))
            time.sleep(pause)

    def _read_once(self, offset_bytes: int, length_bytes: int) -> bytes:
        with _exclusive(self.identity.url), _explained(self.identity.url, ErrorKind.SOURCE):
            try:
                return bytes(
                    self._file_system.cat_file(self._path, start=offset_bytes, end=offset_bytes + length_bytes)
                )
            except FileNotFoundError:
                raise source_changed(self.identity, "nothing") from None


class GenericWriter:
    """Collect one file in a local spool, and publish it in one call."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self.window_bytes = _WINDOW_BYTES
        self._url = url
        self._size_bytes = size_bytes
        self._written_bytes = 0
        # Closed, and thereby deleted, by abort.
        self._spool = tempfile.NamedTemporaryFile(prefix="spool.")  # noqa: SIM115

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, self._written_bytes, len(view))
        with _explained(self._url, ErrorKind.TASK):
            self._spool.write(view)
        self._written_bytes += len(view)

    def commit(self) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._written_bytes)
        file_system, path = _find(self._url)
        with _exclusive(self._url), _explained(self._url, ErrorKind.TARGET):
            self._spool.flush()
            # put_file on the memory file system shows the file while it grows.
            if self._size_bytes <= _PIPED_BYTES or urls.protocol(self._url) == "memory":
                self._spool.seek(0)
                file_system.pipe_file(path, self._spool.read())
            else:
                file_system.put_file(self._spool.name, path)
        found = GenericBackend().stat(self._url)
        if found.size_bytes != self._size_bytes:
            GenericBackend().delete(self._url)
            raise TransientStorageError(f"{self._url}: {found.size_bytes} of {self._size_bytes} bytes stored")
        self.abort()
        return found

    def abort(self) -> None:
        self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")


def _exclusive(url: str) -> contextlib.AbstractContextManager[object]:
    """Let threads take turns at the memory file system. No others: a call that hangs there would hold the lock."""
    return _lock if urls.protocol(url) == "memory" else contextlib.nullcontext()


def _find(url: str) -> tuple[Any, str]:
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as cause:
        hint = "install the package which serves this protocol"
        raise error(
            ErrorKind.USAGE, "unknown-protocol", f"{url}: fsspec cannot open this protocol", hint=hint
        ) from cause
    return file_system, str(path)


def _identity(url: str, found: dict[str, Any]) -> FileIdentity:
    values = (found.get(key) for key in _VERSION_KEYS)
    version = next((value for value in values if value is not None), "")
    # The same moment is a datetime from one call and a number from another.
    moment = getattr(version, "timestamp", None)
    return FileIdentity(url, int(found["size"]), str(moment() if moment else version))


def _check(identity: FileIdentity, found: FileIdentity) -> None:
    if found != identity:
        raise source_changed(identity, f"{found.size_bytes} bytes, version {found.version}")


@contextlib.contextmanager
def _explained(url: str, kind: ErrorKind) -> Iterator[None]:
    """Turn the OSErrors of a file system into our own; its text is not shown, since it may quote credentials."""
    try:
        with call(url):
            yield
    except TransientStorageError:
        raise
    except _TRANSIENT as cause:
        raise TransientStorageError(f"{url}: {type(cause).__name__}") from cause
    except OSError as cause:
        reference = "cannot-read" if kind is ErrorKind.SOURCE else "cannot-write"
        reason = f"{type(cause).__name__}, errno {cause.errno}"
        hint = "check the credentials and the rights for this storage"
        raise error(kind, reference, f"{url}: {reason}", hint=hint) from cause
