"""One multipart upload whose parts several processes send; a small object beside it says which upload it is.

The note is created once: of several processes that begin together one wins, and the others abort their uploads.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tasks.errors import ErrorKind, ReshardError
from tasks.storage import s3_client, s3_errors
from tasks.storage.interface import FileIdentity
from tasks.storage.problems import PiecesLostError, check_room
from tasks.storage.s3_parts import PartSender, part_bytes
from tasks.storage.s3_writer import abort_upload, complete_upload, create_only, create_upload, object_call

Note = dict[str, str]


class S3PieceWriter:
    """Send parts of an upload; a unit is a part."""

    def __init__(self, url: str, size_bytes: int, place: str, receipts: Sequence[str] | None, sharing: int) -> None:
        self._url = url
        self._size_bytes = size_bytes
        self._part_bytes = part_bytes(size_bytes)
        self._note = _begin(url, place) if receipts is None else _resume(place, receipts)
        self._sender = PartSender(url, sharing)
        self._window = self._sender.buffer()

    def write(self, offset_bytes: int, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        check_room(self._url, self._size_bytes, offset_bytes, len(view))
        while view:
            begin = offset_bytes // self._part_bytes * self._part_bytes
            if offset_bytes != begin + self._window.tell():
                raise ValueError(f"{self._url}: a part was not written from its beginning to its end")
            end = min(begin + self._part_bytes, self._size_bytes)
            count = self._window.write(view[: end - offset_bytes])
            view, offset_bytes = view[count:], offset_bytes + count
            if offset_bytes == end:
                self._sender.send(self._note["upload_id"], begin // self._part_bytes + 1, self._window)
                self._window = self._sender.buffer()

    def finish(self) -> tuple[str, ...]:
        self._sender.drain()
        return tuple(f"{self._note['upload_id']} {number} {tag}" for number, tag in sorted(self._sender.tags.items()))

    def commit(self, receipts: Sequence[str]) -> FileIdentity:
        tags = dict(_numbered(receipt) for receipt in (*receipts, *self.finish()))
        return complete_upload(self._url, self._note["upload_id"], self._note["token"], tags, self._size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.cancel()

    def __reduce__(self) -> str:
        raise TypeError("a writer belongs to its process")


def holds(place: str, receipts: Sequence[str]) -> bool:
    """Ask the store for the parts it has: it has checked them against their MD5 when they came."""
    note = read_note(place)
    return note is not None and _has(note, receipts)


def _has(note: Note, receipts: Sequence[str]) -> bool:
    parts = _parts(note)
    if parts is None:
        return False
    wanted = [receipt.split(" ", 2) for receipt in receipts]
    return all(upload_id == note["upload_id"] and parts.get(int(number)) == tag for upload_id, number, tag in wanted)


def drop(place: str) -> None:
    """Abort the upload and forget the note."""
    note = read_note(place)
    if note is not None:
        with contextlib.suppress(ReshardError):
            abort_upload(note["url"], note["upload_id"])
    object_call("delete_object", place)


def read_note(place: str) -> Note | None:
    """Return what is noted at a place; None where nothing is, or nothing that can be read."""
    try:
        answer = s3_client.run(place, _read, place)
    except ReshardError as cause:
        if s3_errors.facts(cause)[1] == 404:
            return None
        raise
    try:
        note = json.loads(answer)
        return {key: str(note[key]) for key in ("url", "upload_id", "token")}
    except (ValueError, KeyError, TypeError):
        return None


async def _read(place: str) -> bytes:
    bucket, key = s3_client.split(place)
    answer = await s3_client.call("get_object", place, ErrorKind.TARGET, Bucket=bucket, Key=key)
    async with answer["Body"] as body:
        data: bytes = await body.read()
    return data


def _begin(url: str, place: str) -> Note:
    """Find the upload that others have begun, or begin it."""
    note = read_note(place)
    if note is not None and _parts(note) is not None:
        return note
    if note is not None:
        object_call("delete_object", place)  # the store has forgotten this upload
    token = uuid.uuid4().hex
    mine = {"url": url, "upload_id": create_upload(url, token), "token": token}
    if create_only(place, json.dumps(mine).encode()):
        return mine
    abort_upload(url, mine["upload_id"])
    note = read_note(place)
    if note is None:
        raise PiecesLostError(place)
    return note


def _resume(place: str, receipts: Sequence[str]) -> Note:
    note = read_note(place)
    if note is None or not _has(note, receipts):
        raise PiecesLostError(place)
    return note


def _parts(note: Note) -> dict[int, str] | None:
    """Return the ETags of the parts that have arrived; None if the store does not know the upload."""
    found: dict[int, str] = {}
    more: dict[str, Any] = {}
    while True:
        try:
            page = object_call("list_parts", note["url"], UploadId=note["upload_id"], **more)
        except ReshardError as cause:
            if s3_errors.facts(cause)[1] == 404:
                return None
            raise
        found |= {int(part["PartNumber"]): str(part["ETag"]) for part in page.get("Parts", ())}
        if not page.get("IsTruncated"):
            return found
        more = {"PartNumberMarker": page["NextPartNumberMarker"]}


def _numbered(receipt: str) -> tuple[int, str]:
    _, number, tag = receipt.split(" ", 2)
    return int(number), tag
