"""What inspect tells of real checkpoints, held against how they were made."""

from __future__ import annotations

import json

import pytest

from pipeline.inspect import in_words, inspect
from tests.running import FIXTURES, load

MADE = sorted(path.parent.name for path in FIXTURES.glob("*/job.json") if not path.parent.name.startswith("bad"))


@pytest.mark.parametrize("name", MADE)
def test_it_tells_how_a_checkpoint_was_made(name: str) -> None:
    job = json.loads((FIXTURES / name / "job.json").read_text())
    told = inspect(str(FIXTURES / name))
    assert (told["mp"], told["dp"], told["exit_code"], told["problems"]) == (job["mp"], job["dp"], 0, [])
    assert (told["layout"], told["shard_metadata"]) == ("flat", True)
    assert told["dtypes"].keys() == {"float16" if job["dtype"] == "fp16" else "float32"}
    assert told["qkv"] == job["qkv"]
    assert told["config"]["heads"] == job["heads"]
    assert told["fsdp_units"] == (1 if job.get("wrap") == "root" else 1 + job["layers"] // job.get("block", 1))
    truth = load(FIXTURES / name / "truth.pt")["model"]
    sizes = {key: tensor.numel() for key, tensor in truth.items() if key != "decoder.output_projection.weight"}
    assert told["parameters"] == sum(sizes.values())
    assert set(told["training_state_bytes"]) >= {"last_optimizer_state"}
    averages = {"extra_state.ema", "extra_state.ema_fp32_params"} if job.get("ema") else set()
    assert set(told["training_state_bytes"]) - {"last_optimizer_state"} == averages
    assert all(job["heads"] % mp == 0 for mp in told["possible_mp"])


def test_sizes_of_state_are_those_of_its_tensors() -> None:
    told = inspect(str(FIXTURES / "mp1dp1-fp32-fused"))
    state = load(FIXTURES / "mp1dp1-fp32-fused" / "checkpoint_last-model_part-0-shard0.pt")["last_optimizer_state"]
    moments = [entry[key] for entry in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert told["training_state_bytes"] == {"last_optimizer_state": sum(moment.nbytes for moment in moments)}


def test_problems_of_contents_are_told_with_the_rest() -> None:
    told = inspect(str(FIXTURES / "bad-truncated"))
    assert told["exit_code"] == 3
    assert "shard1.pt" in told["problems"][0]
    assert "truncated" in in_words(told)
