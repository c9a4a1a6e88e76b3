"""A flipped bit in a source, which torch loads silently, is found by the checksum that the training job stored."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tasks.errors import ReshardError
from tasks.storage import stat
from tasks.unflatten_source_shard import unflatten_source_shard
from tests.running import FIXTURES, load, reshard_here

SOURCE = FIXTURES / "mp2dp2-fp16-fused"


@pytest.mark.parametrize(
    "target", [{"mp": 1, "dp": 1, "flat": False}, {"mp": 2, "dp": 3, "flat": True}, {"mp": 1, "dp": 2}]
)
def test_a_flipped_bit_is_found_before_anything_is_published(target: dict[str, object], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    victim = source / "checkpoint_last-model_part-1-shard0.pt"
    index = unflatten_source_shard(stat(str(victim)), 1, 0)
    flat = next(tensor for tensor in index.tensors if tensor.name == "decoder.layers.1.flat_param_0")
    content = bytearray(victim.read_bytes())
    before = os.stat(victim)
    content[flat.offset_bytes + 100] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    torch.load(victim, weights_only=False)  # no complaint

    with pytest.raises(ReshardError) as caught:
        reshard_here(source, tmp_path / "out", **target)
    assert caught.value.exit_code == 3
    assert "checkpoint_last-model_part-1-shard0.pt" in str(caught.value)
    assert "decoder.layers.1.flat_param_0" in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()

    # Mended by a copy that keeps times, as rsync makes them: what was read before must not be in the way.
    shutil.copy2(SOURCE / victim.name, victim)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    reshard_here(source, tmp_path / "out", **target)
    assert (tmp_path / "out" / "manifest.json").exists()


def test_a_flipped_bit_in_a_moment_is_found_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    victim = source / "checkpoint_last-model_part-0-shard1.pt"
    index = unflatten_source_shard(stat(str(victim)), 0, 1)
    assert index.optimizer is not None
    moment = dict(index.optimizer.parameters[2].moments)["exp_avg_sq"]
    content = bytearray(victim.read_bytes())
    content[moment.offset_bytes + 400] ^= 64
    victim.write_bytes(content)
    with pytest.raises(ReshardError, match="exp_avg_sq of the optimizer's parameter 2"):
        reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    assert not (tmp_path / "out" / "manifest.json").exists()
    reshard_here(source, tmp_path / "without", mp=1, dp=3, flat=True, keep_state=False)


def test_a_sound_source_is_proven_whole(tmp_path: Path) -> None:
    result = reshard_here(SOURCE, tmp_path / "out", mp=2, dp=3, flat=True)
    # Three flat parameters in each of four files; and the version, one copy of it for each of two parts.
    assert result["source_records_proven"] >= 12
    assert load(tmp_path / "out" / "checkpoint_last-model_part-0-shard0.pt")["model"]
