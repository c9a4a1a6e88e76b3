"""Pure. File names of metaseq checkpoints: parsed, never matched by substring.

>>> parse("checkpoint_2_10000-model_part-1-shard10.pt")
FileName(prefix='checkpoint_2_10000', mp=1, dp=10, part=None)
>>> parse("checkpoint_1_4000.pt-model_part-0.pt").prefix
'checkpoint_1_4000.pt'
>>> target_name("reshard", mp=0, dp=3, num_mp=1, flat=True)
'reshard-model_part-0-shard3.pt'
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<prefix>.+?)(?:-model_part-(?P<mp>\d+))?(?:-shard(?P<dp>\d+))?(?:_part(?P<part>\d+))?\.pt")
# Experts and the dense part of mixture-of-experts checkpoints (fairseq and metaseq MoE).
_MIXTURE = re.compile(r".+-(?:rank-\d+|shared)(?:-shard\d+)?\.pt")
# What crashed or running saves and upload scripts leave behind; a leading underscore marks a marker file.
_LEFTOVER = re.compile(r".*\.tmp|dummy\d*|_.*|\..*")


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed name; the numbers are None where the name has none."""

    prefix: str
    mp: int | None
    dp: int | None
    part: int | None
    "of fairseq's `--checkpoint-shard-count`: files with different tensors of one model"


def parse(name: str) -> FileName | None:
    """Parse a file's name, or return None for a name that is not a checkpoint's."""
    if is_leftover(name) or is_mixture(name):
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    numbers = {key: int(match[key]) if match[key] is not None else None for key in ("mp", "dp", "part")}
    return FileName(match["prefix"], numbers["mp"], numbers["dp"], numbers["part"])


def is_leftover(name: str) -> bool:
    """Tell names that a save leaves behind and no checkpoint has."""
    return _LEFTOVER.fullmatch(name) is not None


def is_mixture(name: str) -> bool:
    """Tell files of a mixture-of-experts checkpoint.

    >>> is_mixture("checkpoint_last-rank-3-shard3.pt"), is_mixture("checkpoint_last-shared.pt")
    (True, True)
    """
    return _MIXTURE.fullmatch(name) is not None


def target_name(prefix: str, *, mp: int, dp: int, num_mp: int, flat: bool) -> str:
    """Name a target file as metaseq's trainer (flat) and its inference (unflat) name theirs."""
    if flat:
        return f"{prefix}-model_part-{mp}-shard{dp}.pt"
    return f"{prefix}-model_part-{mp}.pt" if num_mp > 1 else f"{prefix}.pt"
