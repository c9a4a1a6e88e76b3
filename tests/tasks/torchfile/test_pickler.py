"""The pickler's bytes are those of torch.save, for loaded files and for objects made here."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import ReshardError
from tasks.torchfile.dtypes import UNTYPED_DTYPES, storage_type_of
from tasks.torchfile.objects import StorageRef, TensorRef, inert_global
from tasks.torchfile.pickler import dump_pickle
from tasks.torchfile.unpickler import load_pickle, load_with_storages

DATA = Path(__file__).parents[2] / "data" / "torchfile"


def torch_pickle(obj: object) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def assert_same_after_a_round_trip(obj: object) -> None:
    written = torch_pickle(obj)
    loaded = load_with_storages(written)
    again, storages = dump_pickle(loaded.root)
    assert again == written
    assert storages == loaded.storages


def as_refs(obj: Any, seen: dict[int, Any]) -> Any:
    """The same tree with a TensorRef for each tensor; all other objects are the very same ones."""
    if id(obj) in seen:
        return seen[id(obj)]
    if isinstance(obj, torch.Tensor):
        base = obj.untyped_storage()
        dtype = str(obj.dtype).removeprefix("torch.")
        untyped = dtype in UNTYPED_DTYPES
        size = base.nbytes() if untyped else base.nbytes() // obj.element_size()
        if base._cdata not in seen:
            seen[base._cdata] = StorageRef(storage_type_of(dtype), "made here", "cpu", size)
        made: Any = TensorRef(
            seen[base._cdata],
            obj.storage_offset(),
            tuple(obj.shape),
            obj.stride(),
            obj.requires_grad,
            isinstance(obj, torch.nn.Parameter),
            dtype if untyped else "",
        )
    elif type(obj) is dict:
        made = {key: as_refs(value, seen) for key, value in obj.items()}
    elif type(obj) is list:
        made = [as_refs(item, seen) for item in obj]
    elif type(obj) is tuple and obj:
        made = tuple(as_refs(item, seen) for item in obj)
    else:
        return obj
    seen[id(obj)] = made
    return made


dtypes = st.sampled_from(
    [
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn,
    ]
)  # fmt: skip
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
plain_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, -1, 2**63]),
    st.sampled_from([-128, 2**2039 - 1, 2**2039, -(2**2039), 256**255, -(2**2100)]),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from(["", "a", "latin1", "cpu", "storage", "torch", "\ud800", "é", "0", "12"]),
    st.binary(max_size=6),
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    made = torch.zeros(draw(shapes), dtype=draw(dtypes))
    kind = draw(st.sampled_from(["plain", "plain", "parameter", "grad", "view", "transposed"]))
    if kind == "parameter":
        return torch.nn.Parameter(made, requires_grad=made.is_floating_point() and draw(st.booleans()))
    if kind == "grad" and made.dtype == torch.float32:
        return made.requires_grad_()
    if kind == "view" and made.dim():
        return (made, made[1:], made.reshape(-1))
    return made.t() if kind == "transposed" and made.dim() == 2 else made


def namespaces(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(["lr", "seed", "arch", "cpu"]), values).map(
        lambda fields: argparse.Namespace(**fields)
    )


def with_shared(tree: Any) -> Any:
    return {"first": tree, "again": tree, "inside": [tree, (tree, tree)]}


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=5), st.integers(0, 300))
    return st.one_of(
        st.lists(values, max_size=5),
        st.lists(values, max_size=5).map(tuple),
        st.dictionaries(keys, values, max_size=5),
        values.map(with_shared),
    )


def other_containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        containers(values),
        st.dictionaries(st.text(max_size=3), values, max_size=3).map(OrderedDict),
        namespaces(values),
        st.sets(st.one_of(st.text(max_size=3), st.integers()), max_size=5),
        st.sampled_from(
            [torch.Size([2, 3]), torch.float16, torch.device("cpu"), slice(1, 2), range(3), 1j, OrderedDict]
        ),
        st.binary(max_size=3).map(bytearray),
        st.frozensets(st.integers(), max_size=3),
    )


@pytest.mark.parametrize("name", ["mp2dp2-fp16.pt", "cfg-dictconfig.pt"])
def test_a_file_of_the_real_trainer_is_written_back_as_it_was(name: str) -> None:
    with zipfile.ZipFile(DATA / name) as archive:
        written = archive.read(next(entry for entry in archive.namelist() if entry.endswith("/data.pkl")))
    loaded = load_with_storages(written)
    assert dump_pickle(loaded.root) == (written, loaded.storages)


@settings(deadline=None, max_examples=300)
@given(st.recursive(st.one_of(plain_leaves, tensors()), other_containers, max_leaves=25))
def test_any_tree_that_torch_saves_is_written_back_as_it_was(tree: object) -> None:
    assert_same_after_a_round_trip(tree)


@settings(deadline=None, max_examples=300)
@given(st.recursive(st.one_of(plain_leaves, tensors()), containers, max_leaves=25))
def test_a_tree_made_here_is_written_as_torch_writes_it(tree: object) -> None:
    refs = as_refs(tree, {})
    assert dump_pickle(refs)[0] == torch_pickle(tree)


@settings(deadline=None, max_examples=100)
@given(st.recursive(plain_leaves, other_containers, max_leaves=10).filter(lambda tree: "Namespace" not in repr(tree)))
def test_what_was_written_loads_to_what_it_was(tree: object) -> None:
    again = dump_pickle(load_pickle(dump_pickle(plain(tree))[0]))[0]
    assert again == dump_pickle(plain(tree))[0]


def plain(tree: Any) -> Any:
    """Leave out what only torch's own pickler writes."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(plain(item) for item in tree)
    return tree if type(tree) in (int, str, bytes, float, bool, set, frozenset, bytearray) else None


