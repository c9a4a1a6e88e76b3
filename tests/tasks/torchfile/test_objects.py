"""Storages, tensors and stand-ins keep what they are told and check it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tasks.torchfile.dtypes import DTYPE_OF_STORAGE_TYPE, ITEM_SIZE_BYTES
from tasks.torchfile.inert import NO_STATE, inert_global
from tasks.torchfile.objects import LoadedOrderedDict, StorageRef, TensorRef, contiguous_stride, is_instance_of


def test_item_sizes_are_those_of_torch() -> None:
    for dtype, size in ITEM_SIZE_BYTES.items():
        if dtype:
            assert getattr(torch, dtype).itemsize == size, dtype


def test_storage_types_are_those_of_torch() -> None:
    known = {
        str(dtype).removeprefix("torch."): name for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    }
    assert {dtype: name for name, dtype in DTYPE_OF_STORAGE_TYPE.items() if dtype} == known


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (1, 4, 1)])
def test_strides_of_new_tensors_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (1, 2)), ((2, 3), (4, 1)), ((1, 3), (9, 1)), ((0, 3), (7, 7)), ((), ())]
)
def test_contiguity_is_judged_as_torch_does(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    ours = TensorRef(StorageRef("FloatStorage", "0", "cpu", 100), 0, shape, stride)
    assert ours.is_contiguous == torch.empty(100).as_strided(shape, stride).is_contiguous()


def test_a_tensor_that_leaves_its_storage_is_refused() -> None:
    storage = StorageRef("HalfStorage", "0", "cpu", 6)
    assert TensorRef(storage, 5, (1,), (1,)).num_elements == 1
    assert TensorRef(storage, 600, (0,), (1,)).num_elements == 0
    with pytest.raises(ValueError, match="has 12 bytes"):
        TensorRef(storage, 6, (), ())


def test_refs_are_compared_by_identity_and_cross_a_process_boundary_together() -> None:
    storage = StorageRef("HalfStorage", "0", "cpu", 6)
    tensors = [TensorRef(storage, 0, (6,), (1,)), TensorRef(storage, 0, (6,), (1,))]
    assert tensors[0] != tensors[1]
    again = pickle.loads(pickle.dumps(tensors))
    assert again[0].storage is again[1].storage
    assert again[0].storage.size_bytes == 12


def test_an_inert_object_is_copied_whole() -> None:
    made = inert_global("a", "b")(1, 2)
    made.extend(["x"])
    made["k"] = "v"
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert is_instance_of(again, "a.b")
        assert (again.args, again.list_items, again.dict_items) == ((1, 2), ["x"], [("k", "v")])
        assert again.state is NO_STATE
        assert again.made_by == "called"


def test_a_stand_in_class_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="cannot be changed"):
        inert_global("a", "b").builder = None


def test_an_ordered_dict_keeps_its_state_apart() -> None:
    made = LoadedOrderedDict(a=1)
    made.__setstate__({"_metadata": 1})
    assert (dict(made), pickle.loads(pickle.dumps(made)).state) == ({"a": 1}, {"_metadata": 1})
