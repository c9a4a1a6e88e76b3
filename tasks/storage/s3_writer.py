"""Writes to S3: one plain PUT for what fits a window, else a multipart upload with even parts.

An object appears only by the PUT or by the completion. A failed upload is aborted; s3fs's own writers would publish
half a file when an exception passes through them, or leave the parts behind. Not done here: finding an upload whose
creation was answered but the answer lost; a life-cycle rule of the bucket removes those.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from types import TracebackType
from typing import Any, Self

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import s3_client, s3_errors
from tasks.storage.interface import FileIdentity
from tasks.storage.problems import TransientStorageError, check_room, check_whole
from tasks.storage.s3_parts import PartSender, checksummed, completion, part_bytes

# The metadata by which a writer knows its own object again after an answer was lost.
WRITER_KEY = "writer"


class S3Writer:
    """Write one object with at most four windows in memory."""

    def __init__(self, url: str, size_bytes: int, *, fenced: bool = False) -> None:
        self.window_bytes = part_bytes(size_bytes)
        # A PUT on its way can be stopped by nobody; an upload can be aborted, and then it is not completed any more.
        self._in_parts = size_bytes > self.window_bytes or (fenced and size_bytes > 0)
        self._url = url
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._token = uuid.uuid4().hex
        self._upload_id = create_upload(url, self._token) if fenced and self._in_parts else ""
        self._sender = PartSender(url)
        self._window = self._sender.buffer()
        self._ended = False

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, self._written_bytes, len(view))
        while view:
            count = self._window.write(view[: self.window_bytes - self._window.tell()])
            self._written_bytes += count
            view = view[count:]
            if self._window.tell() == self.window_bytes and self._in_parts:
                self._send_part()

    def commit(self) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._written_bytes)
        identity = self._complete() if self._in_parts else self._put()
        self._ended = True
        return identity

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._sender.cancel()
        if self._upload_id:
            # What is left after this fails as well, the store's life-cycle rule removes; the first error is the news.
            with contextlib.suppress(ReshardError, TransientStorageError):
                abort_upload(self._url, self._upload_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")

    def _put(self) -> FileIdentity:
        self._window.truncate()
        answer = object_call("put_object", self._url, Metadata={WRITER_KEY: self._token}, **checksummed(self._window))
        return FileIdentity(self._url, self._size_bytes, str(answer["ETag"]))

    def _send_part(self) -> None:
        if not self._upload_id:
            self._upload_id = create_upload(self._url, self._token)
        number = -(-self._written_bytes // self.window_bytes)
        self._sender.send(self._upload_id, number, self._window)
        self._window = self._sender.buffer()

    def _complete(self) -> FileIdentity:
        if self._window.tell():
            self._send_part()
        self._sender.drain()
        return complete_upload(self._url, self._upload_id, self._token, self._sender.tags, self._size_bytes)


def object_call(method: str, url: str, **arguments: Any) -> Any:
    """Make a request about the object at `url`."""
    bucket, key = s3_client.split(url)
    return s3_client.run(url, s3_client.call, method, url, ErrorKind.TARGET, Bucket=bucket, Key=key, **arguments)


def create_upload(url: str, token: str) -> str:
    """Begin a multipart upload; return its id."""
    return str(object_call("create_multipart_upload", url, Metadata={WRITER_KEY: token})["UploadId"])


def abort_upload(url: str, upload_id: str) -> None:
    """Abort a multipart upload; one that has ended is fine."""
    try:
        object_call("abort_multipart_upload", url, UploadId=upload_id)
    except ReshardError as cause:
        if s3_errors.facts(cause)[1] != 404:
            raise


def complete_upload(url: str, upload_id: str, token: str, tags: dict[int, str], size_bytes: int) -> FileIdentity:
    """Make the object appear."""
    try:
        object_call("complete_multipart_upload", url, UploadId=upload_id, MultipartUpload=completion(tags))
    except ReshardError as cause:
        # After a lost answer a store may no longer know the upload. The object tells whether it is this one.
        if object_call("head_object", url).get("Metadata", {}).get(WRITER_KEY) != token:
            raise cause from None
    found = object_call("head_object", url)
    if found["ContentLength"] != size_bytes:
        raise TransientStorageError(f"{url}: {found['ContentLength']} of {size_bytes} bytes stored")
    return FileIdentity(url, size_bytes, str(found["ETag"]))


def create_only(url: str, data: bytes) -> bool:
    """PUT if the name is free. A writer's token tells a lost answer from a lost race."""
    return s3_client.run(url, _create_only, url, data, uuid.uuid4().hex)


async def _create_only(url: str, data: bytes, token: str) -> bool:
    bucket, key = s3_client.split(url)
    place = {"Bucket": bucket, "Key": key}
    body = checksummed(io.BytesIO(data))
    while True:
        # Looking first serves stores which ignore the condition: they lose races, but keep what has been there before.
        owner = await _owner(url, place)
        if owner is not None:
            return owner == token
        try:
            await s3_client.call(
                "put_object", url, ErrorKind.TARGET, **place, IfNoneMatch="*", Metadata={WRITER_KEY: token}, **body
            )
        except ReshardError as cause:
            _, status = s3_errors.facts(cause)
            if status == 409:  # a race was going on and nobody may have won yet: look again
                continue
            if status != 412:
                raise
            return await _owner(url, place) == token
        return True


async def _owner(url: str, place: dict[str, str]) -> str | None:
    """Return the token of whoever wrote the object, empty for strangers; None if there is no object."""
    try:
        found = await s3_client.call("head_object", url, ErrorKind.TARGET, **place)
    except ReshardError as cause:
        if s3_errors.facts(cause)[1] == 404:
            return None
        raise
    return str(found.get("Metadata", {}).get(WRITER_KEY, ""))
