"""The optimizer's odd forms: fp16 moments with factors, amsgrad, parameters without state, groups, unsharded state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import ReshardError
from tests.pipeline.test_fixtures import assert_same, merge_parts
from tests.pipeline.test_state import assert_equal_trees, moments
from tests.running import FIXTURES, load, reshard_here

SOURCE = FIXTURES / "mp2dp4-fp16-fused"
Shard = dict[str, Any]


def edited(folder: Path, edit: Callable[[Shard, int, int], None]) -> Path:
    """Save a checkpoint of the real trainer again, with its optimizer's state edited."""
    folder.mkdir()
    for mp in range(2):
        for dp in range(4):
            name = f"checkpoint_last-model_part-{mp}-shard{dp}.pt"
            shard = load(SOURCE / name)
            edit(shard["last_optimizer_state"], mp, dp)
            torch.save(shard, folder / name)
    return folder


def halve(scales: Callable[[int, int, int], float], *, as_tensor: bool) -> Callable[[Shard, int, int], None]:
    """Make fp16 moments with factors, as metaseq's `--fp16-adam-stats` keeps them."""

    def edit(state: Shard, mp: int, dp: int) -> None:
        for number, entry in state["state"].items():
            for moment in ("exp_avg", "exp_avg_sq"):
                scale = scales(number, mp, dp)
                entry[moment] = (entry[moment] * 1000).half()
                entry[f"{moment}_scale"] = torch.tensor(scale) if as_tensor else scale

    return edit


def true_moments(folder: Path, mesh: tuple[int, int], moment: str) -> dict[str, torch.Tensor]:
    """Read what the trainer would: every moment times its own shard's factor."""
    truth = load(SOURCE / "truth.pt")
    parts = []
    for mp in range(mesh[0]):
        shards = [load(folder / f"checkpoint_last-model_part-{mp}-shard{dp}.pt") for dp in range(mesh[1])]
        for shard in shards:
            for entry in shard["last_optimizer_state"]["state"].values():
                entry[moment] = entry[moment].float() * float(entry.get(f"{moment}_scale", 1.0))
        parts.append(moments(shards, moment))
    return merge_parts(parts, truth)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_equal_factors_are_kept_and_no_bit_changes(as_tensor: bool, tmp_path: Path) -> None:
    source = edited(tmp_path / "source", halve(lambda *_: 0.37, as_tensor=as_tensor))
    reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_same(true_moments(tmp_path / "out", (1, 3), moment), true_moments(source, (2, 4), moment))
    entry = load(tmp_path / "out" / "checkpoint_last-model_part-0-shard2.pt")["last_optimizer_state"]["state"][1]
    assert entry["exp_avg"].dtype == torch.float16
    assert entry["exp_avg_scale"] == pytest.approx(0.37)
    assert isinstance(entry["exp_avg_scale"], torch.Tensor) == as_tensor


def test_factors_that_differ_by_powers_of_two_become_one_exactly(tmp_path: Path) -> None:
    source = edited(tmp_path / "source", halve(lambda number, mp, dp: 2.0 ** (dp % 2), as_tensor=False))
    reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_same(true_moments(tmp_path / "out", (1, 3), moment), true_moments(source, (2, 4), moment))


def test_factors_that_cannot_become_one_are_refused_and_fp32_keeps_the_true_values(tmp_path: Path) -> None:
    source = edited(tmp_path / "source", halve(lambda number, mp, dp: 0.3 + dp / 7, as_tensor=True))
    with pytest.raises(Exception, match="--moments fp32") as caught:
        reshard_here(source, tmp_path / "refused", mp=1, dp=3, flat=True, keep_state=True)
    assert "exp_avg" in str(caught.value) or "moments" in str(caught.value)
    assert not (tmp_path / "refused" / "manifest.json").exists()
    reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True, moments_dtype="float32")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_same(true_moments(tmp_path / "out", (1, 3), moment), true_moments(source, (2, 4), moment))
    entry = load(tmp_path / "out" / "checkpoint_last-model_part-0-shard0.pt")["last_optimizer_state"]["state"][0]
    assert entry["exp_avg"].dtype == torch.float32
    assert "exp_avg_scale" not in entry


