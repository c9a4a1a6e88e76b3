"""Copies are compared bit by bit, in windows, and the first difference is told."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch

from pipeline.discovery import discover
from pipeline.planning import index_here
from tasks.compare import compare_copies
from tasks.errors import ReshardError
from tasks.families.opt import OPT
from tasks.formats.metaseq_source import build_source
from tasks.plan import source_copies
from tasks.reader_pool import ReaderPool
from tests.running import FIXTURES, load, reshard_here

NORM = "decoder.layer_norm.weight"


def edited(folder: Path, value: bytes) -> Path:
    """Save a checkpoint in which one element of a replicated norm is another one in part 1."""
    reshard_here(FIXTURES / "mp2dp2-fp16-fused", folder / "parts", mp=2, dp=1, flat=False)
    (folder / "parts" / "manifest.json").unlink()
    shutil.rmtree(folder / "parts" / ".reshard")
    victim = folder / "parts" / "checkpoint_last-model_part-1.pt"
    objects = load(victim)
    objects["model"][NORM].view(torch.int16)[3] = struct.unpack("<h", value)[0]
    torch.save(objects, victim)
    return folder / "parts"


@pytest.mark.parametrize(
    ("value", "said"), [(struct.pack("<e", 7.5), "7.5"), (b"\x01\x7e", "nan"), (struct.pack("<e", -0.0), "-0.0")]
)
def test_the_first_difference_is_told_with_place_and_values(value: bytes, said: str, tmp_path: Path) -> None:
    source = edited(tmp_path, value)
    with pytest.raises(ReshardError) as caught:
        reshard_here(source, tmp_path / "out", mp=1)
    text = str(caught.value)
    for part in (NORM, "mp=0", "mp=1", "index (3,)", said, "checkpoint_last-model_part-1.pt", "--replica-part"):
        assert part in text
    assert caught.value.exit_code == 3


def test_windows_of_any_size_find_the_same(tmp_path: Path) -> None:
    source = edited(tmp_path, struct.pack("<e", 7.5))
    found = discover(str(source))
    built, problems = build_source(index_here(found.files), found.mesh, OPT)
    assert built is not None, problems
    ((_, copies),) = source_copies(built)[NORM].items()
    with ReaderPool(built.files) as readers:
        told = [
            str(compare_copies(NORM, copies, built, readers, what="replica", window_bytes=size)[0].context[0])
            for size in (2, 4, 6, 1 << 20)
        ]
    assert len(set(told)) == 1
    assert told[0].endswith("against 7.5")


def test_a_chosen_part_is_taken_as_it_is(tmp_path: Path) -> None:
    source = edited(tmp_path, struct.pack("<e", 7.5))
    for part in (0, 1):
        reshard_here(source, tmp_path / str(part), mp=1, replica_part=part)
        value = load(tmp_path / str(part) / "checkpoint_last.pt")["model"][NORM][3]
        assert (float(value) == 7.5) == (part == 1)
