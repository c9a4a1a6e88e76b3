"""Files of both formats are found out by content, and every damage is told."""

from __future__ import annotations

import io
import os
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
from isal import isal_zlib
from torch.serialization import skip_data

from tasks.errors import ErrorKind, ReshardError
from tasks.torchfile.archive_reader import check_storages, read_archive
from tasks.torchfile.file_index import TorchFile, TorchFormat, open_torch_file
from tasks.torchfile.legacy_reader import read_legacy
from tasks.torchfile.objects import StorageRef, TensorRef

DATA = Path(__file__).parents[2] / "data" / "torchfile"


def open_bytes(data: bytes, *, tail_bytes: int = 65536, name: str = "a.pt") -> TorchFile:
    return open_torch_file(reader_of(data), len(data), name, tail_bytes=tail_bytes)


def reader_of(data: bytes) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(data)
        return data[offset : offset + length]

    return read


def saved(obj: object, *, legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def refused(data: bytes, reference: str, **options: Any) -> str:
    with pytest.raises(ReshardError) as caught:
        open_bytes(data, name="broken.pt", **options)
    assert caught.value.problems[0].kind is ErrorKind.SOURCE
    assert caught.value.problems[0].reference == reference, str(caught.value)
    assert "broken.pt" in str(caught.value)
    assert caught.value.problems[0].hint
    return str(caught.value)


TENSORS = {
    "w": torch.arange(12.0).view(3, 4),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7),
    "half": torch.ones(70, dtype=torch.float16),
}


def assert_describes(torch_file: TorchFile, data: bytes) -> None:
    assert isinstance(torch_file.root, dict)
    for name, tensor in TENSORS.items():
        ref = torch_file.root[name]
        assert isinstance(ref, TensorRef)
        assert (ref.shape, ref.stride) == (tuple(tensor.shape), tensor.stride())
        offset, size, crc32 = torch_file.locations[ref.storage]
        content = data[offset : offset + size]
        assert content == bytes(tensor.untyped_storage())
        assert crc32 in (None, isal_zlib.crc32(content))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("tail_bytes", [98, 120, 2048, 65536])
def test_offsets_lead_to_the_data(legacy: bool, tail_bytes: int) -> None:
    data = saved(TENSORS, legacy=legacy)
    torch_file = open_bytes(data, tail_bytes=tail_bytes)
    assert torch_file.format is (TorchFormat.LEGACY if legacy else TorchFormat.ZIP)
    assert_describes(torch_file, data)


def test_a_small_file_needs_one_request_and_a_large_one_two() -> None:
    data = saved({**TENSORS, "big": torch.zeros(100_000)})
    assert open_bytes(data, tail_bytes=len(data)).num_requests == 1
    torch_file = open_bytes(data)
    assert torch_file.num_requests == 2
    assert_describes(torch_file, data)


def test_a_legacy_file_needs_two_requests_and_its_head_grows_with_its_pickle() -> None:
    data = saved({**TENSORS, "big": torch.zeros(100_000)}, legacy=True)
    assert open_bytes(data).num_requests == 2
    many = {**TENSORS, **{f"decoder.layers.{index}.weight": torch.zeros(3) for index in range(2000)}}
    data = saved(many, legacy=True)
    assert_describes(open_bytes(data), data)
    assert read_legacy(reader_of(data), len(data), "a.pt").num_requests == 3


@pytest.mark.parametrize(
    ("name", "num_storages"), [("mp2dp2-fp16.pt", 11), ("cfg-dictconfig.pt", 11), ("legacy-nonzip.pt", 11)]
)
def test_files_of_the_real_trainer_are_read(name: str, num_storages: int) -> None:
    data = (DATA / name).read_bytes()
    torch_file = open_bytes(data, tail_bytes=4096)
    assert len(torch_file.storages) == num_storages
    for offset, size, crc32 in torch_file.locations.values():
        assert offset + size <= len(data)
        assert crc32 in (None, isal_zlib.crc32(data[offset : offset + size]))


def test_the_legacy_file_of_the_real_trainer_has_torchs_values() -> None:
    data = (DATA / "legacy-nonzip.pt").read_bytes()
    torch_file = open_bytes(data)
    wanted = torch.load(DATA / "legacy-nonzip.pt", weights_only=False)["model"]
    found = torch_file.root["model"]  # type: ignore[index]
    for name, tensor in wanted.items():
        offset, size, _ = torch_file.locations[found[name].storage]
        assert data[offset : offset + size] == bytes(tensor.untyped_storage())


def test_sizes_beyond_32_bits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    sizes = (5 << 30, 3, 0, 0xFFFFFFFF, 9)
    with skip_data():
        torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], path)
    descriptor = os.open(path, os.O_RDONLY)
    torch_file = open_torch_file(
        lambda offset, length: os.pread(descriptor, length, offset), path.stat().st_size, "big.pt"
    )
    os.close(descriptor)
    path.unlink()
    assert [location.size for location in torch_file.locations.values()] == list(sizes)
    assert all(location.offset % 64 == 0 for location in torch_file.locations.values())
    assert torch_file.num_requests == 2


