"""The id is the one that torch's writer makes on this machine's libstdc++."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from isal import isal_zlib

from tasks.torchfile.serialization_id import combine_names, serialization_id


def torch_id(names: list[str], content: bytes) -> bytes:
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    for name in names:
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/.data/serialization_id")


@pytest.mark.parametrize(
    "num_storages", [*range(31), 50, 53, 54, 55, 100, 121, 122, 123, 252, 253, 537, 1105, 2353, 3000]
)
def test_the_digits_are_those_of_torch(num_storages: int) -> None:
    names = ["data.pkl", "byteorder", *(f"data/{index}" for index in range(num_storages))]
    crcs = [isal_zlib.crc32(b"x")] * len(names) + [isal_zlib.crc32(b"3\n")]
    assert serialization_id(combine_names([*names, "version"]), crcs) == torch_id(names, b"x")


def test_long_and_foreign_names_hash_as_in_torch() -> None:
    names = ["a" * length for length in range(1, 40)] + ["é/ü", "x/y.z", "byteorder"]
    crcs = [isal_zlib.crc32(b"x")] * len(names) + [isal_zlib.crc32(b"3\n")]
    assert serialization_id(combine_names([*names, "version"]), crcs) == torch_id(names, b"x")


def test_empty_records_have_no_part_in_the_second_half() -> None:
    names = ["data.pkl", "byteorder", "data/0"]
    assert serialization_id(combine_names([*names, "version"]), [isal_zlib.crc32(b"3\n")]) == torch_id(names, b"")
