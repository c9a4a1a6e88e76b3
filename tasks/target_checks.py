"""Pure. What forbids a target: numbers that do not divide, dtypes that do not mix, state that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tasks.errors import ErrorKind, Problem
from tasks.family import some
from tasks.source import Source

Glued = tuple[str, tuple[str, ...]]
"(what is glued together, the names of the tensors in it)"


def number_faults(source: Source, glued: Iterable[Glued]) -> list[Problem]:
    """Refuse to glue parameters whose steps differ, or that are of different groups of the optimizer."""
    optimizer = source.optimizer
    if optimizer is None:
        return []
    problems = []
    for what, members in glued:
        ids = {found for member in members if (found := optimizer_id(source, member)) is not None}
        scalars = {optimizer.scalars[number] for number in ids if number in optimizer.scalars}
        groups = {optimizer.groups[number] for number in ids}
        if len(scalars) > 1 or len(groups) > 1:
            different = "steps" if len(scalars) > 1 else "param_groups"
            facts = [str(dict(found)) for found in scalars] if len(scalars) > 1 else [f"groups {sorted(groups)}"]
            problems.append(
                Problem(
                    ErrorKind.PLAN,
                    "optimizer-states-differ",
                    f"{what} would glue parameters with different {different} of the optimizer",
                    tuple(facts[:4]),
                    "use the source's own units, --layout unflat, or --state drop",
                )
            )
    return problems


def scale_faults(source: Source, flat: bool, moments_dtype: str) -> list[Problem]:
    """Refuse moments with factors in an unflat target: fairscale would give one parameter's factor to all."""
    if flat or moments_dtype or source.optimizer is None or not source.optimizer.scaled:
        return []
    message = "the optimizer's fp16 moments have factors, which an unflat file cannot hold for each parameter"
    return [Problem(ErrorKind.PLAN, "scaled-moments", message, hint="pass --moments fp32, or --layout flat")]


def optimizer_id(source: Source, member: str) -> int | None:
    """Return the source optimizer's id of the parameter that holds a tensor; None where it has none."""
    if source.optimizer is None:
        return None
    found = source.optimizer.ids.get(member)
    return source.optimizer.ids.get(source.family.fused_name(member)) if found is None else found


def divisibility_faults(source: Source, num_mp: int, heads: int | None) -> list[Problem]:
    """Refuse a number of parts that does not divide every tensor, or that would cut through an attention head."""
    units: dict[tuple[str, int], list[str]] = {}
    heads = heads or (source.config.heads if source.config else None)
    for name, tensor in source.tensors.items():
        rule = source.family.rule(name)
        if rule.cut is None:
            continue
        size = tensor.shape[rule.cut]
        if rule.unit == "head" and heads and size % heads == 0:
            size = heads
        if size % num_mp:
            units.setdefault((rule.unit, size), []).append(name)
    problems = []
    for (unit, size), names in units.items():
        plural = {"vocabulary entry": "vocabulary entries"}.get(unit, f"{unit}s")
        problems.append(
            Problem(
                ErrorKind.PLAN,
                "not-divisible",
                f"{size} {plural} cannot be divided over {num_mp} model-parallel parts: {some(names, 3)}",
                hint=f"--mp may be one of {', '.join(map(str, possible_parts(source, heads)))}",
            )
        )
    return problems


def possible_parts(source: Source, heads: int | None = None) -> list[int]:
    """List the numbers of model-parallel parts that divide every tensor, and keep attention heads whole."""
    heads = heads or (source.config.heads if source.config else None)
    sizes = set()
    for name, tensor in source.tensors.items():
        rule = source.family.rule(name)
        if rule.cut is not None:
            sizes.add(heads if rule.unit == "head" and heads else tensor.shape[rule.cut])
    common = math.gcd(*sizes)
    return [n for n in range(1, min(common, 4096) + 1) if common % n == 0]


def cast_faults(source: Source, dtype: str) -> list[Problem]:
    """Refuse to cast what is no floating-point number."""
    if not dtype:
        return []
    odd = [
        f"{tensor.name} ({tensor.dtype})"
        for tensor in source.tensors.values()
        if not tensor.is_buffer and tensor.dtype not in ("float32", "float16", "bfloat16", "float64")
    ]
    if not odd:
        return []
    message = f"--dtype would cast weights that are not floating-point numbers: {some(odd)}"
    return [Problem(ErrorKind.PLAN, "dtype-surprise", message, hint="use --dtype keep")]


def mixed_dtypes(glued: Iterable[Glued], dtypes: Mapping[str, str]) -> list[Problem]:
    """Refuse to glue tensors of several dtypes into one; names are keys of `dtypes`."""
    problems = []
    for what, keys in glued:
        found: dict[str, list[str]] = {}
        for key in keys:
            found.setdefault(dtypes[key], []).append(key)
        if len(found) > 1:
            facts = tuple(f"{dtype}: {some(names, 3)}" for dtype, names in found.items())
            message = f"{what} would glue tensors of several dtypes together"
            hint = "cast the weights to one with --dtype, or use --layout unflat"
            problems.append(Problem(ErrorKind.PLAN, "dtype-surprise", message, facts, hint))
    return problems
