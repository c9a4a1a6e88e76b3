"""From errno to the errors of this program, for local and mounted file systems."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.errors import ErrorKind, error
from tasks.storage.patience import call
from tasks.storage.problems import TransientStorageError, no_such_file

# What a later attempt can cure: network file systems which went away, devices which answered wrongly once, and tables
# which were full for the moment. All else stays as it is until somebody changes something.
_TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.EINTR,
        errno.EAGAIN,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNRESET,
        errno.ENOLCK,
        errno.EMFILE,
        errno.ENFILE,
    }
)
_HINTS = {
    errno.ENOSPC: "free some space or choose another directory",
    errno.EDQUOT: "raise the quota or choose another directory",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EROFS: "choose a directory which is not mounted read-only",
    errno.EXDEV: "put the temporary directory on the same file system as the target",
}


def read_failure(path: str, cause: OSError) -> Exception:
    """Make the error to raise when reading `path` failed."""
    if cause.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return no_such_file(path)
    if cause.errno in _TRANSIENT:
        return TransientStorageError(cause.errno, cause.strerror, path)
    hint = _HINTS.get(cause.errno or 0, "check the file system")
    return error(ErrorKind.SOURCE, "cannot-read", f"{path}: {cause.strerror}", hint=hint)


def write_failure(path: str, cause: OSError) -> Exception:
    """Make the error to raise when writing `path` failed: the bytes are to be written again from their source."""
    if cause.errno in _TRANSIENT:
        return TransientStorageError(cause.errno, cause.strerror, path)
    hint = _HINTS.get(cause.errno or 0, "check the file system")
    return error(ErrorKind.TASK, "cannot-write", f"{path}: {cause.strerror}", hint=hint)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn any OSError inside into the error of reading `path`."""
    try:
        with call(path):
            yield
    except TransientStorageError:
        raise
    except OSError as cause:
        raise read_failure(path, cause) from cause


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn any OSError inside into the error of writing `path`."""
    try:
        with call(path):
            yield
    except TransientStorageError:
        raise
    except OSError as cause:
        raise write_failure(path, cause) from cause
