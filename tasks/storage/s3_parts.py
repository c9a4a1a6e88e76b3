"""The parts of a multipart upload: a few of them on their way at once, in buffers that are used again."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import patience, s3_client
from tasks.storage.problems import TransientStorageError

_MIB = 1 << 20
# Parts of 8 MiB keep four buffers small. S3 takes 10,000 parts; staying below leaves room for stores that count
# otherwise.
_SMALLEST_PART_BYTES = 8 * _MIB
_MOST_PARTS = 9500
_PARTS_IN_FLIGHT = 3


def part_bytes(size_bytes: int) -> int:
    """Return the size of a part.

    >>> part_bytes(1) // _MIB, part_bytes(100_000 * _MIB) // _MIB
    (8, 11)
    """
    even = -(-size_bytes // _MOST_PARTS)
    return max(_SMALLEST_PART_BYTES, -(-even // _MIB) * _MIB)


def buffered_bytes(size_bytes: int, sharing: int) -> int:
    """Return how much each of so many writers holds at most: the parts in flight and the one that fills."""
    return min(size_bytes, (_parts_in_flight(sharing) + 1) * part_bytes(size_bytes))


def _parts_in_flight(sharing: int) -> int:
    return max(1, _PARTS_IN_FLIGHT // sharing)


def checksummed(body: io.BytesIO) -> dict[str, Any]:
    """Return the arguments for a body; MD5 is the one checksum which every compatible store checks."""
    with body.getbuffer() as view:
        digest = hashlib.md5(view, usedforsecurity=False).digest()
    return {"Body": body, "ContentMD5": base64.b64encode(digest).decode()}


class PartSender:
    """Sends the parts of one upload of one object."""

    def __init__(self, url: str, sharing: int = 1) -> None:
        self._url = url
        self._most_in_flight = _parts_in_flight(sharing)
        bucket, key = s3_client.split(url)
        self._object = {"Bucket": bucket, "Key": key}
        self._free: list[io.BytesIO] = []
        self._in_flight: deque[tuple[int, io.BytesIO, Future[Any]]] = deque()
        self.tags: dict[int, str] = {}
        "ETag of each part that has arrived, by its number"

    def buffer(self) -> io.BytesIO:
        """Return an empty buffer, to be filled and sent."""
        return self._free.pop() if self._free else io.BytesIO()

    def send(self, upload_id: str, number: int, body: io.BytesIO) -> None:
        """Send a part without waiting for its answer; the buffer is not the caller's any more."""
        while len(self._in_flight) >= self._most_in_flight:
            self._wait_for_one()
        body.truncate()
        place = {**self._object, "UploadId": upload_id, "PartNumber": number}
        request = s3_client.call("upload_part", self._url, ErrorKind.TARGET, **place, **checksummed(body))
        self._in_flight.append((number, body, asyncio.run_coroutine_threadsafe(request, s3_client.loop())))

    def drain(self) -> None:
        """Wait until all parts have arrived."""
        while self._in_flight:
            self._wait_for_one()

    def cancel(self) -> None:
        """Let no part arrive any more."""
        for _, _, part in self._in_flight:
            part.cancel()
        for _, _, part in self._in_flight:
            with contextlib.suppress(ReshardError, TransientStorageError, CancelledError):
                part.result()
        self._in_flight.clear()

    def _wait_for_one(self) -> None:
        number, body, part = self._in_flight.popleft()
        with patience.call(self._url):
            self.tags[number] = str(part.result()["ETag"])
        body.seek(0)  # and keep its memory
        self._free.append(body)


def completion(tags: dict[int, str]) -> dict[str, Any]:
    """Make the list of parts by which an upload is completed."""
    return {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]}
