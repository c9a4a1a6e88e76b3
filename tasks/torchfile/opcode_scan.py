r"""Pure: walk over the opcodes of one pickle before it is loaded, find its end, refuse what could hurt.

Only opcodes of protocols 2 to 5 pass, lengths must lie inside the data, and memo indexes must be possible: the C
unpickler would otherwise reserve 64 GiB for one index of four bytes. Keys must be cheap to hash (``hash_work``). Runs
of fixed-size opcodes are matched by one expression: 100 tensors cost about a millisecond.

>>> scan_pickle(b"\x80\x02K\x01.more")
5
"""

from __future__ import annotations

import re

from tasks.torchfile.hash_work import HashWork, TooMuchWorkError, pushing


class PickleTruncatedError(ValueError):
    """The data ends before the pickle does."""


class PickleForbiddenError(ValueError):
    """An opcode that no checkpoint has, or an impossible number."""


_STOP = 0x2E
_LONG_BINPUT = 0x72

# Everything of fixed size, with memo indexes below 65536, and globals.
_ONE = (
    rb"[(012N})\]aesutRbQ\x81\x85-\x89\x8f-\x94]|[Kqh\x80].|M..|[Jj].{4}|r..\x00\x00|[G\x95].{8}"
    rb"|c[^\n]{0,1000}\n[^\n]{0,1000}\n"
)
_FIXED = re.compile(_ONE, re.DOTALL)
# Possessive: never walks back. Bounded, so that the list of a run's opcodes stays small.
_RUN = re.compile(rb"(?:%b){1,10000}+" % _ONE, re.DOTALL)
_BATCH = 20_000

# Opcode -> size in bytes of the length that follows it.
_PREFIXED = {
    ord("X"): 4,
    ord("U"): 1,
    ord("T"): 4,
    ord("B"): 4,
    ord("C"): 1,
    0x8A: 1,
    0x8B: 4,
    0x8C: 1,
    0x8D: 8,
    0x8E: 8,
    0x96: 8,
}

# What may stand incomplete at the end of the data: any fixed-size opcode or a global.
_MAY_BE_CUT = frozenset(b"KqhMJjrGc\x80\x95")


def scan_pickle(data: bytes, start: int = 0) -> int:
    """Return the offset behind the STOP opcode of the pickle that begins at ``start``.

    Raises PickleTruncatedError where more data could complete it, else PickleForbiddenError.
    """
    try:
        return _scan(data, start, HashWork())
    except TooMuchWorkError as fault:
        raise PickleForbiddenError(str(fault)) from fault
    except LookupError as fault:
        raise PickleForbiddenError(f"an opcode finds nothing to work on: {fault}") from fault


def _scan(data: bytes, start: int, work: HashWork) -> int:
    size = len(data)
    match, split, prefixed = _RUN.match, _FIXED.findall, _PREFIXED
    position = start
    opcodes: list[bytes] = []
    while True:
        found = match(data, position)
        if found:
            opcodes += split(data, position, found.end())
            position = found.end()
        if len(opcodes) > _BATCH:
            work.feed(opcodes)
            opcodes = []
        if position >= size:
            raise PickleTruncatedError(f"no end within {size} bytes")
        opcode = data[position]
        width = prefixed.get(opcode)
        if width is not None:
            body = position + 1 + width
            length = int.from_bytes(data[position + 1 : body], "little")
            position = body + length
            if position > size:
                raise PickleTruncatedError(f"a value at {body} ends at {position}, behind the data of {size} bytes")
            opcodes.append(pushing(opcode, length, data[body : body + 8]))
        elif opcode == _STOP:
            work.feed(opcodes)
            return position + 1
        elif not found:
            opcodes.append(_rare(data, position))
            position += len(opcodes[-1])


def _rare(data: bytes, position: int) -> bytes:
    """Return an opcode that is seldom: a great memo index. Raises for all others."""
    size, opcode = len(data), data[position]
    if opcode == _LONG_BINPUT and position + 5 <= size:
        index = int.from_bytes(data[position + 1 : position + 5], "little")
        if index > size:
            raise PickleForbiddenError(f"memo index {index} in a pickle of {size} bytes")
        return data[position : position + 5]
    if opcode in _MAY_BE_CUT and size - position < 2048:
        raise PickleTruncatedError(f"opcode {opcode:#04x} at {position} is cut off")
    raise PickleForbiddenError(f"opcode {opcode:#04x} at {position} is not of a checkpoint")
