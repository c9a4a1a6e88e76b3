"""For random models and any two layouts, the result is that of a naive unshard-then-shard, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.checksums import Ledger
from tasks.file_stream import FileStream, in_turn, stream_units
from tasks.file_work import Destination
from tasks.gather import Gatherer
from tasks.plan import plan_slice, rows_of_file
from tasks.reader_pool import ReaderPool
from tasks.target_file import plan_file
from tasks.write_target_shard import write_target_shard
from tests.oracle import (
    Layout,
    Model,
    Spec,
    assert_same_objects,
    assert_same_tensors,
    build,
    load,
    name_of,
    objects_of,
    ranks,
    read,
    settle,
    write,
)
from tests.pipeline.inline_run import ShuffledExecution, contents, plan_of, reshard, shards

quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def multiples(of: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most).map(lambda n: n * of)


@st.composite
def specs(draw: st.DrawFn, *, can_flatten: bool) -> Spec:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.bfloat16]))
    mixed = not can_flatten and draw(st.booleans())
    return Spec(
        layers=draw(st.integers(1, 4)),
        heads=heads,
        head_dim=draw(st.integers(1, 3)),
        inner=draw(multiples(heads, 3)),
        vocabulary=draw(multiples(heads, 3)),
        positions=draw(st.sampled_from([0, 3, 6])),
        fused=draw(st.booleans()),
        gate=draw(st.booleans()),
        inner_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
        affine=draw(st.booleans()),
        final_norm=draw(st.booleans()),
        projected=draw(st.sampled_from([0, 0, 5])),
        output=draw(st.sampled_from(["none", "tied", "untied"])),
        block=draw(st.sampled_from([1, 1, 2])),
        dtype=dtype,
        norm_dtype=torch.float32 if mixed else None,
        seed=draw(st.integers(0, 1 << 20)),
    )


@st.composite
def layouts(draw: st.DrawFn, spec: Spec, *, root_only: bool = False, flat: bool | None = None) -> Layout:
    flat = draw(st.booleans()) if flat is None else flat
    mp = draw(st.sampled_from(divisors(spec.heads)))
    return Layout(mp, draw(st.integers(1, 9)) if flat else 1, flat, root_only)


@st.composite
def journeys(draw: st.DrawFn, stops: int) -> tuple[Model, list[Layout]]:
    """A model, and layouts that it takes one after another."""
    can_flatten = draw(st.booleans())
    spec = draw(specs(can_flatten=can_flatten))
    root_only = draw(st.booleans())
    flat = None if can_flatten else False
    return build(spec), [draw(layouts(spec, root_only=root_only, flat=flat)) for _ in range(stops)]


def go(source: Path, target: Path, layout: Layout, **options: Any) -> Path:
    reshard(source, target, mp=layout.mp, dp=layout.dp, flat=layout.flat, **options)
    return target


def assert_target(folder: Path, model: Model, layout: Layout, *, random_parts: bool = False) -> None:
    """Compare every file with what the naive shard gives: names, object tree, metadata, padding, bits."""
    assert [path.name for path in shards(folder)] == sorted(
        name_of("reshard", layout, mp, dp) for mp, dp in ranks(layout)
    )
    for mp, dp in ranks(layout):
        expected = objects_of(model, layout, mp, dp, random_parts=random_parts)
        assert_same_objects(load(folder / name_of("reshard", layout, mp, dp)), expected, f"mp={mp}, dp={dp}")
    assert_same_tensors(read(shards(folder)), model.tensors)


def assert_as_torch_writes(path: Path) -> None:
    with scratch_folder() as folder:
        torch.save(load(path), folder / path.name)
        assert (folder / path.name).read_bytes() == path.read_bytes()


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shards(folder)}


@quick
@given(journeys(2), st.booleans())
def test_any_layout_from_any_other_equals_a_naive_unshard_then_shard(
    journey: tuple[Model, list[Layout]], random_parts: bool
) -> None:
    model, (first, second) = journey
    with scratch_folder() as folder:
        for path in write(folder / "a", model, first, random_parts=random_parts):
            settle(path)
        go(folder / "a", folder / "b", second)
        assert_target(folder / "b", model, second, random_parts=random_parts and first.mp == second.mp)
        for path in shards(folder / "b")[:3]:
            assert_as_torch_writes(path)


@quick
@given(journeys(2))
def test_there_and_back_again_is_the_identity(journey: tuple[Model, list[Layout]]) -> None:
    model, (first, second) = journey
    with scratch_folder() as folder:
        write(folder / "a", model, first)
        go(folder / "a", folder / "same", first)
        go(folder / "a", folder / "b", second)
        go(folder / "b", folder / "back", first)
        assert_same_tensors(read(shards(folder / "back")), model.tensors)
        assert file_bytes(folder / "back") == file_bytes(folder / "same")


@quick
@given(journeys(3))
def test_a_detour_makes_no_difference(journey: tuple[Model, list[Layout]]) -> None:
    model, (first, second, third) = journey
    with scratch_folder() as folder:
        write(folder / "a", model, first)
        go(folder / "a", folder / "b", second)
        go(folder / "b", folder / "bc", third)
        go(folder / "a", folder / "c", third)
        assert file_bytes(folder / "bc") == file_bytes(folder / "c")


@quick
@given(journeys(1))
def test_a_request_that_changes_nothing_copies_everything(journey: tuple[Model, list[Layout]]) -> None:
    model, (layout,) = journey
    with scratch_folder() as folder:
        write(folder / "a", model, layout, random_parts=True)
        go(folder / "a", folder / "b", layout)
        assert_target(folder / "b", model, layout, random_parts=True)
        go(folder / "b", folder / "c", layout)
        assert file_bytes(folder / "c") == file_bytes(folder / "b")


@quick
@given(journeys(2), st.integers(0, 1000))
def test_the_order_of_nodes_makes_no_difference(journey: tuple[Model, list[Layout]], seed: int) -> None:
    model, (first, second) = journey
    with scratch_folder() as folder:
        write(folder / "a", model, first, random_parts=True)
        go(folder / "a", folder / "b", second)
        go(folder / "a", folder / "shuffled", second, execution=ShuffledExecution(seed))
        assert file_bytes(folder / "shuffled") == file_bytes(folder / "b")


@quick
@given(
    journeys(2),
    st.sampled_from([8, 16, 24, 56, 128, 1000, 65536]),
    st.sampled_from([8, 64, 1024, 65536]),
    st.sampled_from([8, 16, 40, 96, 512, 4096]),
    st.sampled_from(["", "float32", "bfloat16"]),
)
def test_windows_and_scratch_of_any_size_give_the_same_bytes(
    journey: tuple[Model, list[Layout]], window: int, unit: int, scratch: int, dtype: str
) -> None:
    model, (first, second) = journey
    spec = replace(model.spec, tame=True)
    model = build(spec)
    with scratch_folder() as folder:
        write(folder / "a", model, first)
        go(folder / "a", folder / "b", second, dtype=dtype)
        plan = plan_of(folder / "a", folder / "b", mp=second.mp, dp=second.dp, flat=second.flat, dtype=dtype)
        for mp in range(second.mp):
            table, problems = plan_slice(plan.source, plan.target, mp)
            assert problems == []
            for dp in range(second.dp):
                path = folder / "b" / name_of("reshard", second, mp, dp)
                with ReaderPool(plan.source.files) as readers:
                    layout, bodies = plan_file(
                        plan.source, plan.target, mp, dp, str(path), rows_of_file(table, dp), readers
                    )
                    written = bytearray(layout.size_bytes)
                    made = FileStream(layout, bodies, Gatherer(readers, scratch), Ledger())

                    def put(at: int, view: memoryview, written: bytearray = written) -> None:
                        written[at : at + len(view)] = view

                    units = range(0, layout.size_bytes, unit)
                    in_turn([stream_units(made, layout.size_bytes, units, unit, window, put)])[0]
                assert written == path.read_bytes()


@pytest.mark.parametrize(
    ("first", "second"), [(Layout(2), Layout(8)), (Layout(8), Layout(1)), (Layout(4, 3, True), Layout(2))]
)
@pytest.mark.parametrize("dtype", ["", "float32"])
def test_a_budget_of_64_kib_windows_gives_the_same_bytes(
    tmp_path: Path, first: Layout, second: Layout, dtype: str
) -> None:
    model = build(Spec(layers=1, heads=8, head_dim=32, inner=1024, vocabulary=64, tame=True))
    write(tmp_path / "a", model, first)
    go(tmp_path / "a", tmp_path / "b", second, dtype=dtype)
    plan = plan_of(tmp_path / "a", tmp_path / "b", mp=second.mp, dp=second.dp, flat=second.flat, dtype=dtype)
    for mp, dp in ranks(second):
        table, _ = plan_slice(plan.source, plan.target, mp)
        name = name_of("reshard", second, mp, dp)
        url = str(tmp_path / "small" / name)
        to = Destination(url, str(tmp_path / "temporary"), memory_bytes=1, durable=False)
        write_target_shard(plan.source, plan.target, mp, dp, to, table)
        assert Path(url).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("target_mp", [1, 2, 4, 8])
@pytest.mark.parametrize("source_mp", [1, 2, 4, 8])
def test_every_pair_of_model_parallel_sizes(tmp_path: Path, source_mp: int, target_mp: int) -> None:
    model = build(Spec(layers=2, heads=8, head_dim=1, inner=16, vocabulary=16, gate=True, output="tied"))
    first = Layout(source_mp, 1 + source_mp % 3, True)
    second = Layout(target_mp, 1 + target_mp % 5, True)
    write(tmp_path / "a", model, first, random_parts=True)
    go(tmp_path / "a", tmp_path / "b", second)
    assert_target(tmp_path / "b", model, second, random_parts=source_mp == target_mp)


@pytest.mark.parametrize("target_mp", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("source_mp", [1, 2, 3, 4, 6, 12])
def test_every_pair_of_divisors_of_twelve_heads(tmp_path: Path, source_mp: int, target_mp: int) -> None:
    model = build(Spec(layers=1, heads=12, head_dim=1, inner=12, vocabulary=12, fused=bool(source_mp % 2)))
    write(tmp_path / "a", model, Layout(source_mp))
    go(tmp_path / "a", tmp_path / "b", Layout(target_mp))
    assert_target(tmp_path / "b", model, Layout(target_mp))


@pytest.mark.parametrize("source_dp", range(1, 10))
def test_every_pair_of_data_parallel_sizes(tmp_path: Path, source_dp: int) -> None:
    model = build(Spec(layers=1, heads=1, head_dim=1, inner=1, vocabulary=1, positions=3))
    write(tmp_path / "a", model, Layout(1, source_dp, True))
    for target_dp in range(1, 10):
        layout = Layout(1, target_dp, True)
        go(tmp_path / "a", tmp_path / str(target_dp), layout)
        assert_target(tmp_path / str(target_dp), model, layout)


@pytest.mark.parametrize("target_dp", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("source_dp", [1, 4, 8])
def test_wholly_padded_trailing_shards_are_valid_on_both_sides(tmp_path: Path, source_dp: int, target_dp: int) -> None:
    # The root is an embedding of 5 elements: over 4 shards [0, 1] [2, 3] [4, p] [p, p], over 9 four of padding only.
    spec = Spec(layers=1, heads=1, head_dim=1, inner=1, vocabulary=2, positions=3, final_norm=False)
    model = build(spec)
    first, second = Layout(1, source_dp, True), Layout(1, target_dp, True)
    paths = write(tmp_path / "a", model, first)
    if source_dp == 4:
        states = [load(path)["shard_metadata"]["param_metadata"][0]["params"]["flat_param_0"] for path in paths]
        assert [state["padding"] for state in states] == [0, 0, 1, 2]
    go(tmp_path / "a", tmp_path / "b", second)
    assert_target(tmp_path / "b", model, second)


def test_ten_elements_on_four_shards_go_to_one_two_five_and_eight(tmp_path: Path) -> None:
    spec = Spec(layers=1, heads=1, head_dim=1, inner=1, vocabulary=7, positions=3, final_norm=False)
    model = build(spec)
    write(tmp_path / "a", model, Layout(1, 4, True))
    for dp in (1, 2, 5, 8):
        go(tmp_path / "a", tmp_path / str(dp), Layout(1, dp, True))
        assert_target(tmp_path / str(dp), model, Layout(1, dp, True))


def test_the_regression_chain_ends_where_it_began(tmp_path: Path) -> None:
    model = build(Spec(layers=3, heads=4, head_dim=3, inner=12, vocabulary=12))
    chain = [Layout(2, 4, True), Layout(2, 1, True), Layout(1, 1, True), Layout(1, 4, True), Layout(1, 1, True)]
    chain.append(chain[0])
    write(tmp_path / "0", model, chain[0])
    for number, layout in enumerate(chain[1:], 1):
        go(tmp_path / str(number - 1), tmp_path / str(number), layout)
        assert_target(tmp_path / str(number), model, layout)
    go(tmp_path / "0", tmp_path / "copy", chain[0])
    assert file_bytes(tmp_path / "5") == file_bytes(tmp_path / "copy")


def test_the_source_is_left_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a", build(Spec()), Layout(2, 2, True))
    before = contents(tmp_path / "a")
    go(tmp_path / "a", tmp_path / "b", Layout(1))
    assert contents(tmp_path / "a") == before
