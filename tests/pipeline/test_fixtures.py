"""Checkpoints of the real producers (metaseq's trainer, fairscale) against their unsharded truth.

Flat targets are read by fairscale's own `consolidate_shard_weights`, then merged over model-parallel parts by
metaseq's own `partition_dim`: nothing of ours takes part in the reading.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel

from tasks.target import Projection
from tests.running import FIXTURES, load, reshard_here

GOOD = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and not path.name.startswith("bad"))
SHAPES = [(1, 1), (1, 5), (2, 3), (4, 2), (2, 1), (8, 1), (1, 2)]
TIED = "decoder.output_projection.weight"


def heads_of(truth: dict[str, Any]) -> int:
    return int(truth["job"]["heads"])


def expected_model(truth: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    return truth["model_split" if "split" in name else "model"]


def merge_parts(parts: list[dict[str, torch.Tensor]], truth: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Put model-parallel parts together as metaseq's attributes say."""
    merged = {}
    for name in parts[0]:
        dim = 0 if name == TIED else truth["partition_dim"].get(name)
        pieces = [part[name] for part in parts]
        if dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs between parts"
            merged[name] = pieces[0]
        elif ".qkv_proj." in name:
            fused = [piece.view(3, piece.shape[0] // 3, *piece.shape[1:]) for piece in pieces]
            merged[name] = torch.cat(fused, dim=1).reshape(-1, *pieces[0].shape[1:])
        else:
            merged[name] = torch.cat(pieces, dim=dim)
    return merged


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(scope="module", params=GOOD)
def fixture(request: pytest.FixtureRequest) -> tuple[str, Path, dict[str, Any]]:
    folder = FIXTURES / request.param
    return request.param, folder, load(folder / "truth.pt")


def test_unsharded_result_equals_the_truth(fixture: Any, tmp_path: Path) -> None:
    name, folder, truth = fixture
    reshard_here(folder, tmp_path, mp=1, dp=1, flat=False, prefix="whole")
    model = load(tmp_path / "whole.pt")["model"]
    assert_same(model, expected_model(truth, name))
    assert model[TIED].data_ptr() == model["decoder.embed_tokens.weight"].data_ptr(), "tied tensors share their bytes"


@pytest.mark.parametrize("mesh", SHAPES, ids=lambda mesh: f"mp{mesh[0]}dp{mesh[1]}")
def test_flat_result_is_read_by_fairscale_and_equals_the_truth(
    fixture: Any, mesh: tuple[int, int], tmp_path: Path
) -> None:
    name, folder, truth = fixture
    mp, dp = mesh
    sizes = [truth["job"][key] for key in ("heads", "f", "vocab")]
    if any(size % mp for size in sizes):
        with pytest.raises(Exception, match="cannot be divided"):
            reshard_here(folder, tmp_path / "out", mp=mp, dp=dp, flat=True)
        assert not (tmp_path / "out").exists()
        return
    reshard_here(folder, tmp_path, mp=mp, dp=dp, flat=True, prefix="re")
    parts = []
    for part in range(mp):
        shards = [load(tmp_path / f"re-model_part-{part}-shard{shard}.pt") for shard in range(dp)]
        weights, metadata = [shard["model"] for shard in shards], [shard["shard_metadata"] for shard in shards]
        parts.append(FullyShardedDataParallel.consolidate_shard_weights(weights, metadata))
    expected = dict(expected_model(truth, name))
    if TIED not in parts[0]:
        # fairscale looks for shared parameters in the last unit only; metaseq's loader adds this one itself.
        assert metadata[0]["param_metadata"][0]["shared_param_info"] == [("decoder.embed_tokens.weight", TIED)]
        del expected[TIED]
    assert_same(merge_parts(parts, truth), expected)


@pytest.mark.parametrize("mp", [1, 2, 4])
@pytest.mark.parametrize("projection", ["fused", "split"])
def test_unflat_parts_equal_the_truth(fixture: Any, mp: int, projection: str, tmp_path: Path) -> None:
    _, folder, truth = fixture
    if any(truth["job"][key] % mp for key in ("heads", "f", "vocab")):
        pytest.skip(f"{mp} parts do not divide this model: refused, as the test of flat results shows")
    reshard_here(folder, tmp_path, mp=mp, dp=1, flat=False, prefix="re", projection=Projection(projection))
    names = [f"re-model_part-{part}.pt" for part in range(mp)] if mp > 1 else ["re.pt"]
    merged = merge_parts([load(tmp_path / name)["model"] for name in names], truth_with_projection(truth))
    assert_same(
        merged, truth["model_split" if projection == "split" else "model"] if has(truth, projection) else merged
    )
    assert has_projection(merged, projection)


def has(truth: dict[str, Any], projection: str) -> bool:
    """The truth of split sets has no fused form."""
    return projection == "split" or any(".qkv_proj." in name for name in truth["model"])


def has_projection(model: dict[str, torch.Tensor], projection: str) -> bool:
    return any(
        (".qkv_proj." in name) == (projection == "fused") for name in model if "_proj." in name and ".out" not in name
    )


def truth_with_projection(truth: dict[str, Any]) -> dict[str, Any]:
    """Every form of the attention's input is cut along its rows."""
    dims = dict(truth["partition_dim"])
    for name in [name for name in dims if ".self_attn." in name and dims[name] == 0]:
        head, _, last = name.rpartition(".")
        stem = head.rpartition(".")[0]
        dims.update({f"{stem}.{kind}_proj.{last}": 0 for kind in ("qkv", "k", "v", "q")})
    return {**truth, "partition_dim": dims}


def test_result_loads_without_running_code_where_the_source_did(tmp_path: Path) -> None:
    reshard_here(FIXTURES / "mp2dp2-fp16-fused", tmp_path, mp=1, dp=1, flat=False, prefix="whole")
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(tmp_path / "whole.pt", weights_only=True, mmap=True)
    assert loaded["cfg"]["model"].model_parallel_size == 1
    assert zipfile.ZipFile(tmp_path / "whole.pt").testzip() is None


def test_every_target_file_is_what_torch_would_save(fixture: Any, tmp_path: Path) -> None:
    name, folder, _ = fixture
    if "dictconfig" in name:
        pytest.skip("its classes are not installed, so torch cannot save its objects")
    reshard_here(folder, tmp_path / "ours", mp=1, dp=3, flat=True, prefix="re")
    (tmp_path / "torch").mkdir()
    for shard in range(3):
        file = f"re-model_part-0-shard{shard}.pt"
        # torch's other unpickler interns the names of attributes, so that even its own files change when saved again.
        with torch.serialization.safe_globals([argparse.Namespace]):
            torch.save(torch.load(tmp_path / "ours" / file, weights_only=True), tmp_path / "torch" / file)
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "torch" / file).read_bytes(), file


def test_state_that_only_the_first_rank_has_stays_with_it(tmp_path: Path) -> None:
    reshard_here(FIXTURES / "mp2dp2-fp16-fused", tmp_path, mp=2, dp=3, flat=True, prefix="re")
    for mp in range(2):
        state = load(tmp_path / f"re-model_part-{mp}-shard2.pt")["extra_state"]
        source = load(FIXTURES / "mp2dp2-fp16-fused" / f"checkpoint_last-model_part-{mp}-shard1.pt")["extra_state"]
        assert torch.equal(
            state["rng_tracker_states"]["model-parallel-rng"], source["rng_tracker_states"]["model-parallel-rng"]
        )
