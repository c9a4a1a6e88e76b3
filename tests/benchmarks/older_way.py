"""The older way, for comparison: loads every shard, glues, cuts and saves whole tensors with torch.

    python -m tests.benchmarks.older_way SOURCE TARGET --source-mp 2 --source-dp 4 --mp 4 --dp 2 --gigabytes 2

It does what metaseq's scripts (reshard_fsdp.py, then reshard_mp.py) do, but in one go, without the files between the
two, and lets go of the shards as soon as it can. Prints its seconds without imports, and its memory, as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.make_checkpoint import file_name, key
from tests.benchmarks.memory import peak_bytes
from tests.benchmarks.model_shape import ModelShape, chunk_of, cut_axis, shard_metadata, small_shape

Named = dict[str, torch.Tensor]
_TIE = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")


def reshard(
    source: Path, target: Path, shape: ModelShape, old: tuple[int, int], new: tuple[int, int], *, flat: bool
) -> None:
    """Write the target: flat shards for the mesh `new`, or a file of named tensors for each of its parts."""
    parts: list[Named] = []
    rest: dict[str, Any] = {}
    for mp in range(old[0]):
        shards = [
            torch.load(source / file_name(mp, dp), map_location="cpu", weights_only=False) for dp in range(old[1])
        ]
        parts.append(_unflatten([shard.pop("model") for shard in shards], shape, old[0]))
        rest = rest or shards[0]
        del shards
    whole = {name: _merge(name, [part.pop(name) for part in parts]) for name in list(parts[0])}
    if not flat:
        rest.pop("shard_metadata")
    for mp in range(new[0]):
        part = {name: _split(name, tensor, mp, new[0]) for name, tensor in whole.items()}
        if not flat:
            named = {name: tensor.clone() for name, tensor in part.items()} if new[0] > 1 else part
            named[_TIE[1]] = named[_TIE[0]]
            ending = f"-model_part-{mp}" if new[0] > 1 else ""
            _save(rest, named, target / f"checkpoint_last{ending}.pt", new)
            continue
        flattened = _flatten(part, shape, new)
        for dp in range(new[1]):
            shard = {name: chunks[dp].clone() if len(chunks) > 1 else chunks[0] for name, chunks in flattened.items()}
            rest["shard_metadata"] = shard_metadata(shape, *new, dp)
            _save(rest, shard, target / file_name(mp, dp), new)


def _unflatten(shards: list[Named], shape: ModelShape, num_mp: int) -> Named:
    """Glue the shards of one part and cut them into named tensors, which are views."""
    named = {"decoder.version": shards[0]["decoder.version"]}
    for path, entries in shape.units(num_mp):
        flat = torch.cat([shard.pop(key(path)) for shard in shards])
        sizes = [math.prod(dims) for _, dims in entries]
        for (name, dims), piece in zip(entries, torch.split(flat[: sum(sizes)], sizes), strict=True):
            named[f"{path}.{name}" if path else name] = piece.view(dims)
    return named


def _merge(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    axis = cut_axis(name)
    if axis is None:
        return parts[0]
    if "qkv_proj" in name:
        return torch.cat([piece for pieces in zip(*(part.chunk(3) for part in parts), strict=True) for piece in pieces])
    return torch.cat(parts, dim=axis)


def _split(name: str, tensor: torch.Tensor, mp: int, num_mp: int) -> torch.Tensor:
    axis = cut_axis(name)
    if axis is None:
        return tensor
    if "qkv_proj" in name:
        return torch.cat([member.chunk(num_mp)[mp] for member in tensor.chunk(3)])
    return tensor.chunk(num_mp, dim=axis)[mp]


def _flatten(named: Named, shape: ModelShape, mesh: tuple[int, int]) -> dict[str, tuple[torch.Tensor, ...]]:
    flat: dict[str, tuple[torch.Tensor, ...]] = {"decoder.version": (named["decoder.version"],)}
    for path, entries in shape.units(mesh[0]):
        glued = torch.cat([named[f"{path}.{name}" if path else name].reshape(-1) for name, _ in entries])
        chunk = chunk_of(entries, mesh[1])
        padded = torch.nn.functional.pad(glued, (0, chunk * mesh[1] - len(glued)))
        flat[key(path)] = torch.split(padded, chunk)
    return {name: chunks if len(chunks) > 1 else chunks * mesh[1] for name, chunks in flat.items()}


def _save(rest: dict[str, Any], model: Named, path: Path, mesh: tuple[int, int]) -> None:
    rest["cfg"]["model"].model_parallel_size = mesh[0]
    torch.save({**rest, "model": model}, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    for name in ("--source-mp", "--source-dp", "--mp", "--dp"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--unflat", action="store_true")
    words = parser.parse_args()
    words.target.mkdir(parents=True)
    idle = peak_bytes()
    began = time.monotonic()
    reshard(
        words.source,
        words.target,
        small_shape(words.gigabytes),
        (words.source_mp, words.source_dp),
        (words.mp, words.dp),
        flat=not words.unflat,
    )
    print(json.dumps({"seconds": time.monotonic() - began, "idle_bytes": idle, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