def packed_again(data: bytes, **options: Any) -> bytes:
    """The same records as another tool packs them."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", **options) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    return file.getvalue()


def test_a_file_packed_again_by_another_tool_is_read_by_its_local_headers() -> None:
    data = packed_again(saved(TENSORS))
    assert_describes(open_bytes(data, tail_bytes=200), data)


def test_a_comment_behind_the_archive_does_no_harm() -> None:
    data = saved(TENSORS)
    data = data[:-2] + pack("<H", 5) + b"PK\5\6!"
    assert_describes(open_bytes(data), data)


def test_compressed_records_are_refused() -> None:
    assert "method 8" in refused(packed_again(saved(TENSORS), compression=zipfile.ZIP_DEFLATED), "compressed-record")


def test_every_cut_of_an_archive_is_refused() -> None:
    data = saved(TENSORS)
    refused(b"", "empty-file")
    for length in range(len(MAGIC_ZIP), len(data), 7):
        with pytest.raises(ReshardError) as caught:
            open_bytes(data[:length])
        assert caught.value.problems[0].reference == "truncated-file"


MAGIC_ZIP = b"PK\3\4"


def test_every_cut_of_a_legacy_file_is_refused() -> None:
    data = saved(TENSORS, legacy=True)
    for length in range(1, len(data)):
        refused(data[:length], "truncated-file")


def test_a_legacy_file_that_is_too_long_or_shifted_is_refused() -> None:
    data = saved({"w": torch.zeros(3)}, legacy=True)
    assert "declared: " in refused(data + b"x", "storage-size-differs")
    refused(data[:-20] + b"\1" + data[-19:], "storage-size-differs")


def test_what_is_no_torch_file_is_refused() -> None:
    refused(b"checkpoint_3.pt", "not-a-torch-file")
    refused(b"{}" * 50_000, "not-a-torch-file")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/readme", "x")
    refused(other.getvalue(), "not-a-torch-file")


def test_a_file_of_the_first_tar_format_is_named_as_such() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    assert "0.1.10" in refused(file.getvalue(), "legacy-tar-file")


def test_several_directories_and_double_names_are_refused() -> None:
    def packed(*names: str) -> bytes:
        file = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
            warnings.simplefilter("ignore")
            for name in names:
                archive.writestr(name, b"\x80\x02N.")
        return file.getvalue()

    assert open_bytes(packed("a/data.pkl")).root is None
    refused(packed("a/data.pkl", "b/data.pkl"), "not-a-torch-file")
    refused(packed("data.pkl"), "not-a-torch-file")
    refused(packed("a/data.pkl", "a/x", "a/x"), "duplicate-record")


def test_a_big_endian_file_is_refused() -> None:
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    writer.write_record("data.pkl", b"\x80\x02N.", 4)
    writer.write_record("byteorder", b"big", 3)
    writer.write_end_of_file()
    refused(file.getvalue(), "big-endian-file")


def patched_directory(data: bytes, record: bytes, position: int, value: bytes) -> bytes:
    entry = data.rindex(record) - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    return data[: entry + position] + value + data[entry + position + len(value) :]


def test_records_that_overlap_or_leave_the_file_are_refused() -> None:
    data = saved(TENSORS)
    size = pack("<LL", 300, 300)
    refused(patched_directory(data, b"archive/data/0", 20, size), "overlapping-records")
    refused(patched_directory(data, b"archive/data/0", 20, pack("<LL", 400000, 400000)), "truncated-file")


def test_encrypted_records_are_refused() -> None:
    refused(patched_directory(saved(TENSORS), b"archive/data/0", 8, b"\1\0"), "encrypted-record")


def test_a_damaged_pickle_is_told_by_its_checksum() -> None:
    data = saved(TENSORS)
    refused(data.replace(b"scalar", b"scalaR", 1), "corrupt-record")


def test_a_record_shorter_than_its_storage_is_refused() -> None:
    data = saved({"w": torch.zeros(8)})
    archive = read_archive(reader_of(data), len(data), "a.pt")
    good = StorageRef("FloatStorage", "0", "cpu", 8)
    check_storages([good], archive)
    assert archive.storage_location(good) == (archive.records["data/0"].offset_bytes, 32)
    with pytest.raises(ReshardError) as caught:
        check_storages([StorageRef("FloatStorage", "0", "cpu", 9), StorageRef("FloatStorage", "7", "cpu", 9)], archive)
    assert [problem.reference for problem in caught.value.problems] == ["storage-size-differs"] * 2
    assert "no record" in str(caught.value)


def test_a_read_that_gives_too_few_bytes_is_refused() -> None:
    data = saved(TENSORS)
    with pytest.raises(ReshardError, match="short-read"):
        open_torch_file(lambda offset, length: data[offset : offset + length - 1], len(data), "a.pt")
