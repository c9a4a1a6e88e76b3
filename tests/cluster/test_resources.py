"""The numbers asked of Ray, and the check that a cluster can give them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.resources import (
    KINDS,
    TaskResources,
    check_capacity,
    count_slots,
    default_resources,
    memory_class_bytes,
    parse_resource_options,
)

GIB = 1 << 30


@given(st.integers(1, 1 << 44))
def test_a_memory_class_holds_what_is_asked_and_wastes_at_most_a_quarter(memory_bytes: int) -> None:
    class_bytes = memory_class_bytes(memory_bytes)
    assert memory_bytes <= class_bytes <= max(64 << 20, memory_bytes * 1.25)
    assert memory_class_bytes(class_bytes) == class_bytes


def test_memory_classes_are_few() -> None:
    assert len({memory_class_bytes(mebibytes << 20) for mebibytes in range(1, 32 * 1024, 7)}) < 40


def test_options_ask_only_for_what_was_given() -> None:
    assert TaskResources().options() == {"num_cpus": 1, "num_gpus": 0}
    asked = TaskResources(num_cpus=0.5, memory_bytes=3 * GIB, num_gpus=0.25, custom=(("disk", 1.0),))
    assert asked.options() == {"num_cpus": 0.5, "num_gpus": 0.25, "memory": 3 * GIB, "resources": {"disk": 1.0}}


def test_resources_that_ray_would_refuse_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"num_cpus=1.5 .*; memory_bytes=-1 .*; GPU is no custom.*; disk is given tw"):
        TaskResources(num_cpus=1.5, memory_bytes=-1, custom=(("GPU", 1), ("disk", 1), ("disk", 1)))


def test_every_kind_has_default_resources() -> None:
    resources = default_resources(GIB, num_gpus=0.25, custom=[("disk", 1)])
    assert tuple(resources) == KINDS
    assert set(resources.values()) == {TaskResources(memory_bytes=GIB, num_gpus=0.25, custom=(("disk", 1),))}


def test_resource_options_are_read() -> None:
    options = parse_resource_options(["num_cpus=2", "my_label=0.5", "num_gpus=1"])
    assert (options.num_cpus, options.num_gpus, options.custom) == (2, 1, (("my_label", 0.5),))
    assert parse_resource_options([]).custom == ()


def test_all_bad_resource_options_are_listed() -> None:
    with pytest.raises(ValueError) as caught:
        parse_resource_options(["disk", "=1", "a=x", "memory=1", "num_gpus=nan", "b=1.5", "c=1", "c=2"])
    assert [line.split(":")[0].split(" is")[0] for line in str(caught.value).splitlines()] == [
        "'disk'",
        "'=1'",
        "'a=x'",
        "'memory=1'",
        "'num_gpus=nan'",
        "'b=1.5'",
        "'c=2'",
    ]


def test_a_kind_that_fits_no_machine_is_told_with_the_largest_machine() -> None:
    resources = {"small": TaskResources(), "large": TaskResources(num_cpus=8, memory_bytes=64 * GIB)}
    nodes = [{"CPU": 16.0, "memory": 8.0 * GIB}, {"CPU": 4.0, "memory": 32.0 * GIB}]
    (message,) = check_capacity(resources, nodes)
    assert message.splitlines() == [
        "no machine can run large: it asks memory 65,536 MiB, the largest machine has memory 8,192 MiB",
        "  next: lower the memory budget of one worker, or add machines with more memory",
    ]


def test_resources_must_be_met_by_one_machine_not_by_their_sum() -> None:
    asked = {"kind": TaskResources(num_cpus=2, custom=(("disk", 1),))}
    assert check_capacity(asked, [{"CPU": 4.0}, {"CPU": 1.0, "disk": 1.0}])
    assert check_capacity(asked, [{"CPU": 4.0}, {"CPU": 2.0, "disk": 1.0}]) == ()


def test_a_missing_label_is_named_in_the_next_step() -> None:
    (message,) = check_capacity({"kind": TaskResources(custom=(("disk", 1),))}, [{"CPU": 4.0}])
    assert "start workers with the resource disk" in message


def test_an_empty_cluster_is_told_once() -> None:
    assert len(check_capacity(default_resources(GIB), [])) == 1


def test_slots_are_limited_by_the_scarcest_resource_of_each_machine() -> None:
    asked = TaskResources(num_cpus=1, memory_bytes=2 * GIB)
    assert count_slots(asked, [{"CPU": 8.0, "memory": 5.0 * GIB}, {"CPU": 1.0, "memory": 64.0 * GIB}, {}]) == 3
    assert count_slots(TaskResources(num_cpus=0.1), [{"CPU": 1.0}]) == 10
    assert count_slots(TaskResources(num_cpus=0), [{"CPU": 2.0}]) == 2
