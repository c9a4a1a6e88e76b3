"""Files made to hurt are loaded as inert objects or refused, soon, in little memory; nothing that they name is run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.errors import ErrorKind, ReshardError
from tasks.formats import config_tree
from tasks.formats.metaseq_reader import storages
from tasks.torchfile.archive_reader import read_archive
from tasks.torchfile.file_index import open_torch_file
from tasks.torchfile.hash_work import MAX_KEY_STEPS
from tasks.torchfile.inert import Inert, InertType
from tasks.torchfile.legacy_reader import MAGIC_PICKLE, read_legacy_of
from tasks.torchfile.objects import LoadedOrderedDict, OneByte, StorageRef, TensorRef
from tasks.torchfile.pickler import dump_pickle
from tasks.torchfile.ranged_file import RangedFile
from tasks.torchfile.unpickler import load_pickle
from tests.running import FIXTURES

# The opcodes of protocols 2 to 5 by name, so that the examples can be read.
MARK, STOP, POP, POP_MARK, DUP, NONE, TRUE = b"(", b".", b"0", b"1", b"2", b"N", b"\x88"
REDUCE, BUILD, APPEND, APPENDS, SETITEM, SETITEMS, ADDITEMS = b"R", b"b", b"a", b"e", b"s", b"u", b"\x90"
EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE, EMPTY_SET, FROZENSET = b"]", b"}", b")", b"\x8f", b"\x91"
TUPLE, TUPLE1, TUPLE2, TUPLE3 = b"t", b"\x85", b"\x86", b"\x87"
NEWOBJ, NEWOBJ_EX, STACK_GLOBAL, BINPERSID = b"\x81", b"\x92", b"\x93", b"Q"
PROTO = b"\x80\x04"
ORDERED_DICT = b"ccollections\nOrderedDict\n"
SYSTEM = b"cos\nsystem\n"


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8b" + pack("<I", size) + value.to_bytes(size, "little", signed=True)


def put(number: int) -> bytes:
    return b"r" + pack("<I", number)


def get(number: int) -> bytes:
    return b"j" + pack("<I", number)


def storage(
    key: bytes = text("0"), numel: bytes = b"K\6", kind: bytes = b"ctorch\nFloatStorage\n", tag: bytes = text("storage")
) -> bytes:
    return MARK + tag + kind + key + text("cpu") + numel + TUPLE + BINPERSID


def tensor(offset: bytes = b"K\0", shape: bytes = b"K\2K\3\x86", stride: bytes = b"K\3K\1\x86", **of: bytes) -> bytes:
    arguments = storage(**of) + offset + shape + stride + b"\x89" + ORDERED_DICT + EMPTY_TUPLE + REDUCE
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + MARK + arguments + TUPLE + REDUCE


def pickled(body: bytes) -> bytes:
    return PROTO + body + STOP


def doubled(levels: int, start: bytes = b"K\1") -> bytes:
    """A tuple of the last one twice, again and again: of 2 ** levels parts in a few hundred bytes."""
    return start + b"".join(put(n) + get(n) + TUPLE2 for n in range(levels))


INERT_TYPES = (
    type(None), bool, int, float, str, bytes, bytearray, OneByte, tuple, list, dict, set, frozenset,
    LoadedOrderedDict, TensorRef, StorageRef,
)  # fmt: skip


def walk(root: object) -> Iterator[object]:
    """Give every object below one, each once, without calling anything of it."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values(), getattr(item, "state", None)]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif isinstance(item, Inert):
            stack += [item.function, item.args, item.keywords, item.list_items, item.dict_items]
            stack += [] if item.state is Ellipsis else [item.state]


def attempt(action: Callable[..., Any], *arguments: object) -> tuple[Any, ReshardError | None]:
    """Give what a call returns, and the error where it raises one of ours; any other error fails the test."""
    try:
        return action(*arguments), None
    except ReshardError as caught:
        return None, caught


def assert_told(caught: ReshardError, kind: ErrorKind, reference: str) -> None:
    assert [(problem.kind, problem.reference) for problem in caught.problems] == [(kind, reference)]
    assert len(str(caught)) < 2000
    assert caught.problems[0].hint


