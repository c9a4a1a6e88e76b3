"""Files that take columns of the same rows, made side by side: each row is read once, and every byte is right."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.gather import Gatherer, Rows, Whole, rows_of_storages
from tasks.reader_pool import ReaderPool
from tasks.shared_rows import RowReader, share_rows
from tasks.storage import stat
from tests.tasks.test_gather import SINGLE, segment, table

NUM_ROWS, WIDTH = 64, 60
ROW_BYTES = WIDTH * 2
BEGIN = 100
"where the block of rows begins in the source; it ends with the file"


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    numbers = np.random.default_rng(5).normal(size=(NUM_ROWS, WIDTH)).astype(np.float16)
    path = tmp_path_factory.mktemp("source") / "numbers"
    path.write_bytes(bytes(BEGIN) + numbers.tobytes())
    return path, numbers


def columns_of(first_row: int, num_rows: int, column: int, width: int, **more: object) -> Rows:
    at = BEGIN + first_row * ROW_BYTES + column * 2
    size = 4 if more.get("target_dtype") == SINGLE else 2
    rows = segment(0, at, width, num_rows, to_stride=width * size, at_stride=ROW_BYTES, **more)
    return rows_of_storages(table([rows]))[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), window=st.integers(1, 200), cast=st.booleans())
def test_parts_of_any_columns_and_rows_are_right_in_any_window(
    block: tuple[Path, np.ndarray], data: st.DataObject, window: int, cast: bool
) -> None:
    path, numbers = block
    cuts = data.draw(st.lists(st.integers(1, WIDTH - 1), max_size=4, unique=True))
    edges = [0, *sorted(cuts), WIDTH]
    parts = []
    for column, until in itertools.pairwise(edges):
        first = data.draw(st.integers(0, NUM_ROWS - 2))
        parts.append((first, data.draw(st.integers(2, NUM_ROWS - first)), column, until - column))
    dtype = np.dtype(np.float32 if cast else np.float16)
    more = {"target_dtype": SINGLE} if cast else {}
    expected = [
        numbers[first : first + count, column : column + width].astype(dtype).tobytes()
        for first, count, column, width in parts
    ]
    shared = share_rows([columns_of(*part, **more) for part in parts])
    capacity = data.draw(st.sampled_from([2 * NUM_ROWS * ROW_BYTES, 1 << 20]))
    made = [bytearray(len(content)) for content in expected]
    size = window * dtype.itemsize
    with ReaderPool([stat(str(path))]) as readers:
        gatherer = Gatherer(readers, whole_rows=RowReader(readers, capacity))
        for begin in range(0, max(map(len, expected)), size):
            for rows, content in zip(shared, made, strict=True):
                view = np.frombuffer(content, np.uint8)[begin : begin + size]
                if len(view):
                    gatherer.fill(rows, begin, view)
    assert [bytes(content) for content in made] == expected


@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_rows_are_read_once(num_parts: int, block: tuple[Path, np.ndarray]) -> None:
    path, numbers = block
    width = WIDTH // num_parts
    parts = share_rows([columns_of(0, NUM_ROWS, part * width, width) for part in range(num_parts)])
    view = np.empty(NUM_ROWS // 4 * width * 2, np.uint8)
    with ReaderPool([stat(str(path))]) as readers:
        gatherer = Gatherer(readers, whole_rows=RowReader(readers, (num_parts + 1) * len(view)))
        for number in range(4):
            for part, rows in enumerate(parts):
                gatherer.fill(rows, number * len(view), view)
                mine = numbers[number * 16 : number * 16 + 16, part * width : (part + 1) * width]
                assert view.tobytes() == mine.tobytes()
        assert readers.bytes_read == NUM_ROWS * ROW_BYTES
        assert readers.num_requests == 4


def test_rows_that_others_take_no_part_of_are_left_alone() -> None:
    apart = [columns_of(0, 10, 0, 30), columns_of(20, 10, 0, 30)]
    assert [dict(rows.wholes) for rows in share_rows(apart)] == [{}, {}]
    together = [columns_of(0, 10, 0, 30), columns_of(5, 10, 30, 30)]
    whole = Whole(BEGIN, BEGIN + 15 * ROW_BYTES, ROW_BYTES)
    assert [dict(rows.wholes) for rows in share_rows(together)] == [{0: whole}, {0: whole}]
