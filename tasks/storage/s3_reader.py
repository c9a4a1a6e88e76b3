"""Exact reads of S3 objects: pinned to one ETag, checked against what the answer says, resumed where they broke.

s3fs's own reads pass on short answers, fill their holes with zeros or mix two states of an object, all silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import retry, s3_client, s3_errors
from tasks.storage.interface import FileIdentity
from tasks.storage.problems import check_range, short_read, source_changed

# 4 MiB ranges cost twice the processor time per byte, larger ones gain nothing; four at once reach 84 % of the fastest
# client measured.
_RANGE_BYTES = 16 << 20
_RANGES_IN_FLIGHT = 4
_CHUNK_BYTES = 4 << 20


class _UnfitAnswerError(Exception):
    """An answer which says, or turns out, not to hold the range that was asked for."""


class S3Reader:
    """Read one object; several threads may share it."""

    def __init__(self, identity: FileIdentity) -> None:
        self.identity = identity
        self._bucket, self._key = s3_client.split(identity.url)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        check_range(self.identity, offset_bytes, len(view))
        if not view:
            return
        try:
            s3_client.run(self.identity.url, self._read_ranges, offset_bytes, view)
        except ExceptionGroup as group:
            raise _first(group) from group

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
        """Nothing is held, and every answer was checked to come from the same state of the object."""

    def __reduce__(self) -> str:
        raise TypeError("a reader belongs to its process; send the identity instead")

    async def _read_ranges(self, offset_bytes: int, view: memoryview) -> None:
        free = asyncio.Semaphore(_RANGES_IN_FLIGHT)

        async def read_one(start: int) -> None:
            async with free:
                await self._read_range(offset_bytes + start, view[start : start + _RANGE_BYTES])

        # The group waits for all its tasks, so nothing fills the buffer after the caller got an error.
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(view), _RANGE_BYTES):
                group.create_task(read_one(start))

    async def _read_range(self, offset_bytes: int, view: memoryview) -> None:
        pauses = retry.delays_seconds()
        done_bytes = 0
        while done_bytes < len(view):
            failure: Exception
            try:
                async for count in self._stream(offset_bytes + done_bytes, view[done_bytes:]):
                    done_bytes += count
                continue
            except _UnfitAnswerError as cause:
                failure = short_read(self.identity, offset_bytes, len(view), str(cause))
            except s3_errors.REQUEST_ERRORS as cause:
                if s3_errors.facts(cause)[1] in (412, 416):
                    raise source_changed(self.identity, "another version, by its ETag or its size") from cause
                failure = s3_errors.failure(cause, self.identity.url, ErrorKind.SOURCE)
                if not s3_errors.is_transient(cause):
                    raise failure from cause
            pause = next(pauses, None)
            if pause is None:
                raise failure
            await asyncio.sleep(pause)

    async def _stream(self, offset_bytes: int, view: memoryview) -> AsyncIterator[int]:
        """Make one request; yield the number of bytes after each piece that is in place."""
        answer = await s3_client.call_once(
            "get_object",
            Bucket=self._bucket,
            Key=self._key,
            Range=f"bytes={offset_bytes}-{offset_bytes + len(view) - 1}",
            **({"IfMatch": self.identity.version} if self.identity.version else {}),
        )
        body = answer["Body"]
        try:
            self._check(answer, offset_bytes, len(view))
            done_bytes = 0
            while done_bytes < len(view):
                count = await body.readinto(view[done_bytes : done_bytes + _CHUNK_BYTES])
                if count == 0:
                    raise _UnfitAnswerError(f"the answer ended {done_bytes} bytes after byte {offset_bytes}")
                done_bytes += count
                yield count
        finally:
            body.close()

    def _check(self, answer: dict[str, Any], offset_bytes: int, length_bytes: int) -> None:
        size_bytes = self.identity.size_bytes
        tag = answer.get("ETag", "")
        if self.identity.version and tag and tag.strip('"') != self.identity.version.strip('"'):
            raise source_changed(self.identity, f"version {tag}")
        said, length = answer.get("ContentRange", ""), answer.get("ContentLength")
        if said and not said.endswith((f"/{size_bytes}", "/*")):
            raise source_changed(self.identity, f"content range {said}")
        whole = not said and offset_bytes == 0 and length_bytes == size_bytes
        asked = f"bytes {offset_bytes}-{offset_bytes + length_bytes - 1}/"
        if not (whole or said.startswith(asked)) or length != length_bytes:
            raise _UnfitAnswerError(
                f"content range {said or 'not given'}, {length} bytes, instead of {asked}{size_bytes}"
            )


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """Pick one of several failures, those which a repetition will not cure before all others."""
    flat = [_first(one) if isinstance(one, BaseExceptionGroup) else one for one in group.exceptions]
    return next((one for one in flat if isinstance(one, ReshardError)), flat[0])
