"""The functions of this package: each finds the backend of its URL. Backends are imported when first needed."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable

from tasks.errors import ErrorKind, ReshardError, error
from tasks.storage import urls
from tasks.storage.interface import Backend, ByteReader, FileIdentity, ListedFile, TargetWriter

# A file that is replaced between its stat and its read is simply read again; a steady stream of changes is an error.
_SMALL_ATTEMPTS = 4


def stat(url: str) -> FileIdentity:
    """Describe a file, through symbolic links. Raises `no-such-file`."""
    url = urls.normalise(url)
    return _backend(url).stat(url)


def exists(url: str) -> bool:
    """Tell whether a file or directory is there. On NFS the answer may be 30 s old: list the directory to be sure."""
    url = urls.normalise(url)
    return _backend(url).exists(url)


def list_files(url: str) -> tuple[ListedFile, ...]:
    """List the files directly in a directory, by name, never from a cache. Raises `no-such-directory`."""
    url = urls.normalise(url)
    return _backend(url).list_files(url)


def glob_files(pattern: str) -> tuple[ListedFile, ...]:
    """List the files of a directory whose name matches; wildcards (* ? [abc]) in the last component only."""
    pattern = urls.normalise(pattern)
    directory, name = urls.parent(pattern), urls.basename(pattern)
    if any(mark in directory for mark in "*?["):
        hint = "use wildcards in the last component only"
        raise error(ErrorKind.USAGE, "wildcard-in-directory", f"{pattern}: a directory has a wildcard", hint=hint)
    return tuple(file for file in list_files(directory) if fnmatch.fnmatchcase(file.name, name))


def open_reader(identity: FileIdentity) -> ByteReader:
    """Open a file that must still be the one described. Raises `source-changed`, then and later."""
    return _backend(identity.url).open_reader(identity)


def open_writer(url: str, size_bytes: int, *, temporary_directory: str, durable: bool = True) -> TargetWriter:
    """Open a new file of known size, which appears at its commit.

    The temporary directory is used by local files only, and must be on their file system; missing directories are made.
    So is `durable`: without it a local file may be lost in a power cut after its commit.
    """
    url = urls.normalise(url)
    backend = _backend(url)
    return backend.open_writer(url, size_bytes, temporary_directory=temporary_directory, durable=durable)


def buffered_bytes(url: str, size_bytes: int) -> int:
    """Return how much memory the writer of a file of this size holds at most."""
    url = urls.normalise(url)
    return _backend(url).buffered_bytes(size_bytes)


def read_small(url: str) -> bytes:
    """Read a whole small file in one state."""
    url = urls.normalise(url)
    for _ in range(_SMALL_ATTEMPTS - 1):
        try:
            return _read_whole(url)
        except ReshardError as cause:
            if cause.problems[0].reference != "source-changed":
                raise
    return _read_whole(url)


def write_small(url: str, data: bytes, *, durable: bool = True) -> None:
    """Write or replace a whole small file; readers see the old or the new one. `durable` as for `open_writer`."""
    url = urls.normalise(url)
    with open_writer(url, len(data), temporary_directory=urls.parent(url), durable=durable) as writer:
        writer.write(data)
        writer.commit()


def create_only(url: str, data: bytes) -> bool:
    """Create a small file if its name is free; of several who try, one gets True."""
    url = urls.normalise(url)
    return _backend(url).create_only(url, data)


def delete(url: str) -> None:
    """Delete a file or an empty local directory; a missing one is fine."""
    url = urls.normalise(url)
    _backend(url).delete(url)


def leftovers(url: str) -> tuple[Callable[[], None], ...]:
    """Find what writers that were killed left directly in a directory; calling one of them removes it.

    Writers that are still at work cannot be told from dead ones: theirs fail when they commit, and publish nothing.
    """
    url = urls.normalise(url)
    return _backend(url).leftovers(url)


def make_directory(url: str) -> None:
    """Make a directory and those above it; nothing to do on object stores."""
    url = urls.normalise(url)
    _backend(url).make_directory(url)


def _read_whole(url: str) -> bytes:
    identity = stat(url)
    with open_reader(identity) as reader:
        return reader.read(0, identity.size_bytes)


def _backend(url: str) -> Backend:
    return _backend_of(urls.protocol(url))


@functools.cache
def _backend_of(protocol: str) -> Backend:
    # Importing s3fs and botocore takes most of a second: only those pay who use it.
    if protocol == "file":
        from tasks.storage.local import LocalBackend

        return LocalBackend()
    if protocol == "s3":
        from tasks.storage.s3 import S3Backend

        return S3Backend()
    from tasks.storage.generic import GenericBackend

    return GenericBackend()
