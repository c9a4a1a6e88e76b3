"""Writes to S3: one plain PUT for what fits a window, else a multipart upload with even parts.

An object appears only by the PUT or by the completion. A failed upload is aborted; s3fs's own writers would publish
half a file when an exception passes through them, or leave the parts behind. Not done here: finding an upload whose
creation was answered but the answer lost; a life-cycle rule of the bucket removes those.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import uuid
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import s3_client, s3_errors
from tasks.storage.interface import FileIdentity
from tasks.storage.problems import TransientStorageError, check_room, check_whole

_MIB = 1 << 20
# Parts of 8 MiB keep four buffers small. S3 takes 10,000 parts; staying below leaves room for stores that count
# otherwise.
_SMALLEST_WINDOW_BYTES = 8 * _MIB
_MOST_PARTS = 9500
_PARTS_IN_FLIGHT = 3
# The metadata by which a writer knows its own object again after an answer was lost.
WRITER_KEY = "writer"


def window_bytes(size_bytes: int) -> int:
    """Return the size of a part.

    >>> window_bytes(1) // _MIB, window_bytes(100_000 * _MIB) // _MIB
    (8, 11)
    """
    even = -(-size_bytes // _MOST_PARTS)
    return max(_SMALLEST_WINDOW_BYTES, -(-even // _MIB) * _MIB)


def buffered_bytes(size_bytes: int) -> int:
    """Return how much a writer holds at most: the parts in flight and the one that fills."""
    return min(size_bytes, (_PARTS_IN_FLIGHT + 1) * window_bytes(size_bytes))


def checksummed(body: io.BytesIO) -> dict[str, Any]:
    """Return the arguments for a body; MD5 is the one checksum which every compatible store checks."""
    with body.getbuffer() as view:
        digest = hashlib.md5(view, usedforsecurity=False).digest()
    return {"Body": body, "ContentMD5": base64.b64encode(digest).decode()}


class S3Writer:
    """Write one object with at most four windows in memory."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self.window_bytes = window_bytes(size_bytes)
        self._url = url
        self._bucket, self._key = s3_client.split(url)
        self._object = {"Bucket": self._bucket, "Key": self._key}
        self._size_bytes = size_bytes
        self._written_bytes = 0
        self._token = uuid.uuid4().hex
        self._upload_id = ""
        self._window = io.BytesIO()
        self._free: list[io.BytesIO] = []
        self._in_flight: deque[tuple[io.BytesIO, Future[Any]]] = deque()
        self._parts: list[dict[str, Any]] = []
        self._ended = False

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, self._written_bytes, len(view))
        self._written_bytes += len(view)
        while view:
            count = self._window.write(view[: self.window_bytes - self._window.tell()])
            view = view[count:]
            if self._window.tell() == self.window_bytes and self._size_bytes > self.window_bytes:
                self._send_part()

    def commit(self) -> FileIdentity:
        check_whole(self._url, self._size_bytes, self._written_bytes)
        identity = self._complete() if self._size_bytes > self.window_bytes else self._put()
        self._ended = True
        return identity

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        for _, part in self._in_flight:
            part.cancel()
        for _, part in self._in_flight:
            with contextlib.suppress(ReshardError, TransientStorageError, CancelledError):
                part.result()
        if self._upload_id:
            # What is left after this fails as well, the store's life-cycle rule removes; the first error is the news.
            with contextlib.suppress(ReshardError, TransientStorageError):
                self._call("abort_multipart_upload", UploadId=self._upload_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")

    def _put(self) -> FileIdentity:
        answer = self._call("put_object", Metadata={WRITER_KEY: self._token}, **checksummed(self._window))
        return FileIdentity(self._url, self._size_bytes, str(answer["ETag"]))

    def _send_part(self) -> None:
        if not self._upload_id:
            answer = self._call("create_multipart_upload", Metadata={WRITER_KEY: self._token})
            self._upload_id = str(answer["UploadId"])
        while len(self._in_flight) >= _PARTS_IN_FLIGHT:
            self._wait_for_part()
        number = len(self._parts) + len(self._in_flight) + 1
        part = asyncio.run_coroutine_threadsafe(
            self._request("upload_part", UploadId=self._upload_id, PartNumber=number, **checksummed(self._window)),
            s3_client.loop(),
        )
        self._in_flight.append((self._window, part))
        self._window = self._free.pop() if self._free else io.BytesIO()

    def _wait_for_part(self) -> None:
        window, part = self._in_flight.popleft()
        tag = str(part.result()["ETag"])
        self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": tag})
        window.seek(0)
        self._free.append(window)

    def _complete(self) -> FileIdentity:
        if self._window.tell():
            self._window.truncate()
            self._send_part()
        while self._in_flight:
            self._wait_for_part()
        try:
            self._call("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload={"Parts": self._parts})
        except ReshardError as cause:
            # After a lost answer a store may no longer know the upload. The object tells whether it is this one.
            if self._head().get("Metadata", {}).get(WRITER_KEY) != self._token:
                raise cause from None
        found = self._head()
        if found["ContentLength"] != self._size_bytes:
            raise TransientStorageError(f"{self._url}: {found['ContentLength']} of {self._size_bytes} bytes stored")
        return FileIdentity(self._url, self._size_bytes, str(found["ETag"]))

    def _head(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("head_object")
        return found

    def _call(self, method: str, **arguments: Any) -> Any:
        return s3_client.run(self._request, method, **arguments)

    def _request(self, method: str, **arguments: Any) -> Coroutine[Any, Any, Any]:
        return s3_client.call(method, self._url, ErrorKind.TARGET, **self._object, **arguments)


def create_only(url: str, data: bytes) -> bool:
    """PUT if the name is free. A writer's token tells a lost answer from a lost race."""
    return s3_client.run(_create_only, url, data, uuid.uuid4().hex)


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
