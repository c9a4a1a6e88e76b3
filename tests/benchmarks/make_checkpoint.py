"""Makes flat checkpoints like metaseq's trainer: real ones of random numbers, and sparse ones with true headers only.

One shard is in memory at a time. The numbers depend on the tensor, the part and the element alone: replicas are equal.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.benchmarks.model_shape import Entry, ModelShape, chunk_of, cut_axis, shard_metadata

# Clears the highest bit of a half-precision exponent: every number is finite, and below 2.
_FINITE = np.uint64(0xBFFF_BFFF_BFFF_BFFF)


def file_name(mp: int, dp: int) -> str:
    return f"checkpoint_last-model_part-{mp}-shard{dp}.pt"


def make_checkpoint(directory: Path, shape: ModelShape, num_mp: int, num_dp: int) -> int:
    """Write a checkpoint of random numbers with torch.save; return its size in bytes."""
    directory.mkdir(parents=True)
    for mp in range(num_mp):
        for dp in range(num_dp):
            flat = {
                key(path): torch.from_numpy(_shard(path, entries, mp, dp, num_dp))
                for path, entries in shape.units(num_mp)
            }
            torch.save(_objects(shape, flat, num_mp, num_dp, dp), directory / file_name(mp, dp))
    return size_of(directory)


def make_headers(directory: Path, shape: ModelShape, num_mp: int, num_dp: int) -> int:
    """Write files that lack nothing but their numbers, which are holes; return the bytes that they take on the disk."""
    directory.mkdir(parents=True)
    lengths = {key(path): chunk_of(entries, num_dp) for path, entries in shape.units(num_mp)}
    for dp in range(num_dp):
        # Never touched, so it is never in memory; the parts of one shard differ in nothing that is written here.
        flat = {name: torch.empty(length, dtype=torch.float16) for name, length in lengths.items()}
        for mp in range(num_mp):
            with torch.serialization.skip_data():
                torch.save(_objects(shape, flat, num_mp, num_dp, dp), directory / file_name(mp, dp))
    return sum(file.stat().st_blocks for file in directory.iterdir()) * 512


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.pt"))


def key(path: str) -> str:
    return f"{path}.flat_param_0" if path else "flat_param_0"


def _objects(shape: ModelShape, flat: dict[str, torch.Tensor], num_mp: int, num_dp: int, dp: int) -> dict[str, Any]:
    root = {"flat_param_0": flat["flat_param_0"], "decoder.version": torch.tensor([3.0], dtype=torch.float16)}
    return {
        "cfg": shape.config(num_mp, num_dp),
        "model": root | flat,
        "criterion": None,
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "num_updates": 1000}],
        "task_state": {},
        "extra_state": {"epoch": 1, "train_iterator": {"epoch": 1, "iterations_in_epoch": 1000}},
        "shard_metadata": shard_metadata(shape, num_mp, num_dp, dp),
    }


def _shard(path: str, entries: list[Entry], mp: int, dp: int, num_dp: int) -> npt.NDArray[np.float16]:
    """Make one shard of a flat parameter; behind its last element stand zeros."""
    chunk = chunk_of(entries, num_dp)
    begin = dp * chunk
    shard = np.zeros(chunk, np.float16)
    offset = 0
    for name, dims in entries:
        size = math.prod(dims)
        low, high = max(offset, begin), min(offset + size, begin + chunk)
        if low < high:
            part = 0 if cut_axis(name) is None else mp
            shard[low - begin : high - begin] = _numbers(f"{path}.{name}", part, size)[low - offset : high - offset]
        offset += size
    return shard


def _numbers(name: str, part: int, size: int) -> npt.NDArray[np.float16]:
    generator = np.random.Generator(np.random.SFC64([zlib.crc32(name.encode()), part]))
    bits = generator.integers(0, 2**64, -(-size // 4), np.uint64)
    np.bitwise_and(bits, _FINITE, out=bits)
    return bits.view(np.float16)[:size]


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
