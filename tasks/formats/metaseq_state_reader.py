"""Reads the training state of one metaseq file into its index: optimizer moments and moving averages, as references.

Sharded runs hold one entry a flat parameter, its moments as long as its shard. Unsharded runs hold, on the first rank
of each model-parallel part, one entry a named parameter (fairscale `gather_full_optim_state_dict`), and -1 on the
others.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tasks.checkpoint import OptimizerIndex, ParameterState, StoredTensor
from tasks.errors import ErrorKind, Problem
from tasks.formats.metaseq_reader import EMA_KEYS, OPTIMIZER_KEYS, stored_tensors
from tasks.torchfile.objects import StorageRef, TensorRef

OPTIMIZER_KEY = "last_optimizer_state"
NAMES_KEY = "param_names"
# {name: dtype} of the numbers for each parameter that are tensors where the state is sharded. Unsharded state has plain
# numbers: fairscale's `get_shard_from_optim_state_dict` would cut a tensor into shards.
TENSOR_NUMBERS_KEY = "tensor_numbers"
ID_MAP_KEY = "param_id_map"
_SCALE = "_scale"
# Always one number, though some optimizers keep it as a tensor of one axis.
_STEP = "step"
_FORMATS = {"float32": "<f", "float64": "<d", "float16": "<e", "int64": "<q", "int32": "<i"}

Locations = Mapping[StorageRef, tuple[int, int, int | None]]
ReadRange = Callable[[int, int], bytes]


def optimizer_index(
    root: Mapping[str, Any], locations: Locations, read: ReadRange, label: str
) -> tuple[OptimizerIndex | None, list[Problem]]:
    """Index `last_optimizer_state`; None where the file has none (another rank of an unsharded run has it)."""
    problems = [
        _bad_state(label, f"{key} is of an older form than {OPTIMIZER_KEY}", key)
        for key in OPTIMIZER_KEYS
        if key != OPTIMIZER_KEY and holds_state(root.get(key))
    ]
    stated = root.get(OPTIMIZER_KEY)
    if not isinstance(stated, dict) or not stated:
        return None, problems
    try:
        parameters = []
        for number, entry in stated["state"].items():
            state, more = _parameter_state(_id(number), entry, locations, read, label)
            parameters.append(state)
            problems += more
        groups = tuple(tuple(_id(number) for number in group["params"]) for group in stated["param_groups"])
        id_map = stated.get(ID_MAP_KEY)
        pairs = None if id_map is None else tuple((_id(a), None if b is None else _id(b)) for a, b in id_map.items())
        names = tuple((_id(number), str(name)) for number, name in stated.get(NAMES_KEY, {}).items())
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        return None, [_bad_state(label, f"it is not as torch's optimizers write it: {reprlib.repr(fault)}")]
    return OptimizerIndex(tuple(parameters), groups, pairs, names), problems


def holds_state(stated: object) -> bool:
    """Tell an optimizer's state from what stands in its place: None, -1 or nothing at all."""
    return isinstance(stated, dict) and bool(stated)


def _id(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{reprlib.repr(number)} is no id of a parameter")
    return number


def _bad_state(label: str, why: str, key: str = OPTIMIZER_KEY) -> Problem:
    message = f"{label}: {key} cannot be resharded: {why}"
    hint = "pass --state drop to write the weights without it"
    return Problem(ErrorKind.SOURCE, "bad-optimizer-state", message, hint=hint)


def _parameter_state(
    number: int, entry: Mapping[str, Any], locations: Locations, read: ReadRange, label: str
) -> tuple[ParameterState, list[Problem]]:
    tensors = {key: item for key, item in entry.items() if is_moment(key, item)}
    stored, problems = stored_tensors(tensors, locations, f"{label}: optimizer state {number}")
    scales = tuple(
        (key.removesuffix(_SCALE), _factor(number_of(item, locations, read)))
        for key, item in entry.items()
        if is_scale(key, entry)
    )
    scalars = tuple(
        (key, _token(item, locations, read))
        for key, item in entry.items()
        if not is_moment(key, item) and not is_scale(key, entry)
    )
    moments = tuple(zip(tensors, stored, strict=True)) if not problems else ()
    return ParameterState(number, moments, scalars, scales), problems


def is_moment(key: str, item: object) -> bool:
    """Tell the tensors that have an element for each element of the parameter from those that are one number."""
    return isinstance(item, TensorRef) and len(item.shape) > 0 and key != _STEP


def _factor(number: float) -> float:
    if not math.isfinite(number) or number == 0:
        raise ValueError(f"the factor {number} of a moment is no factor")
    return number


def is_scale(key: str, entry: Mapping[str, Any]) -> bool:
    """Tell the factor of another tensor of the entry (`exp_avg_scale` of metaseq's `--fp16-adam-stats`)."""
    return key.endswith(_SCALE) and is_moment(key.removesuffix(_SCALE), entry.get(key.removesuffix(_SCALE)))


def number_of(item: object, locations: Locations, read: ReadRange) -> float:
    """Return the value of a number or of a tensor of one number."""
    if isinstance(item, TensorRef) and item.num_elements == 1 and item.dtype in (*_FORMATS, "bfloat16"):
        at = locations[item.storage][0] + item.offset * item.item_size_bytes
        data = read(at, item.item_size_bytes)
        if item.dtype == "bfloat16":
            data, number_format = b"\0\0" + data, "<f"  # the upper half of a float32
        else:
            number_format = _FORMATS[item.dtype]
        number: float = struct.unpack(number_format, data)[0]
        return number
    if isinstance(item, int | float) and not isinstance(item, bool):
        return float(item)
    raise ValueError(f"{reprlib.repr(item)} is not a number")


def pack_number(dtype: str, number: float) -> bytes:
    """Return the bytes of a tensor of one number."""
    return struct.pack("<f", number)[2:] if dtype == "bfloat16" else struct.pack(_FORMATS[dtype], number)


def _token(item: object, locations: Locations, read: ReadRange) -> str:
    """Return what two equal scalars have in common."""
    if not isinstance(item, TensorRef):
        return repr(item) if isinstance(item, int | float | str | bool | None) else type(item).__name__
    _, size, crc32 = locations[item.storage]
    if crc32 and size == item.item_size_bytes <= 4:
        return f"{item.dtype} tensor {crc32:08x}"  # up to four bytes, a CRC32 stands for one number; nothing is read
    return f"{item.dtype} tensor of {number_of(item, locations, read)}"


def averages(
    root: Mapping[str, Any], locations: Locations, label: str
) -> tuple[tuple[tuple[str, tuple[StoredTensor, ...]], ...], list[Problem]]:
    """Index the moving averages of the weights: dicts of the model's form in `extra_state`."""
    extra = root.get("extra_state")
    found = []
    problems: list[Problem] = []
    for key in EMA_KEYS:
        held = extra.get(key) if isinstance(extra, dict) else None
        if held is None:
            continue
        if not isinstance(held, dict):
            problems.append(_bad_state(label, f"extra_state.{key} is a {type(held).__name__}, not a dict of tensors"))
            continue
        tensors, more = stored_tensors(held, locations, f"{label}: extra_state.{key}")
        found.append((key, tuple(tensors)))
        problems += more
    return tuple(found), problems