def load_inert(data: bytes) -> bool:
    """Load a pickle, look at all of it, use it as the product does and write it; False where it is refused."""
    modules = set(sys.modules)
    root, caught = attempt(load_pickle, data)
    assert set(sys.modules) == modules
    if caught is not None:
        assert_told(caught, ErrorKind.SOURCE, "bad-pickle")
        return False
    for item in walk(root):
        assert isinstance(item, InertType | Inert) or type(item) in INERT_TYPES or item is LoadedOrderedDict
    storages(root)
    for _ in config_tree.leaves(root):
        pass
    written, caught = attempt(dump_pickle, root)
    if caught is not None:
        assert_told(caught, ErrorKind.PLAN, "cannot-pickle")
    else:
        load_pickle(written[0])
    return True


def refused(data: bytes) -> str:
    _, caught = attempt(load_pickle, data)
    assert caught is not None
    assert_told(caught, ErrorKind.SOURCE, "bad-pickle")
    return str(caught)


# Things that are named and never run

NAMED = {
    "a shell command": SYSTEM + text("touch {canary}") + TUPLE1 + REDUCE,
    "a shell command, named on the stack": text("os") + text("system") + STACK_GLOBAL + text("touch {canary}")
    + TUPLE1 + REDUCE,
    "eval": b"cbuiltins\neval\n" + text("open({canary!r}, 'w')") + TUPLE1 + REDUCE,
    "exec of Python 2": b"c__builtin__\nexec\n" + text("open({canary!r}, 'w')") + TUPLE1 + REDUCE,
    "a chain of getattr": b"cbuiltins\ngetattr\n" + b"cos\npath\n" + text("os") + TUPLE2 + REDUCE + put(1) + POP
    + b"cbuiltins\ngetattr\n" + get(1) + text("system") + TUPLE2 + REDUCE + text("touch {canary}") + TUPLE1 + REDUCE,
    "a global below a global": text("os.path") + text("os.system") + STACK_GLOBAL + text("touch {canary}")
    + TUPLE1 + REDUCE,
    "a global of a module that is not loaded": b"cantigravity\nfly\n" + EMPTY_TUPLE + REDUCE,
    "an import": b"cbuiltins\n__import__\n" + text("antigravity") + TUPLE1 + REDUCE,
    "attributes of attributes": b"cbuiltins\ngetattr\n" + put(0) + POP + b"cos\npath\n" + (
        put(1) + POP + get(0) + get(1) + text("path") + TUPLE2 + REDUCE
    ) * 50 + EMPTY_TUPLE + REDUCE,
    "an object of an attribute": b"c__builtin__\ngetattr\n" + b"csubprocess\nPopen\n" + text("a.b") + TUPLE2 + REDUCE
    + text("touch {canary}") + TUPLE1 + NEWOBJ,
    "pathlib": b"cpathlib\nPath.touch\n" + b"cpathlib\nPath\n" + text("{canary}") + TUPLE1 + REDUCE + TUPLE1 + REDUCE,
    "an object made by new": b"csubprocess\nPopen\n" + text("touch {canary}") + TUPLE1 + NEWOBJ,
    "an object made by new with keywords": b"csubprocess\nPopen\n" + EMPTY_TUPLE + EMPTY_DICT + text("args")
    + text("touch {canary}") + SETITEM + NEWOBJ_EX,
    "a state with a method": b"ca\nb\n" + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + text("__setstate__") + SYSTEM + SETITEM
    + BUILD + text("touch {canary}") + BUILD,
    "a state with a class": b"ca\nb\n" + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + text("__class__") + SYSTEM + SETITEM
    + BUILD,
    "an append to a named function": SYSTEM + EMPTY_TUPLE + NEWOBJ + text("touch {canary}") + APPEND,
    "items set on a named function": SYSTEM + EMPTY_TUPLE + NEWOBJ + MARK + NONE + NONE + SETITEMS,
    "a call of what a call gave": SYSTEM + EMPTY_TUPLE + REDUCE + EMPTY_TUPLE + REDUCE + EMPTY_TUPLE + REDUCE,
    "a rebuild function of torch that imports": b"ctorch._utils\n_rebuild_wrapper_subclass\n" + SYSTEM + TUPLE1
    + REDUCE,
    "torch.load": b"ctorch\nload\n" + text("{canary}") + TUPLE1 + REDUCE,
    "a codec": b"c_codecs\nencode\n" + text("x") + text("zlib_codec") + TUPLE2 + REDUCE,
    "an ordered dict of items": ORDERED_DICT + EMPTY_LIST + MARK + EMPTY_LIST + MARK + text("a") + NONE + APPENDS
    + APPENDS + TUPLE1 + REDUCE,
    "lone surrogates": text("\udc80\ud800"),
    "a storage with a path for a key": storage(key=text("../../etc/passwd")),
    "an object inside itself": b"ca\nb\n" + EMPTY_TUPLE + NEWOBJ + put(0) + get(0) + BUILD,
    "a tuple that holds its list": EMPTY_LIST + put(0) + get(0) + TUPLE1 + put(1) + APPEND + get(1) + TUPLE1,
    "a doubled tuple": doubled(200),
    "doubled lists": EMPTY_LIST + b"".join(
        put(n) + POP + EMPTY_LIST + MARK + get(n) + get(n) + APPENDS for n in range(200)
    ),
    "doubled dicts": EMPTY_DICT + b"".join(
        put(n) + POP + EMPTY_DICT + MARK + text("a") + get(n) + text("b") + get(n) + SETITEMS for n in range(200)
    ),
    "keys that are tuples": EMPTY_DICT + b"K\1" + text("a") + TUPLE2 + NONE + SETITEM,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_a_file_names_is_loaded_inert(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "c"
    body = NAMED[name]
    for form in (b"{canary!r}", b"{canary}"):
        while form in body:  # the length stands before the text
            at = body.index(form)
            value = repr(str(canary)) if b"!r" in form else str(canary)
            start = body.rindex(b"X", 0, at)
            length = int.from_bytes(body[start + 1 : start + 5], "little") - len(form) + len(value)
            body = (
                body[: start + 1] + pack("<I", length) + body[start + 5 : at] + value.encode() + body[at + len(form) :]
            )
    assert load_inert(pickled(body)), name
    assert not canary.exists()
    assert "antigravity" not in sys.modules


REFUSED = {
    "an extension": b"\x82\x01",
    "an extension of four bytes": b"\x84\1\0\0\0",
    "a global by INST": MARK + b"ios\nsystem\n",
    "a global by OBJ": MARK + SYSTEM + b"o",
    "a buffer from outside": b"\x97",
    "a buffer made read-only": NONE + b"\x98",
    "a persistent id as text": b"P0\n",
    "a persistent id that is a dict": EMPTY_DICT + BINPERSID,
    "a persistent id that is text": text("storage") + BINPERSID,
    "a persistent id of unknown parts": NONE + NONE + TUPLE2 + BINPERSID,
    "a persistent id of doubled tuples": doubled(80) + BINPERSID,
    "a storage type that is a doubled tuple": storage(kind=doubled(80)),
    "a storage key that is a doubled tuple": storage(key=doubled(80)),
    "a view of a storage named by a doubled tuple": MARK + text("storage") + b"ctorch\nFloatStorage\n" + doubled(80)
    + text("cpu") + b"K\1" + NONE + TUPLE + BINPERSID + b"0" + MARK + text("storage") + b"ctorch\nFloatStorage\n"
    + doubled(80) + text("cpu") + b"K\1" + b"K\1" + TUPLE + BINPERSID,
    "a storage of negative length": storage(numel=b"J\xff\xff\xff\xff"),
    "a storage of impossible length": storage(numel=integer(1 << 80)),
    "a storage of a length of 100 kB": storage(numel=integer(1 << 800_000)),
    "a storage length that is a boolean": storage(numel=TRUE),
    "one storage of two lengths": storage() + storage(numel=b"K\7") + TUPLE2,
    "one storage of two types": storage() + storage(kind=b"ctorch\nIntStorage\n") + TUPLE2,
    "a tensor of negative size": tensor(shape=b"J\xff\xff\xff\xffK\3\x86"),
    "a tensor of negative stride": tensor(stride=b"J\xff\xff\xff\xffK\1\x86"),
    "a tensor at a negative offset": tensor(offset=b"J\xff\xff\xff\xff"),
    "a tensor of impossible size": tensor(shape=integer(1 << 70) + b"K\3\x86"),
    "a tensor of huge numbers": tensor(shape=integer(1 << 800_000) + put(9) + get(9) + TUPLE2),
    "a tensor of impossible stride": tensor(stride=integer(1 << 70) + b"K\1\x86"),
    "a tensor at an impossible offset": tensor(offset=integer(1 << 70)),
    "a tensor larger than its storage": tensor(shape=integer(1 << 62) + b"K\3\x86"),
    "a tensor of a thousand dimensions": tensor(
        shape=MARK + b"K\1" * 1000 + TUPLE, stride=MARK + b"K\1" * 1000 + TUPLE
    ),
    "a tensor whose size is a list in itself": tensor(shape=EMPTY_LIST + put(9) + get(9) + APPEND),
    "a state set on a dict": EMPTY_DICT + EMPTY_DICT + BUILD,
    "a state set on a list": EMPTY_LIST + EMPTY_DICT + text("append") + NONE + SETITEM + BUILD,
    "a state set on text": text("a") + EMPTY_DICT + BUILD,
    "a state set on a global": SYSTEM + EMPTY_DICT + text("builder") + NONE + SETITEM + BUILD,
    "a state set on the class of ordered dicts": ORDERED_DICT + EMPTY_DICT + text("keys") + NONE + SETITEM + BUILD,
    "a state set on a storage": storage() + EMPTY_DICT + text("key") + text("1") + SETITEM + BUILD,
    "a state set on a tensor": tensor() + EMPTY_DICT + text("shape") + NONE + SETITEM + BUILD,
    "a slot state set on a tensor": tensor() + NONE + EMPTY_DICT + text("shape") + NONE + SETITEM + TUPLE2 + BUILD,
    "an append to text": text("a") + NONE + APPEND,
    "items set on a list": EMPTY_LIST + NONE + NONE + SETITEM,
    "a call of a list": EMPTY_LIST + EMPTY_TUPLE + REDUCE,
    "a call of text": text("os.system") + EMPTY_TUPLE + REDUCE,
    "a call with a list": SYSTEM + EMPTY_LIST + REDUCE,
    "new of an object": SYSTEM + EMPTY_TUPLE + REDUCE + EMPTY_TUPLE + NEWOBJ,
    "new with keywords that are numbers": SYSTEM + EMPTY_TUPLE + EMPTY_DICT + b"K\1" + NONE + SETITEM + NEWOBJ_EX,
    "new with a keyword of the class": SYSTEM + EMPTY_TUPLE + EMPTY_DICT + text("cls") + NONE + SETITEM + NEWOBJ_EX,
    "an ordered dict of another object": ORDERED_DICT + SYSTEM + EMPTY_TUPLE + REDUCE + TUPLE1 + REDUCE,
    "an ordered dict of pairs with doubled keys": ORDERED_DICT + EMPTY_LIST + doubled(80) + NONE + TUPLE2 + APPEND
    + TUPLE1 + REDUCE,
    "a global whose name has a line break": text("a") + text("b\ncos\nsystem\n") + STACK_GLOBAL,
    "a global whose module has a line break": text("os\nsystem\n") + text("b") + STACK_GLOBAL,
    "a global whose name cannot be written": text("a") + text("\ud800") + STACK_GLOBAL,
    "a global whose name is too long": text("a") + text("b." * 2000) + STACK_GLOBAL,
    "a global whose name is a number": text("a") + b"K\1" + STACK_GLOBAL,
    "a global without end": b"c" + b"a" * 5000,
    "a key that is a list": EMPTY_DICT + EMPTY_LIST + NONE + SETITEM,
    "a key that is a doubled tuple": EMPTY_DICT + doubled(80) + NONE + SETITEM,
    "keys that are doubled tuples": EMPTY_DICT + MARK + doubled(80) + NONE + SETITEMS,
    "a member of a set that is a doubled tuple": EMPTY_SET + MARK + doubled(80) + ADDITEMS,
    "a member of a frozen set that is a doubled tuple": MARK + doubled(80) + FROZENSET,
    "a doubled tuple by DUP": EMPTY_DICT + b"K\1" + (DUP + TUPLE2) * 80 + NONE + SETITEM,
    "a doubled tuple put on its mark": EMPTY_DICT + b"K\1" + b"".join(
        put(n) + POP + MARK + get(n) + get(n) + TUPLE for n in range(80)
    ) + NONE + SETITEM,
    "a doubled tuple memoized": EMPTY_DICT + b"K\1" + b"".join(b"\x94" + get(n) + TUPLE2 for n in range(80)) + NONE
    + SETITEM,
    "a doubled tuple taken out of a persistent id": EMPTY_DICT + text("module") + doubled(80) + NONE + NONE + MARK
    + POP_MARK + b"0000" + MARK + text("module") + doubled(80) + NONE + NONE + TUPLE + BINPERSID + NONE + SETITEM,
    "frozen sets in frozen sets": EMPTY_DICT + b"K\1" + b"".join(
        put(n) + POP + MARK + MARK + get(n) + b"K\1" + TUPLE + MARK + get(n) + b"K\2" + TUPLE + FROZENSET
        for n in range(80)
    ) + NONE + SETITEM,
    "a key that is a number of 1 MB": EMPTY_DICT + integer(1 << 8_000_000) + NONE + SETITEM,
    "a memo that is empty": get(5),
    "a stack that is empty": POP,
    "a mark that is missing": NONE + TUPLE,
    "a tuple across a mark": NONE + MARK + TUPLE1,
    "a memo index beyond the pickle": NONE + b"r\xff\xff\xff\x7f",
    "a text longer than the file": b"\x8d" + b"\xff" * 8,
    "a frame longer than the file": b"\x95" + b"\xff" * 8,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_hurt_is_refused_at_once(name: str) -> None:
    start = time.perf_counter()
    refused(pickled(REFUSED[name]))
    assert time.perf_counter() - start < 2


# Whole files that exhaust a process that lets them: each in a process of its own

DEEP = 400_000
MODULUS = 2**61 - 1
DEEP_KEY = EMPTY_DICT + b"K\1" + TUPLE1 * DEEP + NONE + SETITEM
MANY = 150_000

EXHAUSTING = {
    "a key of deep tuples": DEEP_KEY,
    "a member of deep tuples": EMPTY_SET + MARK + b"K\1" + TUPLE1 * DEEP + ADDITEMS,
    "a frozen set of deep tuples": MARK + b"K\1" + TUPLE1 * DEEP + FROZENSET,
    "a key of deep tuples, by the memo": EMPTY_DICT + b"K\1" + (b"q\0" + POP + b"h\0" + TUPLE1) * DEEP + NONE + SETITEM,
    "a deep tuple": b"K\1" + TUPLE1 * DEEP,
    "deep lists": EMPTY_LIST * DEEP + APPEND * (DEEP - 1),
    "deep dicts": (EMPTY_DICT + b"K\1") * DEEP + NONE + SETITEM * DEEP,
    "deep ordered dicts": (ORDERED_DICT + EMPTY_TUPLE + REDUCE + b"K\1") * DEEP + NONE + SETITEM * DEEP,
    "deep states": (b"ca\nb\n" + EMPTY_TUPLE + NEWOBJ) * DEEP + NONE + BUILD * DEEP,
    "deep states of ordered dicts": (ORDERED_DICT + EMPTY_TUPLE + REDUCE) * DEEP + NONE + BUILD * DEEP,
    "deep arguments": b"ca\nb\n" * DEEP + NONE + (TUPLE1 + REDUCE) * DEEP,
    "deep functions": b"ca\nb\n" + (EMPTY_TUPLE + REDUCE) * DEEP,
    "deep frozen sets": MARK * DEEP + b"K\1" + FROZENSET * DEEP,
    "deep marks": MARK * 2_000_000 + b"K\1" + TUPLE * 2_000_000,
    "keys of one hash": EMPTY_DICT + MARK + b"".join(integer(n * MODULUS) + NONE for n in range(1, MANY)) + SETITEMS,
    "members of one hash": EMPTY_SET + MARK + b"".join(integer(n * MODULUS) for n in range(1, MANY)) + ADDITEMS,
    "a frozen set of one hash": MARK + b"".join(integer(n * MODULUS) for n in range(1, MANY)) + FROZENSET,
    "an ordered dict of one hash": ORDERED_DICT + EMPTY_TUPLE + REDUCE + MARK
    + b"".join(integer(n * MODULUS) + NONE for n in range(1, MANY)) + SETITEMS,
    "pairs of one hash": ORDERED_DICT + EMPTY_LIST + MARK
    + b"".join(integer(n * MODULUS) + NONE + TUPLE2 for n in range(1, MANY)) + APPENDS + TUPLE1 + REDUCE,
    "one long key again and again": integer(1 << 8_000_000) + put(0) + POP + EMPTY_DICT + MARK
    + (get(0) + NONE) * 300_000 + SETITEMS,
    "a shorter key again and again": integer(1 << 2_000_000) + put(0) + POP + EMPTY_DICT + MARK
    + (get(0) + NONE) * 300_000 + SETITEMS,
    "one wide key again and again": MARK + NONE * 1_000_000 + TUPLE + put(0) + POP + EMPTY_DICT + MARK
    + (get(0) + NONE) * 300_000 + SETITEMS,
    "a tensor of long numbers": tensor(
        shape=MARK + integer(3 << 16_000_000) + put(9) + get(9) * 30 + TUPLE, stride=MARK + NONE * 32 + TUPLE
    ),
    "a million globals": b"".join(b"ca\n%d\n" % n for n in range(1_000_000)) + NONE,
    "a million attributes": b"ca\nb\n" + put(0) + POP + b"cbuiltins\ngetattr\n" + put(1) + POP
    + b"".join(get(1) + get(0) + text(f"{n}") + TUPLE2 + REDUCE + POP for n in range(1_000_000)) + NONE,
    "attributes of growing names": text("x" * 1_000_000) + put(0) + POP + b"cbuiltins\ngetattr\n" + put(1) + POP
    + b"ca\nb\n" + put(2) + (POP + get(1) + get(2) + get(0) + TUPLE2 + REDUCE + put(2)) * 9_000,
    "twenty million lists": EMPTY_LIST * 20_000_000,
    "a memo that counts to its end": NONE + b"r\0\0\x50\0" + b"0" * 5_300_000,
    "a doubled persistent id": doubled(100) + BINPERSID,
}  # fmt: skip
LOADED = {"a deep tuple", "deep marks", "deep lists", "deep dicts", "deep ordered dicts", "deep states",
    "deep states of ordered dicts", "deep arguments", "deep functions"}  # fmt: skip

_CHILD = """
import resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from tasks.errors import ReshardError
from tasks.formats.metaseq_reader import storages
from tasks.formats import config_tree
from tasks.torchfile.pickler import dump_pickle
from tasks.torchfile.unpickler import load_pickle
try:
    root = load_pickle(Path(sys.argv[1]).read_bytes())
except ReshardError as caught:
    assert caught.problems[0].reference == "bad-pickle" and len(str(caught)) < 2000
    print("refused")
    sys.exit()
storages(root)
list(config_tree.leaves(root))
try:
    dump_pickle(root)
except ReshardError as caught:
    assert caught.problems[0].reference == "cannot-pickle" and len(str(caught)) < 2000
del root
print("loaded")
"""


@pytest.mark.parametrize("name", EXHAUSTING)
def test_what_could_exhaust_a_process_does_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(pickled(EXHAUSTING[name]))
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ("loaded" if name in LOADED else "refused")


def test_the_deepest_key_that_passes_is_hashed_in_a_small_stack() -> None:
    data = pickled(EMPTY_DICT + b"K\1" + TUPLE1 * (MAX_KEY_STEPS // 2) + NONE + SETITEM)
    found: list[object] = []
    before = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(load_pickle(data)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert isinstance(found[0], dict)


@pytest.mark.parametrize(
    "body",
    [
        b"".join(text(f"{n}") + text("b") + TUPLE2 + b"K\1" for n in range(60_000)),
        b"".join(integer(MODULUS // 2 - n) + b"K\1" for n in range(60_000)),
        b"".join(b"J" + pack("<i", 256 * n) + b"K\1" for n in range(60_000)),
        b"".join(b"K\1J" + pack("<i", n) + TUPLE2 + b"K\1" for n in range(10_000)),
        b"".join(integer(MODULUS + 2 + n) + b"K\1" for n in range(20_000)),
    ],
    ids=["pairs of text", "numbers of 60 bits", "small numbers", "pairs of numbers", "numbers of 62 bits"],
)
def test_large_dicts_of_honest_keys_are_loaded(body: bytes) -> None:
    start = time.perf_counter()
    assert isinstance(load_pickle(pickled(EMPTY_DICT + MARK + body + SETITEMS)), dict)
    assert time.perf_counter() - start < 5


# Fuzzing


def data_pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


FILES = sorted(
    min(path for path in folder.glob("*.pt") if "-model_part-0" in path.name)
    for folder in FIXTURES.iterdir()
    if folder.is_dir() and not folder.name.startswith("bad")
)
ARCHIVES = [path for path in FILES if zipfile.is_zipfile(path)][:12]
REAL = [data_pickle(path) for path in ARCHIVES]
GADGETS = sorted(
    {*(part for body in (*NAMED.values(), *REFUSED.values()) if len(body) < 3000 for part in (body, body[:7]))}
)
SINGLE = [bytes([code]) for code in b"(012N})]aesutRbQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"]
OPCODES = [*SINGLE, b"K\1", b"h\0", b"h\1", b"q\0", b"q\1", text("a"), text("os"), text("system"), text("storage"),
    b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_parameter\n",
    b"c_codecs\nencode\n", b"c__builtin__\nbytes\n",
    b"c__builtin__\ngetattr\n", ORDERED_DICT, SYSTEM, b"ca\nb.c\n", b"G" + bytes(8),
    integer(1 << 90),
    storage(), tensor()]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, sources: list[bytes]) -> bytes:
    """A real file's bytes with some replaced, taken out, doubled, or gadgets put in."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        until = at + draw(st.sampled_from([0, 1, 1, 2, 5, 40]))
        new = draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from(OPCODES + GADGETS),
                st.builds(
                    lambda start, size: bytes(data[start : start + size]), st.integers(0, len(data)), st.just(30)
                ),
            )
        )
        data[at:until] = new
    return bytes(data)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files named by the gadgets' commands would come to be in an empty folder, modules in sys.modules."""
    here = Path.cwd()
    empty = tmp_path_factory.mktemp("empty")
    os.chdir(empty)
    yield
    os.chdir(here)
    assert list(empty.iterdir()) == []
    assert "antigravity" not in sys.modules


@settings(max_examples=1500, deadline=5000)
@given(mutated(REAL))
def test_mutated_pickles_are_loaded_inert_or_refused(data: bytes) -> None:
    load_inert(data)


@settings(max_examples=1500, deadline=5000)
@given(st.lists(st.sampled_from(OPCODES), max_size=60).map(b"".join))
@example(tensor() + BINPERSID)
@example(SYSTEM + EMPTY_TUPLE + NEWOBJ + b"q\0h\0h\0" + TUPLE2 + BUILD)
def test_any_opcodes_are_loaded_inert_or_refused(body: bytes) -> None:
    load_inert(pickled(body))


def open_bytes(data: bytes) -> Any:
    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length]

    return read_archive(read, len(data), "a.pt", tail_bytes=256), open_torch_file(read, len(data), "a.pt")


def small(data: bytes) -> bytes:
    """The archive without most of its tensors' bytes: mutations then meet what is read."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            if name.endswith("data.pkl"):
                target.writestr(name, pickled(EMPTY_DICT + text("w") + tensor() + SETITEM))
            elif name.endswith(("data/0", "version", "byteorder")):
                target.writestr(name, bytes(24) if name.endswith("/0") else source.read(name))
    return out.getvalue()


ZIPS = [small(ARCHIVES[0].read_bytes()), ARCHIVES[0].read_bytes()]


@settings(max_examples=1500, deadline=5000)
@given(st.sampled_from(ZIPS), st.data())
def test_mutated_archives_have_the_same_content_or_are_refused(data: bytes, draw: st.DataObject) -> None:
    """Where the bytes of one tensor change, nothing here reads them: the CRC tells whoever does."""
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = len(data) - 1 - draw.draw(st.one_of(st.integers(0, 700), st.integers(0, len(data) - 1))) % len(data)
        new = draw.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 4, b"\xff" * 8, bytes(8)]))
        )
        changed[at : at + len(new)] = new
    opened, caught = attempt(open_bytes, bytes(changed))
    if caught is not None:
        assert {problem.kind for problem in caught.problems} == {ErrorKind.SOURCE}
        return
    archive, found = opened
    original, expected = open_bytes(data)
    assert len(changed) >= len(data)
    if archive.pickle_data != original.pickle_data:
        assert archive.records["data.pkl"].crc32 == 0  # "left out by its writer", as some do
        return
    assert dump_pickle(found.root)[0] == dump_pickle(expected.root)[0]
    for one, other in zip(found.storages, expected.storages, strict=True):
        assert (one.storage_type, one.key, one.num_elements) == (other.storage_type, other.key, other.num_elements)
        assert found.locations[one].size == expected.locations[other].size


@settings(max_examples=300, deadline=5000)
@given(mutated([next(path for path in FILES if not zipfile.is_zipfile(path)).read_bytes()]))
def test_mutated_legacy_files_are_opened_or_refused(data: bytes) -> None:
    _, caught = attempt(open_torch_file, lambda offset, length: data[offset : offset + length], len(data), "a.pt")
    assert caught is None or {problem.kind for problem in caught.problems} == {ErrorKind.SOURCE}


def test_many_records_packed_by_another_tool_are_found_in_linear_time() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("a/data.pkl", pickled(EMPTY_DICT))
        for number in range(20_000):
            target.writestr(f"a/data/{number}", b"")
    data = out.getvalue()
    start = time.perf_counter()
    archive = read_archive(lambda offset, length: data[offset : offset + length], len(data), "a.pt")
    assert len(archive.records) == 20_001
    assert time.perf_counter() - start < 3


def sparse(size_bytes: int, pieces: dict[int, bytes]) -> Callable[[int, int], bytes]:
    """A file of zeros but for some pieces; asked for more than 64 MiB at once it fails."""

    def read(offset: int, length: int) -> bytes:
        assert length < 1 << 26
        assert offset + length <= size_bytes
        data = bytearray(length)
        for start, piece in pieces.items():
            for at, byte in enumerate(piece, start - offset):
                if 0 <= at < length:
                    data[at] = byte
        return bytes(data)

    return read


def end_of_archive(count: int, size: int, offset: int) -> bytes:
    return pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, offset, 0)


def test_a_table_of_records_of_a_gigabyte_is_not_read() -> None:
    size = 2 << 30
    read = sparse(size, {0: b"PK\3\4", size - 22: end_of_archive(9, 1 << 30, 0)})
    _, caught = attempt(open_torch_file, read, size, "a.pt")
    assert caught is not None
    assert_told(caught, ErrorKind.SOURCE, "bad-archive")


def test_a_pickle_of_gigabytes_is_not_read() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("a/data.pkl", b"")
    data, huge = bytearray(out.getvalue()), 3 << 30
    directory = data.index(b"PK\1\2")
    data[directory + 20 : directory + 28] = pack("<2L", huge, huge)
    data[-6:-2] = pack("<L", directory + huge)
    read = sparse(len(data) + huge, {0: bytes(data[:directory]), directory + huge: bytes(data[directory:])})
    _, caught = attempt(open_torch_file, read, len(data) + huge, "a.pt")
    assert caught is not None
    assert_told(caught, ErrorKind.SOURCE, "bad-pickle")
    assert "bytes or more" in str(caught)


@pytest.mark.parametrize("position", [2, 3, 4])
def test_older_files_are_refused_for_the_same(position: int) -> None:
    parts = [MAGIC_PICKLE, b"\x80\x02M\xe9\x03.", b"\x80\x02}.", b"\x80\x02}.", b"\x80\x02]."]
    opened, _ = attempt(open_torch_file, lambda at, size: b"".join(parts)[at : at + size], len(b"".join(parts)), "a.pt")
    assert opened.root == {}
    parts[position] = pickled(EMPTY_DICT + doubled(80) + NONE + SETITEM)
    data = b"".join(parts)
    _, caught = attempt(open_torch_file, lambda at, size: data[at : at + size], len(data), "a.pt")
    assert caught is not None
    assert_told(caught, ErrorKind.SOURCE, "bad-pickle")


def test_the_head_of_an_older_file_is_not_read_for_ever() -> None:
    size = 3 << 30
    start = MAGIC_PICKLE + b"\x80\x02M\xe9\x03." + b"\x80\x02}." + b"\x80\x02\x8d" + pack("<Q", 2 << 30)
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return (start + bytes(length))[:length] if offset == 0 else bytes(length)

    file = RangedFile(read, size, "a.pt")
    _, caught = attempt(lambda: read_legacy_of(file, max_pickle_bytes=1 << 22))
    assert caught is not None
    assert_told(caught, ErrorKind.SOURCE, "bad-pickle")
    assert sum(asked) < 1 << 24
