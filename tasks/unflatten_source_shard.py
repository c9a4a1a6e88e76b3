"""Task: unflatten source shard. Reads what one file holds, and where, without reading any tensor's bytes.

    unflatten_source_shard(stat("checkpoint_last-model_part-0-shard1.pt"), mp=0, dp=1)

Undoing the flattening is arithmetic on what is found here (tasks/formats/metaseq_source.py), so what is handed on is a
small index. A faulty file is not an exception but a problem in the index: all files' problems are told together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasks.checkpoint import ShardIndex
from tasks.errors import ErrorKind, Problem, ReshardError
from tasks.faults import reach
from tasks.formats import metaseq_reader, metaseq_state_reader
from tasks.formats.metaseq_state_reader import ReadRange
from tasks.storage import FileIdentity, basename, open_reader
from tasks.torchfile.file_index import TorchFile, open_torch_file


def unflatten_source_shard(identity: FileIdentity, mp: int, dp: int) -> ShardIndex:
    """Index one source file by a few ranged reads; faults of the file are in the index's problems."""
    bytes_read = 0
    try:
        with open_reader(identity) as reader:

            def read(offset_bytes: int, length_bytes: int) -> bytes:
                nonlocal bytes_read
                bytes_read += length_bytes
                return reader.read(offset_bytes, length_bytes)

            file = open_torch_file(read, identity.size_bytes, identity.url)
            index = replace(_index(identity, mp, dp, file, read), bytes_read=bytes_read)
    except ReshardError as fault:
        return ShardIndex(identity, mp, dp, problems=fault.problems)
    reach("source-indexed", identity.url)
    return index


def _index(identity: FileIdentity, mp: int, dp: int, file: TorchFile, read: ReadRange) -> ShardIndex:
    label = basename(identity.url)
    found = metaseq_reader.model_of(file.root, label)
    if isinstance(found, Problem):
        return ShardIndex(identity, mp, dp, problems=(found,))
    model, is_bare = found
    tensors, problems = metaseq_reader.stored_tensors(model, file.locations, label)
    metadata, paddings, more = metaseq_reader.shard_metadata(file.root, label)
    problems += more
    if not tensors and not problems:
        message = f"{label}: the model dict is empty"
        problems.append(Problem(ErrorKind.SOURCE, "not-a-checkpoint", message, hint="save or copy it again"))
    root: dict[str, Any] = {} if is_bare or not isinstance(file.root, dict) else file.root
    optimizer, more = metaseq_state_reader.optimizer_index(root, file.locations, read, label)
    averages, others = metaseq_state_reader.averages(root, file.locations, label)
    # Faults of the state do not forbid to write the weights alone.
    state_problems = (*more, *others)
    return ShardIndex(
        identity=identity,
        mp=mp,
        dp=dp,
        tensors=tuple(tensors),
        metadata=metadata,
        paddings=paddings,
        config=metaseq_reader.model_config(root),
        keys=tuple(str(key) for key in root),
        training_state=metaseq_reader.training_state(root),
        other_tensors=metaseq_reader.other_tensors(root),
        num_requests=file.num_requests,
        optimizer=optimizer,
        averages=averages,
        problems=tuple(problems),
        state_problems=state_problems,
    )
