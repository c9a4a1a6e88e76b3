"""What a checkpoint's objects become: a storage, a tensor over one, an ordered dict. No tensor data is held.

Offsets and sizes count elements unless the name says bytes. Storages and tensors are compared by identity: two tensors
that name one storage share its bytes, in the file that is read and in the file that is written.

>>> half = StorageRef("HalfStorage", "0", "cpu", 6)
>>> whole = TensorRef(half, 0, (2, 3), (3, 1))
>>> whole.dtype, half.size_bytes, whole.is_contiguous
('float16', 12, True)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tasks.torchfile.dtypes import DTYPE_OF_STORAGE_TYPE, ITEM_SIZE_BYTES
from tasks.torchfile.inert import Inert, InertType, global_name, inert_global, is_instance_of

__all__ = [
    "Inert",
    "InertType",
    "LoadedOrderedDict",
    "OneByte",
    "StorageRef",
    "TensorRef",
    "contiguous_stride",
    "global_name",
    "inert_global",
    "is_instance_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A run of elements of one type; the bytes lie in the file that named it. Compared by identity."""

    storage_type: str
    "torch's legacy class name, as HalfStorage; UntypedStorage counts bytes"
    key: str
    "the name of its record in the file it came from"
    location: str
    num_elements: int
    tag: str = field(default="storage", repr=False)
    "the very string object that the file used: other strings of the file may be the same object"

    def __post_init__(self) -> None:
        if self.storage_type not in DTYPE_OF_STORAGE_TYPE:
            raise ValueError(f"storage type {self.storage_type!r} is unknown")
        if self.num_elements < 0:
            raise ValueError(f"storage {self.key} has {self.num_elements} elements")

    @property
    def dtype(self) -> str:
        """The element type; empty for an untyped storage."""
        return DTYPE_OF_STORAGE_TYPE[self.storage_type]

    @property
    def item_size_bytes(self) -> int:
        return ITEM_SIZE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.item_size_bytes

    def __setstate__(self, _state: object) -> None:
        raise TypeError("a storage has no state to set")

    def __reduce__(self) -> tuple[object, ...]:
        return StorageRef, (self.storage_type, self.key, self.location, self.num_elements, self.tag)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A view of a storage, in elements. Compared by identity."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False
    untyped_dtype: str = ""
    "the element type where the storage is untyped; empty otherwise"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError(f"shape {self.shape} and stride {self.stride} differ in rank")
        if self.offset < 0 or min(self.shape, default=0) < 0 or min(self.stride, default=0) < 0:
            raise ValueError(f"negative offset {self.offset}, shape {self.shape} or stride {self.stride}")
        needed = self.num_elements and self.offset + 1 + sum(
            (length - 1) * step for length, step in zip(self.shape, self.stride, strict=True)
        )
        if needed * self.item_size_bytes > self.storage.size_bytes:
            raise ValueError(
                f"shape {self.shape}, stride {self.stride}, offset {self.offset} need {needed} elements of {self.dtype}"
                f"; storage {self.storage.key} has {self.storage.size_bytes} bytes"
            )

    @property
    def dtype(self) -> str:
        return self.untyped_dtype or self.storage.dtype

    @property
    def item_size_bytes(self) -> int:
        return ITEM_SIZE_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps; axes of length one have any stride."""
        if not self.num_elements:
            return True
        wanted = contiguous_stride(self.shape)
        return all(
            length == 1 or have == want for length, have, want in zip(self.shape, self.stride, wanted, strict=True)
        )

    def __setstate__(self, _state: object) -> None:
        raise TypeError("a tensor has no state to set")

    def __reduce__(self) -> tuple[object, ...]:
        return TensorRef, (
            self.storage,
            self.offset,
            self.shape,
            self.stride,
            self.requires_grad,
            self.is_parameter,
            self.untyped_dtype,
        )


class OneByte(bytes):
    """One byte, as an object of its own: CPython has only one ``b"a"``, a file may have had several."""

    __slots__ = ()


class LoadedOrderedDict(OrderedDict[Any, Any]):
    """An ordered dict of a file; attributes that the file sets stay in ``state`` and reach nothing else."""

    __slots__ = ("state",)

    state: Any

    def __init__(self, *args: Any, **items: Any) -> None:
        """Take nothing, or a list of pairs, as Python 2 wrote it. Its keys are not seen by ``hash_work``."""
        if args and not (len(args) == 1 and type(args[0]) is list and all(map(_is_plain_pair, args[0]))):
            raise ValueError("an ordered dict is made of something else than pairs with plain keys")
        super().__init__(*args, **items)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        state = getattr(self, "state", None)
        return LoadedOrderedDict, (), state, None, iter(self.items())


def _is_plain_pair(pair: object) -> bool:
    if type(pair) not in (tuple, list) or len(pair) != 2:  # type: ignore[arg-type]
        return False
    key = pair[0]  # type: ignore[index]
    return type(key) in (str, bytes) or (type(key) is int and abs(key) < 2**31)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the row-major stride that torch gives a new tensor: ``contiguous_stride((2, 0, 3)) == (3, 3, 1)``."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))
