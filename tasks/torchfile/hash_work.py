r"""Pure: reckon, opcode by opcode, how much hashing and comparing a pickle would make the C unpickler do.

Keys of dicts and members of sets are hashed in C, without any limit of depth, size or time: a tuple nested in itself
a hundred thousand times overflows the C stack, sixty tuples of "the last one twice" take longer than a life, integers
of equal hashes make a dict quadratic. So the stack of the unpickler is followed here, with one number for an object:
``2 * steps + is_secret``. ``steps`` is what hashing it costs again each time, 0 for one step or a remembered hash;
``is_secret`` tells that its hash has a per-process secret in it (text, bytes), so that nobody makes equal ones.

>>> work = HashWork()
>>> work.feed([b"}", b"N", b"\x85", b"\x85", b"N", b"s"])
>>> work.num_forgeable, work.steps
(1, 4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

# One level of a nested tuple takes about 100 bytes of C stack, which may be no larger than 8 MiB.
MAX_KEY_STEPS = 10_000
# Hashing and comparing: some seconds. Allows 30 000 keys that are integers of 61 bits or more, and any number of
# keys that are text, bytes, smaller numbers, or tuples of text.
MAX_STEPS = 2**29
# Every opcode may take 300 bytes in memory.
MAX_OPCODES = 2**24

_PLAIN, _SECRET = 0, 1
_ENOUGH = 2 * MAX_STEPS
# Integers below this are their own hash: two of them never have the same.
_HASH_MODULUS = 2**61 - 1

# Opcode -> what it pushes: numbers, None and booleans; a global, containers (which are no keys).
_PUSHED = dict.fromkeys(b"KMJNG\x88\x89)", _PLAIN) | dict.fromkeys(b"c]}\x8f", _SECRET)
_BINPUT, _BINGET, _LONG_BINGET = ord("q"), ord("h"), ord("j")
_LONG1, _LONG4 = 0x8A, 0x8B
_PUSH_PLAIN, _PUSH_SECRET = b"N", b"c"


class TooMuchWorkError(ValueError):
    """Loading would take forever, or overflow the stack of the process."""


class HashWork:
    """The unpickler's stack, marks and memo, with a number in place of every object."""

    def __init__(self) -> None:
        self.steps = 0
        self.num_forgeable = 0
        self._num_opcodes = 0
        self._stack: list[int] = []
        self._below: list[list[int]] = []
        self._memo: dict[int, int] = {}

    def feed(self, opcodes: Sequence[bytes]) -> None:
        """Follow opcodes, each with its argument; ``pushing`` tells what stands for those with a length.

        Raises TooMuchWorkError; LookupError where the unpickler would find its stack or memo empty.
        """
        self._num_opcodes += len(opcodes)
        if self._num_opcodes > MAX_OPCODES:
            raise TooMuchWorkError(f"more than {MAX_OPCODES} opcodes")
        pushed, memo, others, stack = _PUSHED, self._memo, self._OTHERS, self._stack
        for opcode in opcodes:
            code = opcode[0]
            if code in pushed:
                stack.append(pushed[code])
            elif code == _BINPUT:
                memo[opcode[1]] = stack[-1]
            elif code == _BINGET:
                stack.append(memo[opcode[1]])
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(opcode[1:], "little")])
            else:
                others[code](self, opcode)
                stack = self._stack

    def _hash(self, items: Sequence[int]) -> None:
        """Reckon with items that become keys or members."""
        if not any(item > _SECRET for item in items):
            return
        for item in items:
            if item <= _SECRET:
                continue
            cost = item >> 1
            if cost > MAX_KEY_STEPS:
                raise TooMuchWorkError(f"a key of a dict or a member of a set has more than {MAX_KEY_STEPS} parts")
            if not item & _SECRET:
                self.steps += cost * self.num_forgeable
                self.num_forgeable += 1
            self.steps += cost
        if self.steps > MAX_STEPS:
            raise TooMuchWorkError(f"keys that take more than {MAX_STEPS} steps to hash and compare")

    def _pop(self, count: int) -> list[int]:
        if count > len(self._stack):
            raise IndexError("the stack is empty")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _pop_mark(self) -> list[int]:
        items, self._stack = self._stack, self._below.pop()
        return items

    # Opcodes

    def _nothing(self, _: bytes) -> None:
        pass

    def _mark(self, _: bytes) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _make_tuple(self, items: Sequence[int]) -> None:
        if not items:
            self._stack.append(_PLAIN)
            return
        steps, secret = 1 + len(items), _SECRET
        for item in items:
            steps += item >> 1
            secret &= item
        self._stack.append(min(2 * steps, _ENOUGH) | secret)

    def _tuple(self, _: bytes) -> None:
        self._make_tuple(self._pop_mark())

    def _short_tuple(self, opcode: bytes) -> None:
        self._make_tuple(self._pop(opcode[0] - 0x84))

    def _frozenset(self, _: bytes) -> None:
        items = self._pop_mark()
        self._hash(items)
        self._make_tuple(items)

    def _set_item(self, _: bytes) -> None:
        self._hash(self._pop(2)[:1])

    def _set_items(self, _: bytes) -> None:
        self._hash(self._pop_mark()[::2])

    def _add_items(self, _: bytes) -> None:
        self._hash(self._pop_mark())

    def _forget_to_mark(self, _: bytes) -> None:
        self._pop_mark()

    def _forget_one(self, _: bytes) -> None:
        self._pop(1)

    def _pop_one_or_mark(self, _: bytes) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _duplicate(self, _: bytes) -> None:
        self._stack.append(self._stack[-1])

    def _call_2(self, _: bytes) -> None:
        self._pop(2)
        self._stack.append(_SECRET)

    def _call_3(self, _: bytes) -> None:
        self._pop(3)
        self._stack.append(_SECRET)

    def _put(self, opcode: bytes) -> None:
        self._memo[int.from_bytes(opcode[1:], "little")] = self._stack[-1]

    def _long(self, opcode: bytes) -> None:
        self._stack.append(int.from_bytes(opcode[1:], "little"))

    def _memoize(self, _: bytes) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    _OTHERS: ClassVar[dict[int, Callable[[Any, bytes], None]]] = {
        ord("("): _mark,
        ord("t"): _tuple,
        0x85: _short_tuple,
        0x86: _short_tuple,
        0x87: _short_tuple,
        0x91: _frozenset,
        ord("s"): _set_item,
        ord("u"): _set_items,
        0x90: _add_items,
        ord("e"): _forget_to_mark,
        ord("1"): _forget_to_mark,
        ord("a"): _forget_one,
        ord("b"): _forget_one,
        ord("0"): _pop_one_or_mark,
        ord("2"): _duplicate,
        ord("R"): _call_2,
        0x81: _call_2,
        0x92: _call_3,
        0x93: _call_2,
        ord("Q"): _nothing,  # may give a part of the id: the whole of it is the safe guess
        0x80: _nothing,
        0x95: _nothing,
        ord("r"): _put,
        0x94: _memoize,
        _LONG4: _long,
    }


def pushing(code: int, length: int, head: bytes) -> bytes:
    """Give an opcode that pushes the like of one with a length; ``head`` are the first 8 bytes of what it pushes."""
    if code not in (_LONG1, _LONG4):
        return _PUSH_SECRET if length else _PUSH_PLAIN  # the hash of no text is 0
    if length < 8 or (length == 8 and abs(int.from_bytes(head, "little", signed=True)) < _HASH_MODULUS):
        return _PUSH_PLAIN
    return b"%c%b" % (_LONG4, (2 * (1 + length // 32)).to_bytes(8, "little"))
