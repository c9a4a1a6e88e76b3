"""Every tensor of every known variant matches exactly one rule; what does not is told, with both lists."""

from __future__ import annotations

import pytest

from tasks.families.opt import OPT
from tasks.family import clean_name, global_shape, local_box
from tests.running import FIXTURES, load


@pytest.mark.parametrize("name", sorted(path.parent.name for path in FIXTURES.glob("*/truth.pt")))
def test_rules_agree_with_the_producers_own_partition_dim(name: str) -> None:
    truth = load(FIXTURES / name / "truth.pt")
    assert OPT.check_names(truth["model"]) == []
    for tensor, dim in truth["partition_dim"].items():
        if tensor == "decoder.output_projection.weight":
            continue
        assert OPT.rule(tensor).cut == dim, tensor


def test_order_is_that_of_the_modules() -> None:
    truth = load(FIXTURES / "edge-swiglu-mp2dp2-fp32" / "truth.pt")
    names = list(truth["model"])
    assert sorted({*names}, key=OPT.order) == names


def test_order_of_layers_is_numeric() -> None:
    names = [f"decoder.layers.{i}.fc1.weight" for i in (10, 2, 1)]
    assert sorted(names, key=OPT.order) == [f"decoder.layers.{i}.fc1.weight" for i in (1, 2, 10)]


def test_unknown_names_and_missing_roles_are_told() -> None:
    problems = OPT.check_names(["decoder.embed_tokens.weight", "decoder.layers.0.moe.gate.weight"])
    said = "\n".join(map(str, problems))
    assert "decoder.layers.0.moe.gate.weight" in said
    assert "attention input" in said
    assert all(problem.kind == 4 for problem in problems)


def test_fused_and_split_names_lead_to_each_other() -> None:
    fused = "decoder.layers.3.layers.1.self_attn.qkv_proj.weight"
    members = OPT.members(fused)
    assert [member.rpartition("self_attn.")[2] for member in members] == [
        "k_proj.weight",
        "v_proj.weight",
        "q_proj.weight",
    ]
    assert {OPT.fused_name(member) for member in members} == {fused}
    assert OPT.members("decoder.layers.0.fc1.bias") == ("decoder.layers.0.fc1.bias",)


def test_wrappers_are_left_out_of_names_wherever_they_stand() -> None:
    assert clean_name("decoder._fpw_module.layers.0._fsdp_wrapped_module.fc1.bias") == "decoder.layers.0.fc1.bias"


def test_boxes_of_parts_make_the_whole() -> None:
    assert [local_box((8, 6), 1, part, 3).start for part in range(3)] == [(0, 0), (0, 2), (0, 4)]
    assert local_box((8, 6), None, 2, 3).shape == global_shape((8, 6), None, 3)
