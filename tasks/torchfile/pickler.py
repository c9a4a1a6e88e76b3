"""Write objects as torch.save's pickle does, byte for byte: protocol 2, C pickler, storages numbered as they come.

Takes what ``unpickler`` gives and plain builtin values. Inert objects are written back as they came, those of later
protocols in the form that protocol 2 has for them. Memo numbers
follow object identity as in the C pickler, so sharing is kept. Does not write files.

>>> dump_pickle([True])
(b'\\x80\\x02]q\\x00\\x88a.', ())
"""

from __future__ import annotations

from collections import OrderedDict

from tasks.errors import ErrorKind, ReshardError, error
from tasks.torchfile.dtypes import UNTYPED_STORAGE
from tasks.torchfile.inert import CALLED, NEW, NEW_WITH_KEYWORDS, NO_STATE, Inert, InertType
from tasks.torchfile.objects import LoadedOrderedDict, StorageRef, TensorRef
from tasks.torchfile.plain_pickler import PlainPickler, UnsupportedValueError


class _Pickler(PlainPickler):
    """One dump, with the storages in the order of their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageRef] = []
        self.storage_keys: dict[StorageRef, str] = {}
        self.pid_strings: dict[str, str] = {}
        self.savers |= {
            OrderedDict: self.save_ordered_dict,
            LoadedOrderedDict: self.save_ordered_dict,
            TensorRef: self.save_tensor,
            StorageRef: self.save_storage,
        }

    def save_other(self, value: object) -> None:
        if isinstance(value, Inert):
            self.save_inert(value)
        elif isinstance(value, InertType):
            self.save_global(value.global_module, value.global_qualname)
        elif value is OrderedDict or value is LoadedOrderedDict:
            self.save_global("collections", "OrderedDict")
        else:
            super().save_other(value)

    def save_ordered_dict(self, value: OrderedDict[object, object]) -> None:
        if self.known(value):
            return
        self.save_global("collections", "OrderedDict")
        self.out += b")R"
        self.put(value)
        self.set_all(iter(value.items()))
        state = value.state if hasattr(value, "state") else (vars(value) or None)
        if state is not None:
            self.save_state(state)

    # Objects

    def save_inert(self, value: Inert) -> None:
        if self.known(value):
            return
        if value.made_by == CALLED:
            self.save(value.function)
            opcode = b"R"
        elif value.made_by == NEW:
            self.save(type(value))
            opcode = b"\x81"
        else:
            self.save_new_with_keywords(value)
            opcode = b"R"
        args = () if value.made_by == NEW_WITH_KEYWORDS else value.args
        self.kept.append(args)
        self.save_tuple(args)
        self.out += opcode
        if id(value) in self.memo:  # its arguments held the object itself
            self.out += b"0"
            self.known(value)
            return
        self.put(value)
        self.append_all(iter(value.list_items))
        self.set_all(iter(value.dict_items))
        if value.state is not NO_STATE:
            self.save_state(value.state)

    def save_new_with_keywords(self, value: Inert) -> None:
        """Write what gives the object when it is called: protocol 2 has no opcode for keywords, so a partial."""
        self.save_global("functools", "partial")
        self.save_global("__builtin__", "getattr")
        self.save(type(value))
        self.save_str("__new__")
        self.out += b"\x86"
        self.put_number()
        self.out += b"R"
        new = self.put_number()
        self.out += b"\x85"
        self.put_number()
        self.out += b"R"
        self.put_number()
        self.out += b"("
        self.get(new)
        args = (type(value), *value.args)
        self.kept.append(args)
        self.save_tuple(args)
        self.save_dict(value.keywords)
        self.out += b"Nt"
        self.put_number()
        self.out += b"b"

    def save_storage(self, storage: StorageRef) -> None:
        key = self.storage_keys.get(storage)
        if key is None:
            key = self.storage_keys[storage] = str(len(self.storages))
            self.storages.append(storage)
        self.out += b"("
        self.save_str(self.pid_strings.setdefault(storage.tag, storage.tag))
        module = "torch.storage" if storage.storage_type == UNTYPED_STORAGE else "torch"
        self.save_global(module, storage.storage_type)
        self.save_str(key)
        self.save_str(self.pid_strings.setdefault(storage.location, storage.location))
        self.save_int(storage.num_elements)
        self.out += b"t"
        self.put_number()
        self.out += b"Q"

    def save_tensor(self, tensor: TensorRef) -> None:
        if self.known(tensor):
            return
        if tensor.is_parameter:
            self.save_global("torch._utils", "_rebuild_parameter")
        self.save_global("torch._utils", "_rebuild_tensor_v3" if tensor.untyped_dtype else "_rebuild_tensor_v2")
        self.out += b"("
        self.save_storage(tensor.storage)
        self.save_int(tensor.offset)
        self.save_extents(tensor.shape)
        self.save_extents(tensor.stride)
        self.out.append(0x88 if tensor.requires_grad and not tensor.is_parameter else 0x89)
        self.save_no_hooks()
        if tensor.untyped_dtype:
            self.save_global("torch", tensor.untyped_dtype)
        self.out += b"t"
        self.put_number()
        self.out += b"R"
        if tensor.is_parameter:
            self.put_number()
            self.out.append(0x88 if tensor.requires_grad else 0x89)
            self.save_no_hooks()
            self.out += b"\x87"
            self.put_number()
            self.out += b"R"
        self.put(tensor)

    def save_extents(self, extents: tuple[int, ...]) -> None:
        """Write a shape or stride: a tuple of its own for every tensor, never shared."""
        if not extents:
            self.out += b")"
            return
        short = len(extents) <= 3
        if not short:
            self.out += b"("
        for extent in extents:
            self.save_int(extent)
        self.out += b"%c" % (0x84 + len(extents)) if short else b"t"
        self.put_number()

    def save_no_hooks(self) -> None:
        self.save_global("collections", "OrderedDict")
        self.out += b")R"
        self.put_number()


def dump_pickle(root: object) -> tuple[bytes, tuple[StorageRef, ...]]:
    """Return the bytes of data.pkl and the storages in the order of their new keys "0", "1", ...

    The tree must not change meanwhile. Raises ReshardError, reference "cannot-pickle", for other values than those
    of a loaded checkpoint and plain builtins.
    """
    pickler = _Pickler()
    try:
        pickler.save(root)
    except (UnsupportedValueError, RecursionError, UnicodeError) as fault:
        raise _cannot_pickle(fault) from fault
    pickler.out += b"."
    return bytes(pickler.out), tuple(pickler.storages)


def _cannot_pickle(fault: Exception) -> ReshardError:
    return error(
        ErrorKind.PLAN,
        "cannot-pickle",
        "the objects of the target cannot be written as torch.save would",
        context=(f"{type(fault).__name__}: {fault}"[:500],),
        hint="remove the object from the checkpoint's extra state",
    )
