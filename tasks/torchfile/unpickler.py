"""Load the pickle of a checkpoint without importing or calling anything that it names.

Ordered dicts, builtin values, tensors and storages are built; every other global is a stand-in (``inert``). Any fault
of the data becomes one ReshardError, kind SOURCE, reference "bad-pickle". Does not look at tensor data.
"""

from __future__ import annotations

import io
import pickle
import reprlib
from dataclasses import dataclass

from tasks.errors import ErrorKind, ReshardError, error
from tasks.torchfile.dtypes import DTYPE_OF_STORAGE_TYPE
from tasks.torchfile.inert import InertType, inert_global, make_call
from tasks.torchfile.objects import LoadedOrderedDict, StorageRef
from tasks.torchfile.opcode_scan import scan_pickle
from tasks.torchfile.rebuild import BUILDERS

_BUILTINS = frozenset({"builtins", "__builtin__"})
_STORAGE_MODULES = frozenset({"torch", "torch.storage", "torch.cuda"})

# All that the C unpickler and the builders raise on data that is not what it seems.
_FAULTS = (
    pickle.PickleError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    SystemError,
    BufferError,
    ImportError,
)

MAX_PICKLE_BYTES = 1 << 30
"""Large checkpoints have less than a megabyte; a cache of the training data's lengths may make it some hundred."""

# Each becomes a class, of about a kilobyte. Checkpoints name some dozens.
_MAX_GLOBALS = 10_000
_MAX_NAME = 2000
# torch's own limit, of a size in memory.
_MAX_ELEMENTS = 2**63


@dataclass(frozen=True, slots=True)
class LoadedPickle:
    """One pickle's objects."""

    root: object
    storages: tuple[StorageRef, ...]
    "in the order of their first mention"


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="strict")
        self.globals: dict[tuple[str, str], type] = {("collections", "OrderedDict"): LoadedOrderedDict}
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module: str, name: str) -> type:
        found = self.globals.get((module, name))
        if found is None:
            if len(self.globals) >= _MAX_GLOBALS:
                raise ValueError(f"more than {_MAX_GLOBALS} globals")
            if len(module) + len(name) > _MAX_NAME:
                raise ValueError(f"a global's name has more than {_MAX_NAME} characters")
            # Both stand in lines of their own where they are written.
            if "\n" in module or "\n" in name:
                raise ValueError("a global's name has a line break")
            module.encode(), name.encode()
            is_getattr = name == "getattr" and module in _BUILTINS
            found = inert_global(module, name, self._attribute if is_getattr else BUILDERS.get((module, name)))
            self.globals[module, name] = found
        return found

    def _attribute(self, cls: InertType, args: tuple[object, ...]) -> object:
        """Give the stand-in of a nested class: protocols below 4 name it as an attribute of the outer one."""
        if len(args) == 2 and isinstance(args[0], InertType) and type(args[1]) is str:
            return self.find_class(args[0].global_module, f"{args[0].global_qualname}.{args[1]}")
        return make_call(cls, args)

    def persistent_load(self, pid: object) -> object:
        if type(pid) is not tuple or len(pid) < 2:
            raise ValueError("a persistent id is no tuple")
        if pid[0] == "module" and len(pid) == 4:  # legacy files keep the source of a class; the class stays inert
            return pid[1]
        return self._storage(pid)

    def _storage(self, pid: tuple[object, ...]) -> StorageRef:
        if pid[0] != "storage" or len(pid) not in (5, 6):
            raise ValueError(f"a persistent id of {len(pid)} parts names no storage")
        tag, cls, key, location, num_elements = pid[:5]
        if len(pid) == 6 and pid[5] is not None:
            raise ValueError(
                f"storage {reprlib.repr(key)} is a view of another storage, as files before torch 0.4 have it"
            )
        if not isinstance(cls, InertType) or cls.global_module not in _STORAGE_MODULES:
            raise ValueError(f"{reprlib.repr(cls)} is no storage type")
        if cls.global_qualname not in DTYPE_OF_STORAGE_TYPE:
            raise ValueError(f"storage type {cls.global_qualname!r} is unknown")
        if type(key) is not str or type(location) is not str or type(num_elements) is not int or type(tag) is not str:
            raise ValueError("a storage's key, location or length has a wrong type")
        if not 0 <= num_elements < _MAX_ELEMENTS:
            raise ValueError(f"storage {reprlib.repr(key)} has an impossible number of elements")
        known = self.storages.get(key)
        if known is None:
            known = StorageRef(cls.global_qualname, key, location, num_elements, tag)
            self.storages[key] = known
        elif (known.storage_type, known.num_elements) != (cls.global_qualname, num_elements):
            raise ValueError(
                f"storage {key!r} is declared as {known.storage_type} of {known.num_elements} elements"
                f" and as {cls.global_qualname} of {num_elements}"
            )
        return known


def load_with_storages(data: bytes, name: str = "data.pkl") -> LoadedPickle:
    """Load one whole pickle and the storages that it names; ``name`` is told in errors."""
    try:
        end = scan_pickle(data)
        unpickler = _RestrictedUnpickler(data if end == len(data) else data[:end])
        root = unpickler.load()
    except _FAULTS as fault:
        raise bad_pickle(name, fault) from fault
    return LoadedPickle(root, tuple(unpickler.storages.values()))


def load_pickle(data: bytes, name: str = "data.pkl") -> object:
    """Load one whole pickle; see ``load_with_storages``."""
    return load_with_storages(data, name).root


def check_pickle_size(name: str, size_bytes: int, limit_bytes: int = MAX_PICKLE_BYTES) -> None:
    """Refuse to read a pickle that is larger than any checkpoint's: ReshardError."""
    if size_bytes > limit_bytes:
        raise bad_pickle(name, ValueError(f"its pickle has {size_bytes} bytes or more; {limit_bytes} are read"))


def bad_pickle(name: str, fault: BaseException) -> ReshardError:
    """Make the error for a pickle that cannot be read."""
    return error(
        ErrorKind.SOURCE,
        "bad-pickle",
        f"{name}: the pickled objects cannot be read",
        context=(f"{type(fault).__name__}: {fault}"[:500],),
        hint="the file is damaged or was not written by torch.save: copy it again, or try torch.load on it",
    )