def test_more_moments_and_parameters_without_state_are_kept(tmp_path: Path) -> None:
    def edit(state: Shard, mp: int, dp: int) -> None:
        del state["state"][1]
        for entry in state["state"].values():
            entry["max_exp_avg_sq"] = entry["exp_avg_sq"] * 2

    source = edited(tmp_path / "source", edit)
    reshard_here(source, tmp_path / "flat", mp=2, dp=3, flat=True, keep_state=True)
    state = load(tmp_path / "flat" / "checkpoint_last-model_part-1-shard1.pt")["last_optimizer_state"]
    assert list(state["state"]) == [0, 2]
    assert list(state["state"][0]) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert torch.equal(state["state"][2]["max_exp_avg_sq"], state["state"][2]["exp_avg_sq"] * 2)
    assert state["param_groups"][0]["params"] == [0, 1, 2]

    reshard_here(source, tmp_path / "unflat", mp=2, dp=1, flat=False, keep_state=True)
    named = load(tmp_path / "unflat" / "checkpoint_last-model_part-0.pt")["last_optimizer_state"]
    without = [number for number, name in named["param_names"].items() if name.startswith("decoder.layers.0.")]
    assert without
    assert set(named["state"]) == set(named["param_names"]) - set(without)
    assert all(named["param_id_map"][number] is None for number in without)
    reshard_here(tmp_path / "unflat", tmp_path / "back", mp=2, dp=3, flat=True, keep_state=True)
    for mp in range(2):
        for dp in range(3):
            name = f"checkpoint_last-model_part-{mp}-shard{dp}.pt"
            left, right = (load(tmp_path / where / name)["last_optimizer_state"] for where in ("flat", "back"))
            assert_equal_trees(left, right, name)


def test_groups_follow_their_parameters_where_names_tell_which_they_are(tmp_path: Path) -> None:
    reshard_here(SOURCE, tmp_path / "named", mp=2, dp=1, flat=False, keep_state=True)
    for path in (tmp_path / "named").glob("*.pt"):
        whole = load(path)
        state = whole["last_optimizer_state"]
        first, names = state["param_groups"][0], state["param_names"]
        biases = [number for number, name in names.items() if name.endswith("bias")]
        others = [number for number in names if number not in biases]
        state["param_groups"] = [{**first, "params": others}, {**first, "weight_decay": 0.0, "params": biases}]
        torch.save(whole, path)
    reshard_here(tmp_path / "named", tmp_path / "out", mp=1, dp=1, keep_state=True)
    state = load(tmp_path / "out" / "checkpoint_last.pt")["last_optimizer_state"]
    in_second = {state["param_names"][number] for number in state["param_groups"][1]["params"]}
    assert in_second == {name for name in state["param_names"].values() if name.endswith("bias")}
    assert sorted(n for group in state["param_groups"] for n in group["params"]) == list(state["param_names"])
    with pytest.raises(ReshardError, match="different param_groups") as caught:
        reshard_here(tmp_path / "named", tmp_path / "flat", mp=1, dp=2, flat=True, keep_state=True)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "groups", [[[0, 1]], [[0, 1], [2]], [[0, 1, 2, 3]], [[]], [[0, 1, 2, 2]], [[0, 2], [1]]], ids=str
)
def test_ids_that_may_be_of_other_parameters_are_refused(groups: list[list[int]], tmp_path: Path) -> None:
    """torch numbers what the optimizer was given, through all its groups: these ids may be of any parameter."""

    def edit(state: Shard, mp: int, dp: int) -> None:
        state["param_groups"] = [{**state["param_groups"][0], "params": ids} for ids in groups]

    source = edited(tmp_path / "source", edit)
    with pytest.raises(ReshardError, match="optimizer-ids") as caught:
        reshard_here(source, tmp_path / "out", mp=1, dp=2, flat=True, keep_state=True)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("flat", [True, False])
def test_factors_of_fp32_moments_are_taken_up_too(flat: bool, tmp_path: Path) -> None:
    """Without --memory-efficient-fp16 metaseq saves everything in fp32, and the factors stay beside it."""

    def edit(state: Shard, mp: int, dp: int) -> None:
        for entry in state["state"].values():
            entry["exp_avg_scale"] = entry["exp_avg_sq_scale"] = 2.0

    source = edited(tmp_path / "source", edit)
    options: dict[str, Any] = {"keep_state": True, "moments_dtype": "float32"}
    reshard_here(source, tmp_path / "out", mp=1, dp=3 if flat else 1, flat=flat, **options)
    if flat:
        assert_same(true_moments(tmp_path / "out", (1, 3), "exp_avg"), true_moments(source, (2, 4), "exp_avg"))
        return
    state = load(tmp_path / "out" / "checkpoint_last.pt")["last_optimizer_state"]
    expected = true_moments(source, (2, 4), "exp_avg")
    for number, name in state["param_names"].items():
        assert torch.equal(state["state"][number]["exp_avg"], expected[name]), name


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_factors_that_are_none_are_refused(factor: float, tmp_path: Path) -> None:
    source = edited(tmp_path / "source", halve(lambda number, mp, dp: factor if dp else 1.0, as_tensor=True))
    with pytest.raises(ReshardError, match="is no factor") as caught:
        reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    assert caught.value.exit_code == 3


