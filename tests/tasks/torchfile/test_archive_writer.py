"""The planned file is the one that torch.save writes, byte for byte."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib
from torch.serialization import skip_data

from tasks.errors import ReshardError
from tasks.torchfile.archive_writer import ArchiveLayout, archive_name_of, plan_archive
from tasks.torchfile.pickler import dump_pickle
from tasks.torchfile.unpickler import load_with_storages

GIB = 1 << 30


def layout_of(path: Path) -> ArchiveLayout:
    """Plan the file anew from its own pickle."""
    with zipfile.ZipFile(path) as archive:
        loaded = load_with_storages(archive.read(f"{archive_name_of(str(path))}/data.pkl"))
    data, storages = dump_pickle(loaded.root)
    return plan_archive(archive_name_of(str(path)), data, [storage.size_bytes for storage in storages])


def assert_as_torch(obj: Any, path: Path, *, sparse: bool = False) -> ArchiveLayout:
    """Stream the planned file beside torch's; without data if sparse, where torch leaves all CRCs zero."""
    if sparse:
        with skip_data():
            torch.save(obj, path)
    else:
        torch.save(obj, path)
    layout = layout_of(path)
    assert layout.size_bytes == path.stat().st_size
    crcs = []
    with path.open("rb") as file:
        assert file.read(len(layout.head)) == layout.head
        for index, (offset, size) in enumerate(
            zip(layout.storage_offsets_bytes, layout.storage_sizes_bytes, strict=True)
        ):
            assert file.tell() == offset
            assert offset % 64 == 0
            crcs.append(0 if sparse else isal_zlib.crc32(file.read(size)))
            file.seek(offset + size)
            assert file.tell() == layout.gap_offset_bytes(index)
            if index + 1 < len(layout.storage_sizes_bytes):
                between = layout.between(index, crcs[-1])
                assert file.read(len(between)) == between
        assert file.tell() == layout.tail_offset_bytes
        tail = layout.tail(crcs)
        assert len(tail) == layout.tail_size_bytes
        assert file.read() == tail
    path.unlink()
    return layout


def empty(*sizes_bytes: int) -> list[Any]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes_bytes]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 200), max_size=40),
    name=st.sampled_from(["a", "x.y", "checkpoint_last-é", "q" * 90, ".a.b.", "no-dot\\back"]),
)
def test_any_sizes_and_names_are_laid_out_as_torch_does(
    sizes: list[int], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) for size in sizes]
    assert_as_torch({"model": tensors}, tmp_path_factory.getbasetemp() / f"{name}.pt")


def test_one_thousand_storages_are_laid_out_as_torch_does(tmp_path: Path) -> None:
    assert_as_torch([torch.full((index % 5,), index) for index in range(1234)], tmp_path / "many.pt")


@pytest.mark.parametrize(
    "sizes",
    [
        (5 * GIB, 3, 0, 7, 6 * GIB, 0),
        (0xFFFFFFFE, 3, 0, 7),
        (0xFFFFFFFF, 3, 0, 7),
        (0xFFFFFFFF,),
        (3, 4 * GIB),
        *((2 * GIB, 2 * GIB - step, 0, 0, 1, 0, 2) for step in range(850, 1300, 64)),
        *((2 * GIB, 2 * GIB - step, 9) for step in range(500, 1000, 64)),
    ],
)
def test_sizes_and_offsets_beyond_32_bits_are_laid_out_as_torch_does(sizes: tuple[int, ...], tmp_path: Path) -> None:
    assert_as_torch(empty(*sizes), tmp_path / "big.pt", sparse=True)


def test_an_offset_exactly_at_the_32_bit_limit_is_laid_out_as_torch_does(tmp_path: Path) -> None:
    first = assert_as_torch(empty(2 * GIB, 1, 9), tmp_path / "edge.pt", sparse=True)
    for distance in (-1, 0, 1):
        grown = 0xFFFFFFFF + distance - first.header_offsets_bytes[1] - 16
        # The second storage's header then begins about the limit, the third's far behind it.
        layout = assert_as_torch(empty(2 * GIB, grown - 64, 9, 1), tmp_path / "edge.pt", sparse=True)
        shift = 0xFFFFFFFF + distance - layout.header_offsets_bytes[2]
        layout = assert_as_torch(empty(2 * GIB, grown - 64 + shift, 9, 1), tmp_path / "edge.pt", sparse=True)
        assert layout.header_offsets_bytes[2] == 0xFFFFFFFF + distance


def test_more_records_than_16_bits_count_are_laid_out_as_torch_does(tmp_path: Path) -> None:
    base = torch.zeros(1, dtype=torch.uint8)
    assert_as_torch([base.clone() for _ in range(65540)], tmp_path / "many.pt")


def test_a_file_written_by_position_loads_in_torch_and_passes_the_zip_test(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(100.0), "b": torch.empty(0), "c": torch.ones(3, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "t.pt")
    layout = layout_of(tmp_path / "t.pt")
    datas = [bytes(tensor.untyped_storage()) for tensor in tensors.values()]
    crcs = [isal_zlib.crc32(data) for data in datas]
    image = bytearray(layout.size_bytes)

    def put(offset: int, piece: bytes) -> None:
        image[offset : offset + len(piece)] = piece

    put(layout.tail_offset_bytes, layout.tail(crcs))
    for index in (2, 0, 1):
        put(layout.storage_offsets_bytes[index], datas[index])
        if index < 2:
            put(layout.gap_offset_bytes(index), layout.between(index, crcs[index]))
    put(0, layout.head)
    assert bytes(image) == (tmp_path / "t.pt").read_bytes()
    (tmp_path / "t.pt").write_bytes(image)
    with zipfile.ZipFile(tmp_path / "t.pt") as archive:
        assert archive.testzip() is None
    assert torch.load(tmp_path / "t.pt")["a"].equal(tensors["a"])


def test_names_and_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ReshardError, match="bad-archive-layout"):
        plan_archive("", b"", [])
    with pytest.raises(ReshardError, match="bad-archive-layout"):
        plan_archive("a", b"", [-1])
    with pytest.raises(ValueError, match="1 CRCs for 2 storages"):
        plan_archive("a", b"x", [1, 2]).tail([0])
