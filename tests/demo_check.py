"""A program: compares a resharded file with the unsharded state dict that the training job itself saved.

    python -m tests.demo_check RESULT.pt TRUTH.pt

It uses plain `torch.load` and nothing of this project, so it sees what any user of the file sees.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch


def differences(result: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> list[str]:
    """Name every tensor that is missing, one too many, or not the same bit for bit."""
    odd = [f"{name}: only in one of the two" for name in sorted(result.keys() ^ truth.keys())]
    for name in sorted(result.keys() & truth.keys()):
        mine, true = result[name], truth[name]
        if (mine.dtype, mine.shape) != (true.dtype, true.shape):
            odd.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, should be {true.dtype} {tuple(true.shape)}")
        # Bytes, not values: NaN differs from itself, and 0.0 equals -0.0.
        elif not torch.equal(_bytes(mine), _bytes(true)):
            odd.append(f"{name}: other bytes")
    return odd


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main(result_path: str, truth_path: str) -> int:
    """Compare and tell; return the exit code."""
    # Both hold the training job's argparse.Namespace, which `weights_only=True` refuses. They are ours, so trusted.
    result, truth = (torch.load(path, weights_only=False)["model"] for path in (result_path, truth_path))
    odd = differences(result, truth)
    print("\n".join(odd) or f"the same, bit for bit: all {len(truth)} tensors of {result_path} and {truth_path}")
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