def test_replicated_moments_may_be_rounded_under_the_factors_of_their_parts(tmp_path: Path) -> None:
    source = edited(tmp_path / "source", halve(lambda number, mp, dp: 1.0 + mp, as_tensor=False))
    reshard_here(source, tmp_path / "out", mp=2, dp=3, flat=True, keep_state=True)
    entry = load(tmp_path / "out" / "checkpoint_last-model_part-1-shard0.pt")["last_optimizer_state"]["state"][0]
    assert entry["exp_avg_scale"] == 2.0


def test_steps_are_compared_by_value_wherever_they_stand(tmp_path: Path) -> None:
    steps = torch.zeros(8)

    def edit(state: Shard, mp: int, dp: int) -> None:
        for entry in state["state"].values():
            entry["step"] = steps[dp]  # a view: its storage has the same bytes in all files
        steps[dp] = 3.0 + dp

    source = edited(tmp_path / "source", edit)
    with pytest.raises(ReshardError, match="differs between files"):
        reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)


@pytest.mark.parametrize("step", [torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(3)])
def test_steps_of_any_kind_are_kept(step: torch.Tensor, tmp_path: Path) -> None:
    source = edited(tmp_path / "source", lambda state, mp, dp: [e.update(step=step) for e in state["state"].values()])
    reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    entry = load(tmp_path / "out" / "checkpoint_last-model_part-0-shard1.pt")["last_optimizer_state"]["state"][2]
    assert entry["step"].dtype == step.dtype
    assert torch.equal(entry["step"], step)
    reshard_here(source, tmp_path / "whole", mp=1, dp=1, flat=False, keep_state=True)
    assert load(tmp_path / "whole" / "checkpoint_last.pt")["last_optimizer_state"]["state"][5]["step"] == 3


def test_state_that_the_first_shard_lacks_is_noticed(tmp_path: Path) -> None:
    source = edited(tmp_path / "source", lambda state, mp, dp: state["state"].pop(1) if dp == 0 else None)
    for dp in (1, 3):
        with pytest.raises(ReshardError) as caught:
            reshard_here(source, tmp_path / "out", mp=1, dp=dp, flat=True, keep_state=True)
        assert caught.value.exit_code == 3


def test_older_forms_of_state_are_refused_and_empty_ones_kept(tmp_path: Path) -> None:
    for name, state in (("older", {"optimizer": {"state": {}}}), ("none", {"last_optimizer_state": None})):
        (tmp_path / name).mkdir()
        for path in FIXTURES.glob("mp8dp1-fp16-fused-noopt/check*.pt"):
            torch.save({**load(path), **state}, tmp_path / name / path.name)
    with pytest.raises(ReshardError, match="--state drop"):
        reshard_here(tmp_path / "older", tmp_path / "out", mp=2, keep_state=True)
    reshard_here(tmp_path / "none", tmp_path / "out", mp=2, keep_state=True)
    file = load(tmp_path / "out" / "checkpoint_last-model_part-0-shard0.pt")
    assert file["last_optimizer_state"] is None


