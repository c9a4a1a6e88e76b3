"""The command line of `python -m pipeline.reshard`: words in, a request out. Touches no file."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.messages import CommandParser
from tasks.errors import ErrorKind, error
from tasks.target import Projection

DTYPES = {"keep": "", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Local windows of 4 MiB and S3 parts of 8 MiB both fit; more brings nothing (docs/design.md).
DEFAULT_MEMORY = "64MiB"
DEFAULT_PIECE = "512MiB"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

EXAMPLES = """examples:
  what is in a checkpoint:
    python -m pipeline.inspect /checkpoints/opt-2.7b
  one unsharded file for inference:
    python -m pipeline.reshard /checkpoints/opt-2.7b out/ --layout unflat --mp 1 --dp 1 --state drop
  training shards for another cluster:
    python -m pipeline.reshard s3://bucket/step_10000 s3://bucket/step_10000-mp8 --mp 8 --dp 48 --state drop
  what would happen, without writing:
    python -m pipeline.reshard /checkpoints/opt-2.7b out/ --mp 2 --dry-run

exit codes: 0 done; 2 wrong use; 3 source bad or incomplete; 4 cannot be planned; 5 a task failed after its retries;
6 verification found a difference; 7 target in use, or holds something else"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None where the source decides."""

    source: str
    target: str
    mp: int | None = None
    dp: int | None = None
    flat: bool | None = None
    dtype: str = ""
    keep_state: bool = True
    moments_dtype: str = ""
    projection: Projection = Projection.KEEP
    prefix: str = ""
    checkpoint: str = ""
    memory_bytes: int = 64 << 20
    piece_bytes: int = 512 << 20
    "of a target file, that one task writes and a rerun need not write again"
    address: str | None = None
    dry_run: bool = False
    overwrite: bool = False
    durable: bool = True
    "local files are on the disk before the manifest names them"
    json: bool = False
    replica_part: int | None = None
    heads: int | None = None
    source_fused: bool | None = None
    resources: tuple[str, ...] = ()


def parse_size(text: str) -> int:
    """
    >>> parse_size("64MiB"), parse_size("1.5 GB"), parse_size("4096")
    (67108864, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size, as in 64MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _index(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of a part")
    return int(text)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m pipeline.reshard",
        description="Reshard a metaseq checkpoint from any (mp, dp) to any other, flat or not, bit for bit.",
        epilog=EXAMPLES,
    )
    parser.add_argument("source", metavar="SOURCE", help="directory, prefix, file or quoted glob: a path or fsspec URL")
    parser.add_argument("target", metavar="TARGET", help="directory: a path or fsspec URL")
    shape = parser.add_argument_group("shape of the target")
    shape.add_argument("--mp", type=_positive, metavar="N", help="model-parallel parts (default: as in the source)")
    shape.add_argument("--dp", type=_positive, metavar="N", help="data-parallel shards (default: as in the source)")
    shape.add_argument(
        "--layout",
        choices=("flat", "unflat"),
        help="FSDP-flattened or named tensors (default: as in the source; unflat has --dp 1)",
    )
    shape.add_argument("--format", choices=("metaseq",), default="metaseq", help="of the target (default: %(default)s)")
    shape.add_argument("--dtype", choices=tuple(DTYPES), default="keep", help="of weights only (default: %(default)s)")
    shape.add_argument(
        "--state", choices=("keep", "drop"), default="keep", help="optimizer and EMA (default: %(default)s)"
    )
    shape.add_argument(
        "--moments",
        choices=("keep", "fp32"),
        default="keep",
        help="dtype of the optimizer's moments; fp32 takes up the factors of fp16 moments (default: %(default)s)",
    )
    shape.add_argument("--qkv", choices=tuple(Projection), default="keep", help="k, v, q in one tensor or three")
    shape.add_argument("--prefix", default="", metavar="NAME", help="of the target files (default: as in the source)")
    source = parser.add_argument_group("reading the source")
    source.add_argument("--checkpoint", default="", metavar="NAME", help="which one, where SOURCE holds several")
    source.add_argument(
        "--replica-part", type=_index, metavar="N", help="where replicas differ, take those of this model-parallel part"
    )
    source.add_argument("--heads", type=_positive, metavar="N", help="attention heads, where the source has no cfg")
    source.add_argument(
        "--source-qkv",
        choices=("fused", "split"),
        help="how flat files without shard_metadata hold k, v and q, where cfg does not tell",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--memory",
        type=_size,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="budget of one worker (default: %(default)s)",
    )
    run.add_argument(
        "--piece",
        type=_size,
        default=DEFAULT_PIECE,
        metavar="SIZE",
        help="larger target files are written by several workers, and resumed, in pieces (default: %(default)s)",
    )
    run.add_argument("--address", metavar="ADDRESS", help="of the Ray cluster (default: RAY_ADDRESS, else a local one)")
    run.add_argument(
        "--resources",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="what each task asks of Ray besides memory: num_cpus, num_gpus or a label of your nodes; may be repeated",
    )
    run.add_argument("--dry-run", action="store_true", help="plan and estimate only")
    run.add_argument("--overwrite", action="store_true", help="replace another target")
    run.add_argument(
        "--fsync",
        choices=("on", "off"),
        default="on",
        help="off: faster on local disks, but a power cut may lose files of the manifest (default: %(default)s)",
    )
    run.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    return parser


def parse_request(arguments: Sequence[str] | None = None) -> Request:
    """Read the command line; wrong use exits with 2, as argparse does."""
    parser = make_parser()
    words = parser.parse(arguments)
    flat = None if words.layout is None else words.layout == "flat"
    if flat is False and words.dp not in (None, 1):
        parser.error(f"--layout unflat has one file for each model-parallel part: --dp {words.dp} needs --layout flat")
    return Request(
        source=words.source,
        target=words.target,
        mp=words.mp,
        dp=words.dp,
        flat=flat,
        dtype=DTYPES[words.dtype],
        keep_state=words.state == "keep",
        moments_dtype="" if words.moments == "keep" else DTYPES[words.moments],
        projection=Projection(words.qkv),
        prefix=words.prefix,
        checkpoint=words.checkpoint,
        memory_bytes=words.memory,
        piece_bytes=max(words.piece, 1),
        address=words.address,
        dry_run=words.dry_run,
        overwrite=words.overwrite,
        durable=words.fsync == "on",
        json=words.json,
        replica_part=words.replica_part,
        heads=words.heads,
        source_fused=None if words.source_qkv is None else words.source_qkv == "fused",
        resources=tuple(words.resources),
    )


def check_request(request: Request) -> None:
    """Refuse what can be refused before any file is looked at."""
    if request.prefix and ("/" in request.prefix or not request.prefix.strip()):
        raise error(
            ErrorKind.USAGE,
            "bad-prefix",
            f"--prefix {request.prefix!r} is not the start of a file's name",
            hint="a prefix has no folders: those belong to TARGET",
        )
