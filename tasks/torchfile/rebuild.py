"""Pure: what calls of torch's rebuild functions give. These are the only calls that make a value here.

A call that does not have the usual form (backward hooks, metadata of a conjugate view) stays an inert call and is
written back as it came; a call that is wrong in itself raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tasks.torchfile.dtypes import UNTYPED_DTYPES, UNTYPED_STORAGE
from tasks.torchfile.inert import InertType, global_name, is_instance_of, make_call
from tasks.torchfile.objects import LoadedOrderedDict, OneByte, StorageRef, TensorRef

Builder = Callable[[InertType, tuple[object, ...]], object]


# torch's own limits.
_MAX_DIMENSIONS = 64
_MAX_INTEGER = 2**63


def _integers(value: object) -> tuple[int, ...]:
    """Give a shape or stride as a plain tuple; files of some writers have a ``torch.Size`` there."""
    if is_instance_of(value, "torch.Size"):
        value = value.args[0] if len(value.args) == 1 else None  # type: ignore[attr-defined]
    if type(value) not in (tuple, list) or any(type(item) is not int for item in value):  # type: ignore[attr-defined]
        raise ValueError(f"a shape or stride is a {type(value).__name__}, not integers")
    if len(value) > _MAX_DIMENSIONS or not all(-_MAX_INTEGER <= item < _MAX_INTEGER for item in value):  # type: ignore[arg-type, attr-defined]
        raise ValueError("a shape or stride is too long, or has a number beyond 64 bits")
    return tuple(value)  # type: ignore[arg-type]


def _no_hooks(value: object) -> bool:
    return isinstance(value, LoadedOrderedDict) and not value and not hasattr(value, "state")


def _tensor(args: tuple[object, ...], untyped_dtype: str = "") -> TensorRef:
    storage, offset, shape, stride, requires_grad = args[:5]
    if not isinstance(storage, StorageRef):
        raise ValueError(f"a tensor lies in a {type(storage).__name__}, not in a storage")
    if type(offset) is not int or type(requires_grad) is not bool:
        raise ValueError("a tensor's offset is no integer, or requires_grad no boolean")
    if not 0 <= offset < _MAX_INTEGER:
        raise ValueError("a tensor's offset is no possible one")
    return TensorRef(storage, offset, _integers(shape), _integers(stride), requires_grad, untyped_dtype=untyped_dtype)


def _rebuild_tensor_v2(cls: InertType, args: tuple[object, ...]) -> object:
    if len(args) < 6:
        raise ValueError(f"_rebuild_tensor_v2 has {len(args)} arguments")
    made = _tensor(args)
    return made if len(args) == 6 and _no_hooks(args[5]) and made.dtype else make_call(cls, args)


def _rebuild_tensor_v3(cls: InertType, args: tuple[object, ...]) -> object:
    if len(args) < 7:
        raise ValueError(f"_rebuild_tensor_v3 has {len(args)} arguments")
    module, _, dtype = (global_name(args[6]) or "").partition(".")
    storage = args[0]
    untyped = isinstance(storage, StorageRef) and storage.storage_type == UNTYPED_STORAGE
    if len(args) > 7 or module != "torch" or dtype not in UNTYPED_DTYPES or not untyped or not _no_hooks(args[5]):
        return make_call(cls, args)
    return _tensor(args, dtype)


def _rebuild_parameter(cls: InertType, args: tuple[object, ...]) -> object:
    if len(args) != 3 or type(args[1]) is not bool:
        raise ValueError("_rebuild_parameter has other arguments than data, requires_grad, hooks")
    data = args[0]
    if not isinstance(data, TensorRef) or data.is_parameter or data.requires_grad or not _no_hooks(args[2]):
        return make_call(cls, args)
    return replace(data, requires_grad=args[1], is_parameter=True)


def _encode(cls: InertType, args: tuple[object, ...]) -> object:
    """Give the bytes that protocol 2 writes as text; it has no opcode for bytes."""
    if len(args) == 2 and type(args[0]) is str and args[0] and args[1] == "latin1":
        data = args[0].encode("latin1")
        return data if len(data) > 1 else OneByte(data)
    return make_call(cls, args)


def _bytes(cls: InertType, args: tuple[object, ...]) -> object:
    return make_call(cls, args) if args else b""


BUILDERS: dict[tuple[str, str], Builder] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _bytes,
    ("builtins", "bytes"): _bytes,
}
