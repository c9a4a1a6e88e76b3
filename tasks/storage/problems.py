"""The errors of storage, each made in one place so that every backend tells the same story."""

from __future__ import annotations

from tasks.errors import ErrorKind, ReshardError, error
from tasks.storage.interface import FileIdentity


class TransientStorageError(OSError):
    """Storage failed in a way that may pass, and outlived the retries made here: the task may be run again."""


class PiecesLostError(Exception):
    """What was written piece by piece is not there any more: committed by another attempt, or removed."""


def no_such_file(url: str) -> ReshardError:
    return error(ErrorKind.SOURCE, "no-such-file", f"{url} does not exist or is not a file", hint="check the name")


def no_such_directory(url: str) -> ReshardError:
    return error(
        ErrorKind.SOURCE, "no-such-directory", f"{url} is no directory, or holds nothing", hint="check the name"
    )


def source_changed(identity: FileIdentity, found: str) -> ReshardError:
    return error(
        ErrorKind.SOURCE,
        "source-changed",
        f"{identity.url} changed after it was inspected",
        context=(f"inspected: {identity.size_bytes} bytes, version {identity.version or '-'}", f"found: {found}"),
        hint="leave the files alone while they are read, and start again",
    )


def short_read(identity: FileIdentity, offset_bytes: int, length_bytes: int, found: str) -> ReshardError:
    return error(
        ErrorKind.SOURCE,
        "short-read",
        f"{identity.url}: bytes {offset_bytes} to {offset_bytes + length_bytes} cannot be read in full",
        context=(f"size of the file: {identity.size_bytes} bytes", f"found: {found}"),
        hint="the file is cut short, or its storage gives wrong answers: copy it again",
    )


def check_range(identity: FileIdentity, offset_bytes: int, length_bytes: int) -> None:
    """Raise if the range is not wholly inside the file."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > identity.size_bytes:
        raise short_read(identity, offset_bytes, length_bytes, "the range ends after the end of the file")


def check_room(url: str, size_bytes: int, written_bytes: int, more_bytes: int) -> None:
    """Raise if more would be written than the file was opened for."""
    if written_bytes + more_bytes > size_bytes:
        raise _wrong_length(url, size_bytes, f"at least {written_bytes + more_bytes} bytes")


def check_whole(url: str, size_bytes: int, written_bytes: int) -> None:
    """Raise if less was written than the file was opened for, before it is published."""
    if written_bytes != size_bytes:
        raise _wrong_length(url, size_bytes, f"{written_bytes} bytes")


def _wrong_length(url: str, declared_bytes: int, actual: str) -> ReshardError:
    return error(
        ErrorKind.TASK,
        "wrong-length",
        f"{url} was not written with the length it was opened for",
        context=(f"declared: {declared_bytes} bytes", f"actual: {actual}"),
        hint="nothing was published; this is a fault of the program, please report it",
    )
