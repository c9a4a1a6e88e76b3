"""`python -m pipeline.inspect SOURCE`: what is this checkpoint? Reads indexes, never tensor bytes; needs no Ray."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.discovery import discover
from pipeline.messages import CommandParser, run_command, size
from pipeline.planning import index_here
from tasks.checkpoint import ShardIndex
from tasks.families.opt import OPT
from tasks.formats.metaseq_files import Found
from tasks.formats.metaseq_source import build_source
from tasks.formats.metaseq_state_source import add_state
from tasks.layout import GlobalTensor
from tasks.source import Source
from tasks.target_checks import possible_parts


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m pipeline.inspect",
        description="Tell what a checkpoint is: mp, dp, flat or not, dtypes, metadata, training state, size, problems.",
        epilog="exit codes: 0 sound; 2 wrong use; 3 bad or incomplete; 4 not of a known family",
    )
    parser.add_argument("source", metavar="SOURCE", help="directory, prefix, file or quoted glob: a path or fsspec URL")
    parser.add_argument("--checkpoint", default="", metavar="NAME", help="which one, where SOURCE holds several")
    parser.add_argument(
        "--source-qkv", choices=("fused", "split"), help="how flat files without shard_metadata hold k, v and q"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    return parser


def inspect(source: str, checkpoint: str = "", *, fused: bool | None = None) -> dict[str, Any]:
    """Describe a checkpoint; what is wrong with its contents is told in `problems`, bad sets of files are raised."""
    found = discover(source, checkpoint)
    indexes = index_here(found.files)
    built, problems = build_source(indexes, found.mesh, OPT, fused=fused)
    if built is not None and any(index.training_state for index in indexes):
        order = {identity: number for number, identity in enumerate(built.files)}
        in_order = sorted(indexes, key=lambda index: order[index.identity])
        problems += [problem for index in in_order for problem in index.state_problems] or add_state(built, in_order)[1]
    description = _describe(source, found, indexes)
    description["problems"] = [str(problem) for problem in problems]
    description["exit_code"] = int(problems[0].kind) if problems else 0
    if built is not None:
        description |= _describe_model(built)
    return description


def _describe(source: str, found: Found, indexes: Sequence[ShardIndex]) -> dict[str, Any]:
    state: Counter[str] = Counter()
    other: Counter[str] = Counter()
    for index in indexes:
        state.update({part.name: part.size_bytes for part in index.training_state})
        other.update({part.name: part.size_bytes for part in index.other_tensors})
    config = next((index.config for index in indexes if index.config), None)
    return {
        "source": source,
        "checkpoint": found.prefix,
        "format": "metaseq",
        "family": OPT.name,
        "mp": found.mesh.mp,
        "dp": found.mesh.dp,
        "files": len(found.files),
        "bytes": sum(file.identity.size_bytes for file in found.files),
        "shard_metadata": all(index.metadata is not None for index in indexes),
        "training_state_bytes": dict(state),
        "other_tensor_bytes": dict(other),
        "top_level_keys": sorted({key for index in indexes for key in index.keys}),
        "config": None
        if config is None
        else {
            "arch": config.arch,
            "layers": config.layers,
            "embed_dim": config.embed_dim,
            "ffn_dim": config.ffn_dim,
            "heads": config.heads,
        },
        "left_out": list(found.ignored),
    }


def _describe_model(source: Source) -> dict[str, Any]:
    tensors = _as_in_files(source)
    repeats = {repeated for _, repeated in source.ties}
    elements = [math.prod(tensor.shape) for tensor in tensors if tensor.name not in repeats]
    fused = any(name in source.entries for name in map(OPT.fused_name, source.tensors) if name)
    return {
        "layout": "flat" if source.flat else "unflat",
        "layout_inferred_from_cfg": source.inferred,
        "fsdp_units": len(source.flat_parameters) if source.flat else 0,
        "qkv": "fused" if fused else "split",
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors)),
        "parameters": sum(elements),
        "tied": [list(pair) for pair in source.ties],
        "possible_mp": possible_parts(source),
        "heads_known": source.config is not None and source.config.heads is not None,
        "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in tensors],
    }


def _as_in_files(source: Source) -> list[GlobalTensor]:
    """List the whole tensors under the names that an unflat file has: fused ones as one, tied ones twice."""
    found = {}
    for name in source.entries:
        members = source.family.members(name)
        first = source.tensors[members[0]]
        shape = (first.shape[0] * len(members), *first.shape[1:]) if first.shape else first.shape
        found[name] = GlobalTensor(name, shape, first.dtype, first.is_buffer)
    for name, repeated in source.ties:
        found.setdefault(repeated, GlobalTensor(repeated, found[name].shape, found[name].dtype))
    return list(found.values())


def in_words(what: Mapping[str, Any]) -> str:
    """Say it for a person."""
    lines = [
        f"{what['checkpoint']}: {what['format']} checkpoint of the family {what['family']}",
        f"  files          {what['files']}, {size(what['bytes'])}: mp{what['mp']} x dp{what['dp']}",
    ]
    if "layout" in what:
        metadata = "shard_metadata in every file" if what["shard_metadata"] else "no shard_metadata"
        units = f" in {what['fsdp_units']} FSDP units" if what["layout"] == "flat" else ""
        inferred = ", inferred from cfg" if what["layout_inferred_from_cfg"] else ""
        dtypes = ", ".join(f"{dtype} ({count})" for dtype, count in what["dtypes"].items())
        lines += [
            f"  layout         {what['layout']}{units} ({metadata}{inferred}), qkv {what['qkv']}",
            f"  tensors        {len(what['tensors'])}, {what['parameters']:,} parameters; {dtypes}",
            f"  tied           {', '.join(' = '.join(pair) for pair in what['tied']) or 'nothing'}",
            f"  possible --mp  {', '.join(map(str, what['possible_mp']))}"
            + ("" if what["heads_known"] else " (how many attention heads there are is not known)"),
        ]
    if what["config"]:
        lines.append("  cfg            " + ", ".join(f"{key} {value}" for key, value in what["config"].items()))
    state = ", ".join(f"{name} {size(count)}" for name, count in what["training_state_bytes"].items())
    lines.append(f"  training state {state or 'none'}")
    other = ", ".join(f"{name} {size(count)}" for name, count in what["other_tensor_bytes"].items())
    lines += [f"  other tensors  {other}"] if other else []
    lines += [f"  left out       {name}" for name in what["left_out"]]
    lines += what["problems"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = make_parser().parse(arguments)
    exit_code = 0

    def command() -> tuple[Mapping[str, Any], str]:
        nonlocal exit_code
        fused = None if words.source_qkv is None else words.source_qkv == "fused"
        what = inspect(words.source, words.checkpoint, fused=fused)
        exit_code = what["exit_code"]
        return what, in_words(what)

    return run_command(command, as_json=words.json) or exit_code


if __name__ == "__main__":
    sys.exit(main())
