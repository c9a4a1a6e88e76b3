"""Lays out one target file: the objects that torch.load will return, and where the bytes of each storage come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tasks.file_stream import Body
from tasks.formats.metaseq_state_reader import number_of
from tasks.formats.metaseq_state_target import holds_optimizer
from tasks.formats.metaseq_target import TargetObjects, make_objects, provider_rank
from tasks.gather import Rows, rows_of_storages
from tasks.reader_pool import ReaderPool
from tasks.source import Source
from tasks.storage import basename
from tasks.target import Target
from tasks.torchfile.archive_writer import ArchiveLayout, archive_name_of, plan_archive
from tasks.torchfile.file_index import open_torch_file
from tasks.torchfile.objects import StorageRef, TensorRef
from tasks.torchfile.pickler import dump_pickle


def plan_file(
    source: Source, target: Target, mp: int, dp: int, url: str, table: pa.Table, readers: ReaderPool
) -> tuple[ArchiveLayout, list[Body]]:
    """Lay out one target file: its bytes around the storages, and where each storage comes from."""
    rows = rows_of_storages(table, keep_scales=not target.options.moments_dtype)
    origins: dict[StorageRef, tuple[int, int]] = {}

    def objects(number: int) -> Any:
        identity = source.files[number]
        file = open_torch_file(lambda at, size: readers.read(number, at, size), identity.size_bytes, identity.url)
        origins.update({storage: (number, location.offset) for storage, location in file.locations.items()})
        return file.root

    provider = provider_rank(source.mesh, target.options.mesh, mp, dp)
    root = state_root = objects(source.file_number(*provider))
    if source.optimizer is not None and target.options.keep_state and not holds_optimizer(root):
        # Where the state is not sharded, the first rank of the part has all of it.
        state_root = objects(source.optimizer.holders[provider[0]])
    scales = {number: found.target_scale for number, found in rows.items()}

    def number(tensor: TensorRef) -> float:
        at = {tensor.storage: (origins[tensor.storage][1], 0, None)}
        return number_of(tensor, at, lambda offset, size: readers.read(origins[tensor.storage][0], offset, size))

    made = make_objects(root, state_root, source, target, mp=mp, dp=dp, scales=scales, number_of=number)
    pickle_data, storages = dump_pickle(made.root)
    bodies = [_body(storage, made, rows, origins) for storage in storages]
    return plan_archive(archive_name_of(basename(url)), pickle_data, [body.size_bytes for body in bodies]), bodies


def _body(
    storage: StorageRef, made: TargetObjects, rows: Mapping[int, Rows], origins: Mapping[StorageRef, tuple[int, int]]
) -> Body:
    if storage in made.numbers:
        return _planned_body(storage, rows.get(made.numbers[storage]))
    if storage in made.literals:
        return Body(storage.size_bytes, literal=made.literals[storage])
    file, offset = origins[made.copies.get(storage, storage)]
    return Body(storage.size_bytes, None, file, offset)


def _planned_body(storage: StorageRef, rows: Rows | None) -> Body:
    if rows is not None and int(rows.end.max()) > storage.size_bytes:
        raise ValueError(f"the plan writes past the end of a storage of {storage.size_bytes} bytes")
    return Body(storage.size_bytes, rows)
