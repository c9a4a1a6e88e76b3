"""S3 and the stores which speak like it.

s3fs gives configuration, credentials and connections; the requests are ours.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import s3_client, s3_parts, s3_pieces, s3_writer
from tasks.storage.interface import FileIdentity, ListedFile
from tasks.storage.problems import no_such_directory, no_such_file, source_changed
from tasks.storage.s3_reader import S3Reader


class S3Backend:
    """Objects by s3:// URL; a directory is a prefix which ends in a slash."""

    def stat(self, url: str) -> FileIdentity:
        bucket, key = s3_client.split(url)
        if not key:
            raise no_such_file(url)
        found = s3_client.run(url, s3_client.call, "head_object", url, ErrorKind.SOURCE, Bucket=bucket, Key=key)
        return FileIdentity(url, int(found["ContentLength"]), str(found["ETag"]))

    def exists(self, url: str) -> bool:
        try:
            self.stat(url)
        except ReshardError as cause:
            if cause.problems[0].reference != "no-such-file":
                raise
            return s3_client.run(url, _is_prefix, url)
        return True

    def list_files(self, url: str) -> tuple[ListedFile, ...]:
        return s3_client.run(url, _list_files, url)

    def open_reader(self, identity: FileIdentity) -> S3Reader:
        found = self.stat(identity.url)
        if found != identity:
            raise source_changed(identity, f"{found.size_bytes} bytes, version {found.version}")
        return S3Reader(identity)

    def open_writer(
        self, url: str, size_bytes: int, *, temporary_directory: str, durable: bool, fenced: bool
    ) -> s3_writer.S3Writer:
        return s3_writer.S3Writer(url, size_bytes, fenced=fenced)

    def buffered_bytes(self, size_bytes: int, *, sharing: int) -> int:
        return s3_parts.buffered_bytes(size_bytes, sharing)

    def unit_bytes(self, size_bytes: int) -> int:
        return s3_parts.part_bytes(size_bytes)

    def open_pieces(
        self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, *, durable: bool, sharing: int
    ) -> s3_pieces.S3PieceWriter:
        return s3_pieces.S3PieceWriter(url, size_bytes, place, receipts, sharing)

    def holds(
        self, place: str, ranges: Sequence[tuple[int, int, int]], receipts: Sequence[str]
    ) -> tuple[str, ...] | None:
        return tuple(receipts) if s3_pieces.holds(place, receipts) else None

    def drop_pieces(self, place: str) -> None:
        s3_pieces.drop(place)

    def create_only(self, url: str, data: bytes) -> bool:
        return s3_writer.create_only(url, data)

    def delete(self, url: str) -> None:
        s3_writer.object_call("delete_object", url)

    def leftovers(self, url: str, places: Sequence[str]) -> tuple[Callable[[], None], ...]:
        notes = [note for place in places if (note := s3_pieces.read_note(place))]
        return s3_client.run(url, _uploads, url, {note["upload_id"] for note in notes})

    def make_directory(self, url: str) -> None:
        """Do nothing: a prefix is there with its first object."""


async def _pages(url: str, **arguments: Any) -> AsyncIterator[dict[str, Any]]:
    """List what is below a prefix, page by page."""
    bucket, key = s3_client.split(url)
    arguments |= {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}
    while True:
        try:
            page = await s3_client.call("list_objects_v2", url, ErrorKind.SOURCE, **arguments)
        except ReshardError as cause:
            if cause.problems[0].reference == "no-such-file":
                raise no_such_directory(url) from cause
            raise
        yield page
        if not page.get("IsTruncated"):
            return
        arguments["ContinuationToken"] = page["NextContinuationToken"]


async def _uploads(url: str, noted: Collection[str]) -> tuple[Callable[[], None], ...]:
    """Find the uploads to keys directly below a prefix that nobody has ended or noted."""
    bucket, key = s3_client.split(url)
    prefix = f"{key}/" if key else ""
    place = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
    found: list[Callable[[], None]] = []
    more: dict[str, str] = {}
    while True:
        page = await s3_client.call("list_multipart_uploads", url, ErrorKind.TARGET, **place, **more)
        found += [
            functools.partial(s3_writer.abort_upload, f"{url}/{each['Key'][len(prefix) :]}", str(each["UploadId"]))
            for each in page.get("Uploads", ())
            if str(each["UploadId"]) not in noted
        ]
        if not page.get("IsTruncated") or "NextKeyMarker" not in page:
            return tuple(found)
        more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}


async def _is_prefix(url: str) -> bool:
    async for page in _pages(url, MaxKeys=1):
        return bool(page.get("Contents"))
    return False


async def _list_files(url: str) -> tuple[ListedFile, ...]:
    key = s3_client.split(url)[1]
    skipped = len(key) + 1 if key else 0
    files = []
    num_found = 0
    async for page in _pages(url, Delimiter="/"):
        entries = page.get("Contents", ())
        num_found += len(entries) + len(page.get("CommonPrefixes", ()))
        for entry in entries:
            name = str(entry["Key"])[skipped:]
            if name:  # else the empty object by which some tools mark a directory
                identity = FileIdentity(f"{url}/{name}", int(entry["Size"]), str(entry["ETag"]))
                files.append(ListedFile(name, identity.size_bytes, identity))
    if not num_found and key:
        raise no_such_directory(url)
    return tuple(sorted(files, key=lambda file: file.name))
