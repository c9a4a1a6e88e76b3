"""Write builtin values as the C pickler does at protocol 2, byte for byte.

Memo numbers follow object identity, batches are of 1000 with the C pickler's peculiarities. Knows no tensors: see
``pickler``. Does not write files.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from struct import pack
from typing import Any

from tasks.torchfile.objects import OneByte

# The C pickler's batch size of APPENDS and SETITEMS.
_BATCH = 1000

# One object in CPython, and also the one that the pickler itself writes for bytes.
_LATIN1 = "latin1"


class UnsupportedValueError(TypeError):
    """A value that this pickler does not write."""


class PlainPickler:
    """One dump. Every ``_save_*`` writes one kind of value; ``_memo`` maps an object's id to its number."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.num_memo = 0
        self.memo: dict[int, int] = {}
        self.kept: list[object] = []  # temporaries, so that no id is used twice
        self.global_memo: dict[tuple[str, str], int] = {}
        self.savers: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self.out.append(0x4E),
            bool: lambda value: self.out.append(0x88 if value else 0x89),
            int: self.save_int,
            float: lambda value: self.out.extend(pack(">cd", b"G", value)),
            str: self.save_str,
            bytes: self.save_bytes,
            OneByte: self.save_bytes,
            bytearray: self.save_bytearray,
            tuple: self.save_tuple,
            list: self.save_list,
            dict: self.save_dict,
            set: self.save_set,
            frozenset: self.save_set,
        }

    def save(self, value: object) -> None:
        saver = self.savers.get(type(value))
        if saver is not None:
            saver(value)
        else:
            self.save_other(value)

    def save_other(self, value: object) -> None:
        """Write what is no plain value; a subclass knows more."""
        raise UnsupportedValueError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written")

    # The memo

    def put_number(self) -> int:
        number = self.num_memo
        self.num_memo = number + 1
        self.out += b"q%c" % number if number < 256 else pack("<cI", b"r", number)
        return number

    def put(self, value: object) -> None:
        self.memo[id(value)] = self.put_number()

    def put_temporary(self, value: object) -> None:
        self.kept.append(value)
        self.put(value)

    def get(self, number: int) -> None:
        self.out += b"h%c" % number if number < 256 else pack("<cI", b"j", number)

    def known(self, value: object) -> bool:
        number = self.memo.get(id(value))
        if number is None:
            return False
        self.get(number)
        return True

    # Plain values

    def save_int(self, value: int) -> None:
        if 0 <= value < 0x100:
            self.out += b"K%c" % value
        elif 0 <= value < 0x10000:
            self.out += pack("<cH", b"M", value)
        elif -0x80000000 <= value < 0x80000000:
            self.out += pack("<ci", b"J", value)
        else:
            encoded = pickle.encode_long(value)
            length = len(encoded)
            self.out += pack("<BB", 0x8A, length) if length < 256 else pack("<Bi", 0x8B, length)
            self.out += encoded

    def save_str(self, value: str) -> None:
        if value == _LATIN1:
            value = _LATIN1
        if not self.known(value):
            encoded = value.encode("utf-8", "surrogatepass")
            self.out += pack("<cI", b"X", len(encoded))
            self.out += encoded
            self.put(value)

    def save_global(self, module: str, name: str) -> None:
        number = self.global_memo.get((module, name))
        if number is not None:
            self.get(number)
            return
        parent, _, last = name.rpartition(".")
        if parent:  # protocol 2 knows names of modules only
            self.save_global("__builtin__", "getattr")
            self.save_global(module, parent)
            self.kept.append(last)
            self.save_str(last)
            self.out += b"\x86"
            self.put_number()
            self.out += b"R"
        else:
            self.out += f"c{module}\n{name}\n".encode()
        self.global_memo[module, name] = self.put_number()

    def save_bytes(self, value: bytes) -> None:
        if self.known(value):
            return
        if value:
            text = str(value, _LATIN1)
            self.save_builtin("_codecs", "encode", (text, _LATIN1))
        else:
            self.save_builtin("__builtin__", "bytes", ())
        self.put(value)

    def save_bytearray(self, value: bytearray) -> None:
        if not self.known(value):
            self.save_builtin("__builtin__", "bytearray", (OneByte(value),) if value else ())
            self.put(value)

    def save_set(self, value: set[object] | frozenset[object]) -> None:
        if not self.known(value):
            self.save_builtin("__builtin__", type(value).__name__, (list(value),))
            self.put(value)

    def save_builtin(self, module: str, name: str, args: tuple[object, ...]) -> None:
        self.save_global(module, name)
        self.kept.append(args)
        self.save_tuple(args)
        self.out += b"R"

    # Containers

    def save_tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self.out += b")"
            return
        if self.known(value):
            return
        short = len(value) <= 3
        if not short:
            self.out += b"("
        save = self.save
        for item in value:
            save(item)
        if id(value) in self.memo:  # a tuple inside itself
            self.out += b"0" * len(value) if short else b"1"
            self.known(value)
            return
        self.out += b"%c" % (0x84 + len(value)) if short else b"t"
        self.put(value)

    def save_list(self, value: list[object]) -> None:
        if self.known(value):
            return
        self.out += b"]"
        self.put(value)
        if len(value) == 1:
            self.save(value[0])
            self.out += b"a"
            return
        for start in range(0, len(value), _BATCH):  # a last batch of one is still a batch
            self.out += b"("
            for item in value[start : start + _BATCH]:
                self.save(item)
            self.out += b"e"

    def save_dict(self, value: dict[Any, Any]) -> None:
        if self.known(value):
            return
        self.out += b"}"
        self.put(value)
        if len(value) == 1:
            self.save_items(value.items())
            self.out += b"s"
        elif value:
            items = iter(value.items())
            # The C pickler ends after the first batch that is not full: a multiple of 1000 has an empty one.
            for _ in range(len(value) // _BATCH + 1):
                self.out += b"("
                self.save_items(islice(items, _BATCH))
                self.out += b"u"

    def save_items(self, items: Iterable[tuple[object, object]]) -> None:
        save = self.save
        for key, item in items:
            save(key)
            save(item)

    def append_all(self, items: Iterator[object]) -> None:
        """Write the items of an object that is no exact list, batched otherwise than an exact list."""
        while batch := list(islice(items, _BATCH)):
            self.out += b"(" if len(batch) > 1 else b""
            for item in batch:
                self.save(item)
            self.out += b"e" if len(batch) > 1 else b"a"

    def set_all(self, items: Iterator[tuple[object, object]]) -> None:
        """Write the pairs of an object that is no exact dict, batched otherwise than an exact dict."""
        while batch := list(islice(items, _BATCH)):
            self.out += b"(" if len(batch) > 1 else b""
            self.save_items(batch)
            self.out += b"u" if len(batch) > 1 else b"s"

    def save_state(self, state: object) -> None:
        self.save(state)
        self.out += b"b"
