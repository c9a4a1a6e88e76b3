"""Nothing of a file is run, and whatever is wrong with it is one error."""

from __future__ import annotations

import os
import pickle
import pickletools
import time
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.errors import ErrorKind, ReshardError
from tasks.torchfile.inert import Inert, InertType
from tasks.torchfile.objects import StorageRef, TensorRef, global_name, is_instance_of
from tasks.torchfile.opcode_scan import PickleForbiddenError, PickleTruncatedError, scan_pickle
from tasks.torchfile.pickler import dump_pickle
from tasks.torchfile.unpickler import load_pickle, load_with_storages

STORAGE = StorageRef("FloatStorage", "0", "cpu", 6)
GOOD, _ = dump_pickle({"w": TensorRef(STORAGE, 0, (2, 3), (3, 1)), "name": "x" * 300, "n": 2**70, "b": b"ab"})


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/must-not-exist-torchfile",)


def refused(data: bytes) -> str:
    with pytest.raises(ReshardError) as caught:
        load_pickle(data)
    assert [(problem.kind, problem.reference) for problem in caught.value.problems] == [
        (ErrorKind.SOURCE, "bad-pickle")
    ]
    return str(caught.value)


def load_or_be_refused(data: bytes) -> None:
    references = ["bad-pickle"]
    try:
        load_pickle(data)
    except ReshardError as caught:
        references = [problem.reference for problem in caught.problems]
    assert references == ["bad-pickle"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_named_function_is_never_called(protocol: int) -> None:
    made = load_pickle(pickle.dumps(Evil(), protocol=protocol))
    assert is_instance_of(made, "posix.mkdir")
    assert isinstance(made, Inert)
    assert made.args == ("/tmp/must-not-exist-torchfile",)
    assert not Path("/tmp/must-not-exist-torchfile").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_builtin_values_are_built_in_every_protocol(protocol: int) -> None:
    tree = [1, 2.5, "x", b"", b"ab\xff", None, True, {"k": (1, 2)}, OrderedDict(a=1), 2**80]
    assert load_pickle(pickle.dumps(tree, protocol=protocol)) == tree


def test_a_tensor_and_its_storage_are_described() -> None:
    loaded = load_with_storages(GOOD)
    tensor = loaded.root["w"]  # type: ignore[index]
    assert isinstance(tensor, TensorRef)
    assert (tensor.shape, tensor.stride, tensor.offset, tensor.dtype) == ((2, 3), (3, 1), 0, "float32")
    assert loaded.storages == (tensor.storage,)


def test_every_truncation_is_refused() -> None:
    for length in range(len(GOOD)):
        refused(GOOD[:length])


def test_truncations_may_grow_to_a_whole_pickle() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(PickleTruncatedError):
            scan_pickle(GOOD[:length])
    assert scan_pickle(GOOD + b"more") == len(GOOD)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=6))
def test_damaged_bytes_load_or_are_refused_and_nothing_else(position: int, garbage: bytes) -> None:
    data = GOOD[:position] + garbage + GOOD[position + len(garbage) :]
    load_or_be_refused(data)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([bytes([code]) for code in range(256)] + [b"K\1", b"X\1\0\0\0a", b"ca\nb\n"])).map(
        b"".join
    )
)
@example(b"K\1K\2b")
@example(b"ca\nb\nNb")
@example(b"}}s")
def test_any_opcodes_load_or_are_refused_and_nothing_else(opcodes: bytes) -> None:
    load_or_be_refused(b"\x80\x02" + opcodes + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x02Np99999999999\n.",
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.",
        b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
    ],
)
def test_giant_numbers_are_refused_at_once(data: bytes) -> None:
    start = time.perf_counter()
    refused(data)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("opcode", [b"i", b"o", b"P1\n", b"p1\n", b"I1\n", b"L1L\n", b"\x82\x01", b"\x97", b"\x98"])
