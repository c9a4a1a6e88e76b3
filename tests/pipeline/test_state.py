"""Training state of real checkpoints against the state of the unsharded model, for every pair of shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel

from tests.pipeline.test_fixtures import assert_same, merge_parts
from tests.running import FIXTURES, load, reshard_here

WITH_STATE = sorted(
    path.name
    for path in FIXTURES.iterdir()
    if path.is_dir() and not path.name.startswith(("bad", "released")) and "noopt" not in path.name
)
# All that the fixtures have, so that every pair of them is tried, and one that none has.
SHAPES = [(1, 1), (1, 3), (1, 8), (2, 2), (2, 3), (2, 4), (4, 2), (4, 3), (8, 1), (1, 5)]


@pytest.fixture(scope="module", params=WITH_STATE)
def fixture(request: pytest.FixtureRequest) -> tuple[str, Path, dict[str, Any]]:
    folder = FIXTURES / request.param
    return request.param, folder, load(folder / "truth.pt")


def divides(truth: dict[str, Any], mp: int) -> bool:
    return not any(truth["job"][key] % mp for key in ("heads", "f", "vocab"))


def consolidate(shards: list[dict[str, Any]], values: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Unflatten one part by fairscale; `values` stand in for the weights of the flat parameters."""
    metadata = [shard["shard_metadata"] for shard in shards]
    return FullyShardedDataParallel.consolidate_shard_weights(values, metadata, with_module_buffers=False)


def keys_of(shard: dict[str, Any]) -> list[str]:
    units = shard["shard_metadata"]["param_metadata"]
    return [f"{unit['fsdp_path']}.flat_param_0" if unit["fsdp_path"] else "flat_param_0" for unit in units]


def moments(shards: list[dict[str, Any]], moment: str) -> dict[str, torch.Tensor]:
    """Read a moment of one part: index order is `param_metadata` order, padding that of the weights."""
    values = [
        {key: shard["last_optimizer_state"]["state"][number][moment] for number, key in enumerate(keys_of(shard))}
        for shard in shards
    ]
    found = consolidate(shards, values)
    found.pop("decoder.output_projection.weight", None)
    return found


@pytest.mark.parametrize("mesh", SHAPES, ids=lambda mesh: f"mp{mesh[0]}dp{mesh[1]}")
def test_moments_follow_their_parameters(fixture: Any, mesh: tuple[int, int], tmp_path: Path) -> None:
    _, folder, truth = fixture
    mp, dp = mesh
    if not divides(truth, mp):
        pytest.skip(f"{mp} parts do not divide this model")
    reshard_here(folder, tmp_path, mp=mp, dp=dp, flat=True, prefix="re", keep_state=True)
    parts = [[load(tmp_path / f"re-model_part-{p}-shard{d}.pt") for d in range(dp)] for p in range(mp)]
    for moment in ("exp_avg", "exp_avg_sq"):
        merged = merge_parts([moments(shards, moment) for shards in parts], truth)
        assert_same(merged, {key: state[moment] for key, state in truth["optim"].items()})
    for shard in (shard for shards in parts for shard in shards):
        state = shard["last_optimizer_state"]
        files = (path for path in folder.glob("checkpoint_*0-shard0.pt") if path.stat().st_size > 1000)
        source = load(next(files))["last_optimizer_state"]
        assert state.get("loss_scale") == source.get("loss_scale")
        assert state["param_groups"] == source["param_groups"]
        assert [float(entry["step"]) for entry in state["state"].values()] == [3.0] * len(source["state"])
        assert [type(entry["step"]) for entry in state["state"].values()] == [
            type(entry["step"]) for entry in source["state"].values()
        ]


def test_unflat_state_is_what_fairscale_gathers(fixture: Any, tmp_path: Path) -> None:
    _, folder, truth = fixture
    reshard_here(folder, tmp_path, mp=1, dp=1, flat=False, prefix="re", keep_state=True)
    state = load(tmp_path / "re.pt")["last_optimizer_state"]
    names = state["param_names"]
    assert list(names.values()) == truth["flat_order"]
    for number, name in names.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][number][moment], truth["optim"][name][moment]), (name, moment)
            assert state["state"][number][moment].shape == truth["optim"][name][moment].shape
        assert float(state["state"][number]["step"]) == truth["optim"][name]["step"]
    if "param_id_map" in truth["optim_rest"]:
        assert {key: state[key] for key in truth["optim_rest"]} == truth["optim_rest"]


