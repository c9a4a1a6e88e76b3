"""Windows of any size, filled from any segments, hold what element-by-element copies would put there."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.checksums import Trail
from tasks.errors import ReshardError
from tasks.gather import Gatherer, rows_of_storages
from tasks.plan import DTYPES, SCHEMA, rows_of_file, span_bytes
from tasks.reader_pool import ReaderPool
from tasks.storage import stat

HALF, SINGLE = DTYPES.index("float16"), DTYPES.index("float32")


def table(rows: list[dict[str, object]]) -> pa.Table:
    base = {"file": 0, "storage": 0, "source_file": 0, "scale": 1.0, "source_dtype": HALF, "target_dtype": HALF}
    return pa.Table.from_pylist([{**base, **row} for row in rows], schema=SCHEMA)


def segment(
    to: int, at: int, run: int, num_runs: int = 1, to_stride: int = 0, at_stride: int = 0, **more: object
) -> dict:
    return {
        "storage_offset_bytes": to,
        "source_offset_bytes": at,
        "run_elements": run,
        "num_runs": num_runs,
        "storage_stride_bytes": to_stride,
        "source_stride_bytes": at_stride,
        **more,
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    numbers = np.arange(4096, dtype=np.uint16)
    path = tmp_path_factory.mktemp("source") / "numbers"
    path.write_bytes(numbers.tobytes())
    return path, numbers


@settings(max_examples=200, deadline=None)
@given(
    columns=st.integers(1, 9),
    rows=st.integers(1, 12),
    parts=st.integers(1, 4),
    window=st.integers(1, 300),
    scratch=st.integers(2, 400),
)
def test_interleaved_columns_of_several_parts_fill_any_window(
    source: tuple[Path, np.ndarray], columns: int, rows: int, parts: int, window: int, scratch: int
) -> None:
    path, numbers = source
    width = columns * parts
    # Part p of the source is a block of rows x columns at its own place; the target has the parts side by side.
    segments = [
        segment(p * columns * 2, p * 500 * 2, columns, rows, to_stride=width * 2, at_stride=columns * 2)
        for p in range(parts)
    ]
    blocks = [numbers[p * 500 : p * 500 + rows * columns].reshape(rows, columns) for p in range(parts)]
    expected = np.concatenate(blocks, axis=1).tobytes()
    found = rows_of_storages(table(segments))[0]
    result = bytearray(len(expected))
    with ReaderPool([stat(str(path))]) as readers:
        gatherer = Gatherer(readers, scratch_bytes=scratch)
        for begin in range(0, len(expected), window * 2):
            view = np.zeros(min(window * 2, len(expected) - begin), np.uint8)
            assert gatherer.fill(found, begin, view) == (len(view), None)
            result[begin : begin + len(view)] = view.tobytes()
    assert bytes(result) == expected


def test_segments_that_follow_each_other_on_both_sides_are_one_request(source: tuple[Path, np.ndarray]) -> None:
    path, numbers = source
    found = rows_of_storages(table([segment(0, 20, 10), segment(20, 40, 5), segment(30, 100, 5)]))[0]
    trail = Trail()
    with ReaderPool([stat(str(path))], trail) as readers:
        view = np.zeros(40, np.uint8)
        assert Gatherer(readers).fill(found, 0, view) == (40, zlib.crc32(view))
        assert readers.num_requests == 2
        assert readers.bytes_read == 40
    np.testing.assert_array_equal(view.view(np.uint16), np.concatenate([numbers[10:25], numbers[50:55]]))
    assert {item[1:3] for item in trail.ranges()} == {(20, 30), (100, 10)}


def test_a_cast_is_torchs_and_overflow_is_an_error(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "numbers"
    numbers = torch.tensor([1.5, float("nan"), -0.0, 65504.0, float("inf"), 1e-7])
    path.write_bytes(numbers.numpy().tobytes())
    rows = table([segment(0, 0, 6, source_dtype=SINGLE)])
    with ReaderPool([stat(str(path))]) as readers:
        view = np.zeros(12, np.uint8)
        Gatherer(readers).fill(rows_of_storages(rows)[0], 0, view)
    assert view.tobytes() == numbers.half().numpy().tobytes()

    path.write_bytes(torch.tensor([1.0, 70000.0]).numpy().tobytes())
    with ReaderPool([stat(str(path))]) as readers, pytest.raises(ReshardError, match="too large for float16"):
        Gatherer(readers).fill(rows_of_storages(table([segment(0, 0, 2, source_dtype=SINGLE)]))[0], 0, view[:4])


def test_rows_are_found_by_file_and_spans_count_what_lies_between() -> None:
    rows = table([segment(0, 0, 4, file=0), segment(0, 8, 4, 3, 8, 100, file=2), segment(0, 0, 4, file=2, storage=1)])
    assert [len(rows_of_file(rows, file)) for file in range(4)] == [1, 0, 2, 0]
    assert span_bytes(rows).tolist() == [8, 208, 8]
    assert sorted(rows_of_storages(rows_of_file(rows, 2))) == [0, 1]