def test_opcodes_of_no_checkpoint_are_refused(opcode: bytes) -> None:
    with pytest.raises(PickleForbiddenError):
        scan_pickle(b"\x80\x02" + opcode + b"." + b" " * 4096)


def tensor_pickle(
    tensor_arguments: bytes, numel: bytes = b"K\x06", storage: bytes = b"ctorch\nFloatStorage\n"
) -> bytes:
    pid = b"(X\x07\0\0\0storage" + storage + b"X\1\0\0\x000X\3\0\0\0cpu" + numel + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + pid + tensor_arguments + hooks + b"tR"


def test_the_hand_made_tensor_is_a_good_one() -> None:
    tensor = load_pickle(tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89") + b".")
    assert isinstance(tensor, TensorRef)


@pytest.mark.parametrize(
    "data",
    [
        tensor_pickle(b"K\1K\2K\3\x86K\3K\1\x86\x89"),
        tensor_pickle(b"K\0K\2K\4\x86K\4K\1\x86\x89"),
        tensor_pickle(b"K\0K\2K\3\x86K\3\x85\x89"),
        tensor_pickle(b"K\0K\2J\xff\xff\xff\xff\x86K\3K\1\x86\x89"),
        tensor_pickle(b"K\0X\1\0\0\0aK\3\x86K\3K\1\x86\x89"),
        tensor_pickle(b"NK\2K\3\x86K\3K\1\x86\x89"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86N"),
        tensor_pickle(b"K\0\x88K\3\x86K\3K\1\x86\x89"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89", numel=b"J\xff\xff\xff\xff"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89", numel=b"N"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89", storage=b"cos\nFloatStorage\n"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89", storage=b"ctorch\nEvilStorage\n"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89", storage=b"N"),
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89") + b"}X\5\0\0\0shapeNsb",
        tensor_pickle(b"K\0K\2K\3\x86K\3K\1\x86\x89") + b"N}X\5\0\0\0shapeNs\x86b",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN\x85R",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\0))\x89NtR",
        b"\x80\x02ctorch._utils\n_rebuild_parameter\nN\x85R",
        b"\x80\x02]}X\1\0\0\0aNsb",
        b"\x80\x02ca\nb\n}X\7\0\0\0builderNsb",
        b"\x80\x02ca\nb\nN}X\7\0\0\0builderNs\x86b",
        b"\x80\x02N\x85Q",
        b"\x80\x02NQ",
        b"\x80\x02}]Ns",
    ],
)
def test_wrong_types_are_refused(data: bytes) -> None:
    refused(data + b".")


def test_one_storage_declared_in_two_ways_is_refused() -> None:
    one = tensor_pickle(b"K\0))\x89", numel=b"K\6")[2:]
    two = tensor_pickle(b"K\0))\x89", numel=b"K\7")[2:]
    assert "declared as FloatStorage" in refused(b"\x80\x02" + one + two + b"\x86.")


def test_a_state_set_on_an_ordered_dict_reaches_no_method_of_it() -> None:
    made = load_pickle(b"\x80\x02ccollections\nOrderedDict\n)R}X\5\0\0\0itemsK\1sb.")
    assert isinstance(made, OrderedDict)
    assert list(made.items()) == []


def test_a_global_alone_is_its_stand_in_and_one_per_name() -> None:
    made = load_pickle(b"\x80\x02ca\nb.c\nca\nb.c\n\x86.")
    assert isinstance(made, tuple)
    assert made[0] is made[1]
    assert isinstance(made[0], InertType)
    assert global_name(made[0]) == "a.b.c"


def test_a_deep_nest_is_loaded_or_refused() -> None:
    data = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    made = load_pickle(data)
    assert isinstance(made, list)


def test_the_scan_sees_the_end_where_pickletools_does() -> None:
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps({"a": [1, 2.0, "x" * 300, b"y" * 300, 2**3000], "b": ({1}, frozenset("q"))}, protocol)
        *_, (_, _, last) = pickletools.genops(data)
        assert scan_pickle(data + b"tail") == last + 1  # type: ignore[operator]
