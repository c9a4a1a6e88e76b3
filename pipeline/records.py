"""What a node leaves behind when it has finished, and whether it still holds: a rerun does only what has no record.

A record is trusted only where the bytes behind it are still those it was written for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from isal import isal_zlib

from tasks import storage
from tasks.checksums import Range
from tasks.errors import ReshardError
from tasks.storage import FileIdentity
from tasks.write_pieces import PieceResult
from tasks.write_target_shard import ShardResult

Result = TypeVar("Result", ShardResult, PieceResult)


def record_of(plan_id: str, result: ShardResult | PieceResult) -> bytes:
    """Make a completion record. What was read for it is in it: a rerun must still check the source."""
    found = {field.name: getattr(result, field.name) for field in fields(result)}  # asdict copies each of many ranges
    return json.dumps({"plan_id": plan_id, **found}).encode()


def finished_before(paths: Mapping[str, str]) -> ShardResult | None:
    """Return the result of an earlier run whose record holds: same plan, and the file still has its checksum."""
    claimed = _claimed(paths)
    if claimed is None:
        return None
    result, identity = claimed
    try:
        return replace(result, kept=True) if storage.checksum(identity) == result.crc32 else None
    except ReshardError:
        return None  # it is being replaced, by a worker that lives on without its run


def may_be_finished(paths: Mapping[str, str]) -> bool:
    """Tell, without reading it, whether a file seems to be finished."""
    return _claimed(paths) is not None


def piece_record(paths: Mapping[str, str], number: int, count: int) -> str:
    """Name the record of a piece."""
    return f"{paths['record'].removesuffix('.json')}.piece-{number}-of-{count}.json"


def piece_of(record_name: str) -> tuple[str, int, int] | None:
    """Return the file, number and count that the name of a piece's record tells; None for other names.

    >>> piece_of("a-model_part-0.pt.piece-3-of-8.json")
    ('a-model_part-0.pt', 3, 8)
    """
    found = re.fullmatch(r"(.*)\.piece-(\d+)-of-(\d+)\.json", record_name)
    return (found[1], int(found[2]), int(found[3])) if found else None


def file_of(record_name: str) -> str:
    """Return the name of the file that a record is of, or whose piece it is of."""
    piece = piece_of(record_name)
    return piece[0] if piece else record_name.removesuffix(".json")


def piece_finished_before(paths: Mapping[str, str], record: str) -> PieceResult | None:
    """Return the result of an earlier run whose bytes are still there, in the unfinished or the published file."""
    result = _recorded(record, paths["plan_id"], PieceResult)
    if result is None:
        return None
    result = replace(result, kept=True, bytes_read=0, num_requests=0)
    receipts = storage.holds(paths["place"], [unit[1:] for unit in result.written], result.receipts)
    if receipts is not None:
        return replace(result, receipts=receipts)
    identity = _sized(paths["file"], result.size_bytes)
    if identity is None or not _has(identity, result.written):
        return None
    return replace(result, receipts=(), published=True)


def _has(identity: FileIdentity, ranges: tuple[Range, ...]) -> bool:
    try:
        with storage.open_reader(identity) as reader:
            return all(isal_zlib.crc32(reader.read(begin, length)) == crc32 for _, begin, length, crc32 in ranges)
    except ReshardError:
        return False  # it is being replaced


def _recorded(record: str, plan_id: str, kind: type[Result]) -> Result | None:
    try:
        told = json.loads(storage.read_small(record))
        if told.pop("plan_id") != plan_id:
            return None
        return kind(**{name: _as_tuples(value) for name, value in told.items()})
    except (ReshardError, ValueError, TypeError, KeyError, AttributeError):
        return None  # none, a torn one, or one of another version: the work is done again


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _claimed(paths: Mapping[str, str]) -> tuple[ShardResult, FileIdentity] | None:
    """Return what the record of a file claims, and the file, if that has the size."""
    result = _recorded(paths["record"], paths["plan_id"], ShardResult)
    identity = _sized(paths["file"], result.size_bytes) if result else None
    return (result, identity) if result and identity else None


def _sized(url: str, size_bytes: int) -> FileIdentity | None:
    """Return the file if it is there in this size."""
    try:
        identity = storage.stat(url)
    except ReshardError:
        return None
    return identity if identity.size_bytes == size_bytes else None