@pytest.mark.parametrize("length", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001, 2002, 3000])
def test_batches_are_those_of_the_c_pickler(length: int) -> None:
    numbers = list(range(length))
    tree = [numbers, dict.fromkeys(numbers), OrderedDict.fromkeys(numbers), set(numbers), tuple(numbers)]
    assert dump_pickle(tree)[0] == torch_pickle(tree)
    assert_same_after_a_round_trip(tree)


def test_more_than_256_memo_entries_are_numbered_in_four_bytes() -> None:
    tree = {f"decoder.layers.{index}.weight": torch.zeros(index % 3) for index in range(400)}
    tree["decoder.layers.3.again"] = tree["decoder.layers.3.weight"]
    assert dump_pickle(as_refs(tree, {}))[0] == torch_pickle(tree)
    assert_same_after_a_round_trip(tree)


def test_a_state_dict_with_its_metadata_attribute_is_kept() -> None:
    module = torch.nn.Linear(2, 3)
    assert_same_after_a_round_trip({"model": module.state_dict(), "module": module})


def test_objects_inside_themselves_are_written_back_as_they_were() -> None:
    inside: list[object] = []
    inside.append((inside, {"self": inside}))
    namespace = argparse.Namespace(items=[])
    namespace.me = namespace
    namespace.items.append((namespace,))
    assert_same_after_a_round_trip([inside, namespace, {1, 2}, (namespace, namespace)])


def test_untyped_storages_views_and_parameter_attributes_are_written_back() -> None:
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(base[:4])
    parameter._is_sharded = True
    untyped = torch.zeros(3, dtype=torch.uint16).untyped_storage()
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    assert_same_after_a_round_trip([base.view(3, 4).t(), parameter, untyped, base.expand(2, 12), conjugate])


def test_an_optimizer_and_a_random_state_are_written_back() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert_same_after_a_round_trip([optimizer.state_dict(), torch.get_rng_state(), torch.ones(()).numpy()])


def test_storages_are_numbered_as_they_come_and_shared_by_identity() -> None:
    first, second = (StorageRef("HalfStorage", "9", "cpu", 4) for _ in range(2))
    tree = [TensorRef(second, 0, (4,), (1,)), TensorRef(first, 0, (4,), (1,)), TensorRef(second, 2, (2,), (1,))]
    data, storages = dump_pickle(tree)
    assert storages == (second, first)
    assert [storage.key for storage in load_with_storages(data).storages] == ["0", "1"]


def test_one_global_of_two_files_is_written_once() -> None:
    classes = [inert_global("argparse", "Namespace") for _ in range(2)]
    data, _ = dump_pickle([cls.__new__(cls) for cls in classes])
    assert data.count(b"cargparse\nNamespace\n") == 1


def test_a_value_that_no_checkpoint_has_is_refused() -> None:
    with pytest.raises(ReshardError, match=r"cannot-pickle"):
        dump_pickle([object()])


def test_a_tree_too_deep_for_the_interpreter_is_refused() -> None:
    tree: list[object] = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(ReshardError, match=r"cannot-pickle"):
        dump_pickle(tree)