@pytest.mark.parametrize("middle", [{"mp": 1, "dp": 5, "flat": True}, {"mp": 1, "dp": 1, "flat": False}])
def test_there_and_back_is_the_identity_state_included(fixture: Any, middle: dict[str, Any], tmp_path: Path) -> None:
    _, folder, truth = fixture
    back = {"mp": truth["job"]["mp"], "dp": truth["job"]["dp"], "flat": True, "prefix": "re", "keep_state": True}
    reshard_here(folder, tmp_path / "direct", **back)
    reshard_here(folder, tmp_path / "middle", keep_state=True, **middle)
    reshard_here(tmp_path / "middle", tmp_path / "back", **back)
    for path in (tmp_path / "direct").glob("*.pt"):
        direct, round_trip = load(path), load(tmp_path / "back" / path.name)
        for key in ("model", "last_optimizer_state", "shard_metadata"):
            assert_equal_trees(direct[key], round_trip[key], key)
        for key in ("ema", "ema_fp32_params"):
            assert_equal_trees(direct["extra_state"].get(key), round_trip["extra_state"].get(key), key)


@pytest.mark.parametrize("middle", [{"dp": 5, "flat": True}, {"dp": 1, "flat": False}])
def test_there_and_back_gives_the_same_bytes_where_mp_stays(
    fixture: Any, middle: dict[str, Any], tmp_path: Path
) -> None:
    _, folder, truth = fixture
    mp = truth["job"]["mp"]
    back = {"mp": mp, "dp": truth["job"]["dp"], "flat": True, "prefix": "re", "keep_state": True}
    reshard_here(folder, tmp_path / "direct", **back)
    reshard_here(folder, tmp_path / "middle", mp=mp, keep_state=True, **middle)
    reshard_here(tmp_path / "middle", tmp_path / "back", **back)
    for path in (tmp_path / "direct").glob("*.pt"):
        if int(path.stem.rpartition("shard")[2]) < middle["dp"]:
            assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("middle", [{"mp": 2, "dp": 5, "flat": True}, {"mp": 2, "dp": 1, "flat": False}])
def test_a_detour_changes_nothing(middle: dict[str, Any], tmp_path: Path) -> None:
    folder = FIXTURES / "mp4dp3-fp32-fused"
    target = {"mp": 1, "dp": 4, "flat": True, "prefix": "re", "keep_state": True}
    reshard_here(folder, tmp_path / "direct", **target)
    reshard_here(folder, tmp_path / "middle", keep_state=True, **middle)
    reshard_here(tmp_path / "middle", tmp_path / "detour", **target)
    for path in (tmp_path / "direct").glob("*.pt"):
        if int(path.stem.rpartition("shard")[2]) >= middle["dp"]:
            continue  # its metrics were another rank's
        assert path.read_bytes() == (tmp_path / "detour" / path.name).read_bytes(), path.name


def assert_equal_trees(left: Any, right: Any, where: str) -> None:
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_equal_trees(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_equal_trees(one, other, f"{where}[{number}]")
    else:
        assert left == right, where


@pytest.mark.parametrize("mesh", [(1, 3), (2, 1)])
def test_averages_are_resharded_like_the_model(mesh: tuple[int, int], tmp_path: Path) -> None:
    folder = FIXTURES / "edge-ema-mp2dp2-fp16"
    truth = load(folder / "truth.pt")
    mp, dp = mesh
    for target in ("there", "whole"):
        shape = {"mp": mp, "dp": dp, "flat": True} if target == "there" else {"mp": 1, "dp": 1, "flat": False}
        reshard_here(folder, tmp_path / target, prefix="re", keep_state=True, **shape)
    whole = load(tmp_path / "whole" / "re.pt")["extra_state"]
    source = [[load(folder / f"checkpoint_last-model_part-{p}-shard{d}.pt") for d in range(2)] for p in range(2)]
    parts = [[load(tmp_path / "there" / f"re-model_part-{p}-shard{d}.pt") for d in range(dp)] for p in range(mp)]
    for key in ("ema", "ema_fp32_params"):
        expected = merge_parts([consolidate(s, [x["extra_state"][key] for x in s]) for s in source], truth)
        actual = merge_parts([consolidate(s, [x["extra_state"][key] for x in s]) for s in parts], truth)
        assert_same(actual, expected)
        for name, tensor in expected.items():
            assert torch.equal(whole[key][name], tensor), name
    assert torch.equal(parts[0][0]["extra_state"]["ema"]["decoder.version"], whole["ema"]["decoder.version"])
