"""Local disks and everything that is mounted, NFS included."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat as stat_module
from collections.abc import Callable, Sequence

from tasks.errors import ErrorKind, error
from tasks.faults import reach
from tasks.storage import local_writer, urls
from tasks.storage.interface import FileIdentity, ListedFile
from tasks.storage.local_errors import reading, writing
from tasks.storage.local_reader import LocalReader, fresh_stat, identity_of
from tasks.storage.problems import no_such_directory, no_such_file
from tasks.storage.unpublished_file import UnpublishedFile, make_directory, sync_directory

# What NFS shows of a file which was deleted while somebody still had it open.
_NFS_LEFTOVER = ".nfs"


class LocalBackend:
    """Files by plain path."""

    def stat(self, url: str) -> FileIdentity:
        with reading(url):
            found = fresh_stat(url)
        if not stat_module.S_ISREG(found.st_mode):
            raise no_such_file(url)
        return identity_of(url, found)

    def exists(self, url: str) -> bool:
        with reading(url):
            try:
                os.stat(url)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def list_files(self, url: str) -> tuple[ListedFile, ...]:
        with reading(url):
            try:
                with os.scandir(url) as entries:
                    listed = [_listed(url, entry) for entry in entries if not entry.name.startswith(_NFS_LEFTOVER)]
            except (FileNotFoundError, NotADirectoryError):
                raise no_such_directory(url) from None
        return tuple(sorted((file for file in listed if file is not None), key=lambda file: file.name))

    def open_reader(self, identity: FileIdentity) -> LocalReader:
        return LocalReader(identity)

    def open_writer(
        self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool, fenced: bool
    ) -> local_writer.LocalWriter:
        directory = urls.normalise(temporary_directory)
        return local_writer.LocalWriter(url, size_bytes, temporary_directory=directory, durable=durable)

    def buffered_bytes(self, size_bytes: int, *, sharing: int) -> int:
        return 0

    def unit_bytes(self, size_bytes: int) -> int:
        return local_writer.WINDOW_BYTES

    def open_pieces(
        self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, *, durable: bool, sharing: int
    ) -> local_writer.LocalPieceWriter:
        return local_writer.LocalPieceWriter(url, size_bytes, place, receipts, durable=durable)

    def holds(
        self, place: str, ranges: Sequence[tuple[int, int, int]], receipts: Sequence[str]
    ) -> tuple[str, ...] | None:
        with reading(place):
            return local_writer.holds(place, ranges)

    def drop_pieces(self, place: str) -> None:
        self.delete(place)

    def create_only(self, url: str, data: bytes) -> bool:
        directory = urls.parent(url)
        with writing(url):
            make_directory(directory)
            temporary = local_writer.temporary_path(directory, urls.basename(url))
            file = UnpublishedFile(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, url, durable=True)
            try:
                try:
                    file.write(0, memoryview(data))
                    file.sync()
                finally:
                    file.close()
                created = _link(temporary, url)
                reach("name-taken", url)
                sync_directory(directory)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        return created

    def delete(self, url: str) -> None:
        with writing(url), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(url) and not os.path.islink(url):
                os.rmdir(url)
            else:
                os.unlink(url)

    def leftovers(self, url: str, places: Sequence[str]) -> tuple[Callable[[], None], ...]:
        if not self.exists(url):
            return ()
        names = [file.name for file in self.list_files(url) if local_writer.is_temporary(file.name)]
        return tuple(functools.partial(self.delete, urls.join(url, name)) for name in names)

    def make_directory(self, url: str) -> None:
        with writing(url):
            make_directory(url)


def _listed(directory: str, entry: os.DirEntry[str]) -> ListedFile | None:
    """Describe one entry; None for what is no file, or is gone since the directory was read."""
    path = urls.join(directory, entry.name)
    link_target = os.readlink(path) if entry.is_symlink() else None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if link_target is None:
            return None
        raise error(
            ErrorKind.SOURCE,
            "broken-link",
            f"{path} is a link to {link_target}, which does not exist",
            hint="restore the file it leads to, or remove the link",
        ) from None
    if not stat_module.S_ISREG(found.st_mode):
        return None
    return ListedFile(entry.name, found.st_size, identity_of(path, found), link_target)


def _link(temporary: str, url: str) -> bool:
    """Give the finished file its name if the name is free, in one step."""
    try:
        os.link(temporary, url)
    except FileExistsError:
        # NFS can repeat a link whose answer was lost: then the name is there and it is ours.
        with contextlib.suppress(FileNotFoundError):
            return os.path.samefile(temporary, url)
        return False
    except FileNotFoundError:
        # Whoever took the name first may have cleaned up behind the others already.
        if os.path.exists(url):
            return False
        raise
    except OSError as cause:
        if cause.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        return _claim(temporary, url)
    return True


def _claim(temporary: str, url: str) -> bool:
    """Do the same where there are no hard links: whoever creates the name may replace it; readers may see it empty."""
    try:
        os.close(os.open(url, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    os.replace(temporary, url)
    return True
