"""Converts numbers: casts of weights and moments, and moments from one factor to another.

The one place where workers need torch, and only if something is converted: importing it takes a second and 200 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tasks.errors import ErrorKind, error

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


def load_libraries() -> None:
    """Import what conversions need."""
    import torch  # noqa: F401


def convert(
    source: Bytes, source_dtype: str, target: Bytes, target_dtype: str, factor: float = 1.0, *, exact: bool = True
) -> None:
    """Convert rows of numbers, given as bytes, from one dtype to another and multiply them by a factor.

    Casts are torch's own. A finite number that becomes infinite is an error; so is where `exact` is asked for,
    one whose product with the factor is no number of its dtype: nothing would tell the user how much of it is lost.
    """
    import torch

    numbers = torch.from_numpy(np.ascontiguousarray(source)).view(getattr(torch, source_dtype))
    if factor == 1:
        converted = numbers.to(getattr(torch, target_dtype))
    elif not exact:
        # As the optimizer itself takes its stored moments up: in fp32.
        converted = (numbers.float() * factor).to(getattr(torch, target_dtype))
    else:
        products = numbers.double() * factor
        converted = products.to(numbers.dtype)
        _refuse_inexact(products, converted)
    _refuse_overflow(numbers, converted, target_dtype)
    np.copyto(target, converted.view(torch.uint8).numpy())


def _refuse_overflow(numbers: torch.Tensor, converted: torch.Tensor, target_dtype: str) -> None:
    import torch

    overflown = torch.isinf(converted) & torch.isfinite(numbers)
    if bool(overflown.any()):
        worst = float(numbers[overflown].abs().max())
        raise error(
            ErrorKind.PLAN,
            "cast-overflow",
            f"{int(overflown.sum())} numbers are too large for {target_dtype}",
            context=(f"the largest of them is {worst:g}",),
            hint="use --dtype bf16, fp32 or keep",
        )


def _refuse_inexact(exact: torch.Tensor, converted: torch.Tensor) -> None:
    lost = (converted.double() != exact) & ~exact.isnan()
    if bool(lost.any()):
        raise error(
            ErrorKind.PLAN,
            "inexact-moments",
            f"{int(lost.sum())} moments cannot be kept exactly under the one factor that a shard has",
            context=(f"for example {float(exact[lost][0]):g} would become {float(converted[lost][0]):g}",),
            hint="pass --moments fp32",
        )