def test_averages_of_tied_weights_must_be_equal_and_stay_as_they_are(tmp_path: Path) -> None:
    tied, first = "decoder.output_projection.weight", "decoder.embed_tokens.weight"
    reshard_here(FIXTURES / "edge-ema-mp2dp2-fp16", tmp_path / "unflat", mp=1, dp=1, flat=False, keep_state=True)
    path = tmp_path / "unflat" / "checkpoint_last.pt"
    whole = load(path)
    for name, edit in {
        "equal": lambda ema: ema.update({tied: ema[first].clone()}),
        "differs": lambda ema: ema.update({tied: ema[first] + 1}),
        "one": lambda ema: ema.pop(tied),
        "other": lambda ema: ema.pop(first),
    }.items():
        ema = dict(whole["extra_state"]["ema"])
        edit(ema)
        (tmp_path / name).mkdir()
        torch.save({**whole, "extra_state": {**whole["extra_state"], "ema": ema}}, tmp_path / name / "c.pt")
        target = tmp_path / f"{name}-out"
        if name in ("differs", "other"):
            with pytest.raises(ReshardError, match=r"decoder\.output_projection"):
                reshard_here(tmp_path / name, target, mp=2, keep_state=True)
            continue
        reshard_here(tmp_path / name, target, mp=2, keep_state=True)
        assert (tied in load(target / "c-model_part-0.pt")["extra_state"]["ema"]) == (name == "equal")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda state, mp, dp: state["state"][1].update(step=7) if (mp, dp) == (1, 2) else None,
            "differs between files",
        ),
        (lambda state, mp, dp: state["state"].pop(1) if (mp, dp) == (1, 2) else None, "exp_avg"),
        (
            lambda state, mp, dp: state["state"][1].update(exp_avg=torch.zeros(7)) if (mp, dp) == (1, 2) else None,
            "does not fit its parameter",
        ),
        (lambda state, mp, dp: state.pop("param_groups"), "--state drop"),
        (lambda state, mp, dp: state["state"][0]["exp_avg"].add_(1) if mp == 1 else None, "not the same"),
    ],
    ids=["step", "missing", "length", "form", "replica"],
)
def test_state_that_contradicts_itself_is_refused(edit: Any, said: str, tmp_path: Path) -> None:
    source = edited(tmp_path / "source", edit)
    with pytest.raises(ReshardError) as caught:
        reshard_here(source, tmp_path / "out", mp=1, dp=2, flat=True, keep_state=True)
    assert caught.value.exit_code == 3
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()
    reshard_here(source, tmp_path / "out", mp=1, dp=2, flat=True, keep_state=False)


def test_unsharded_state_on_the_first_rank_alone_is_read(tmp_path: Path) -> None:
    """The form of fairscale's `gather_full_optim_state_dict`: one file has everything, the others have -1."""
    reshard_here(SOURCE, tmp_path / "whole", mp=2, dp=1, flat=False, keep_state=True)
    reshard_here(SOURCE, tmp_path / "direct", mp=1, dp=3, flat=True, keep_state=True)
    source = tmp_path / "source"
    source.mkdir()
    for mp in range(2):
        whole = load(tmp_path / "whole" / f"checkpoint_last-model_part-{mp}.pt")["last_optimizer_state"]
        del whole["param_names"]  # fairscale writes none
        for dp in range(4):
            name = f"checkpoint_last-model_part-{mp}-shard{dp}.pt"
            shard = load(SOURCE / name)
            shard["last_optimizer_state"] = whole if dp == 0 else -1
            torch.save(shard, source / name)
    reshard_here(source, tmp_path / "out", mp=1, dp=3, flat=True, keep_state=True)
    for dp in range(3):
        name = f"checkpoint_last-model_part-0-shard{dp}.pt"
        left, right = (load(tmp_path / where / name)["last_optimizer_state"] for where in ("direct", "out"))
        assert_equal_trees(left, right, name)


def test_two_parameters_never_share_a_step(tmp_path: Path) -> None:
    """Steps are counted in place, and fairscale would cut a tensor of one number in an unflat file into shards."""
    reshard_here(FIXTURES / "edge-opt-steptensor", tmp_path / "unflat", mp=1, dp=1, flat=False, keep_state=True)
    whole = load(tmp_path / "unflat" / "checkpoint_last.pt")["last_optimizer_state"]
    assert [entry["step"] for entry in whole["state"].values()] == [3.0] * 28
    assert whole["tensor_numbers"] == {"step": "float32"}
    reshard_here(tmp_path / "unflat", tmp_path / "flat", mp=2, dp=1, flat=True, keep_state=True)
    states = load(tmp_path / "flat" / "checkpoint_last-model_part-1-shard0.pt")["last_optimizer_state"]["state"]
    steps = [entry["step"] for entry in states.values()]
    assert all(torch.equal(step, torch.tensor(3.0)) for step in steps)
    assert len({step.untyped_storage().data_ptr() for step in steps}) == len(steps) == 3


def test_drop_leaves_all_of_it_out_by_name(tmp_path: Path) -> None:
    result = reshard_here(FIXTURES / "edge-ema-mp2dp2-fp16", tmp_path, mp=2, dp=1, flat=True)
    assert result["dropped"] == ["extra_state.ema", "extra_state.ema_fp32_params", "last_optimizer_state"]
    file = load(tmp_path / "checkpoint_last-model_part-0-shard0.pt")
    assert "last_optimizer_state" not in file
    assert not {"ema", "ema_fp32_params"} & set(file["extra_state"])
