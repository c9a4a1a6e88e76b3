"""Compares two folders of torch files bit for bit: names, shapes and dtypes of the model's tensors, and their bytes.

python -m tests.benchmarks.compare_files OURS OTHER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def differences(ours: Path, other: Path) -> list[str]:
    """Say what differs; empty where all is equal."""
    names = sorted(file.name for file in ours.glob("*.pt"))
    if names != sorted(file.name for file in other.glob("*.pt")) or not names:
        return [f"{ours} and {other} hold different files"]
    return [fault for name in names for fault in _of_file(name, _model(ours / name), _model(other / name))]


def _model(path: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["model"]
    return model


def _of_file(file: str, ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    if ours.keys() != other.keys():
        return [f"{file}: tensors that only one holds: {sorted(ours.keys() ^ other.keys())}"]
    return [f"{file}: {name} differs" for name in ours if not _equal(ours[name], other[name])]


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(found) or "equal")
    sys.exit(bool(found))
