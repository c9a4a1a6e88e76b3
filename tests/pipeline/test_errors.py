"""Everything wrong is told before the first write: by file and tensor, with a next step, all of it at once."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.errors import ReshardError
from tasks.target import Projection
from tests.oracle import Edit, Layout, Objects, Spec, assert_same_tensors, build, load, read, write
from tests.pipeline.inline_run import contents, refusal, reshard, shards

SMALL = Spec(layers=2, heads=4, head_dim=2, inner=8, vocabulary=8, tame=True)
FC1 = "decoder.layers.1.fc1.weight"
BIAS = "decoder.layers.1.fc2.bias"
SOURCE, PLAN, TARGET = 3, 4, 7


def save(folder: Path, layout: Layout, *, spec: Spec = SMALL, edit: Edit | None = None, metadata: bool = True) -> Path:
    write(folder, build(spec), layout, edit=edit, metadata=metadata)
    return folder


def on(mp: int, dp: int, change: Callable[[Objects], None]) -> Edit:
    """Change the objects of one file."""

    def edit(objects: Objects, at_mp: int, at_dp: int) -> Objects:
        if (at_mp, at_dp) == (mp, dp):
            change(objects)
        return objects

    return edit


def everywhere(change: Callable[[Objects], None]) -> Edit:
    def edit(objects: Objects, mp: int, dp: int) -> Objects:
        change(objects)
        return objects

    return edit


def references(fault: ReshardError) -> list[str]:
    return [problem.reference for problem in fault.problems]


# -- the grid of files


@pytest.mark.parametrize("hole", [(0, 1), (1, 0), (0, 0), (1, 2)])
def test_a_hole_in_the_grid_is_named(tmp_path: Path, hole: tuple[int, int]) -> None:
    save(tmp_path / "a", Layout(3, 3, True), spec=replace(SMALL, heads=3, inner=9, vocabulary=9))
    (tmp_path / "a" / f"reshard-model_part-{hole[0]}-shard{hole[1]}.pt").unlink()
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, f"mp={hole[0]}, dp={hole[1]}", "reshard")


def test_all_holes_are_told_at_once(tmp_path: Path) -> None:
    save(tmp_path / "a", Layout(2, 12, True), spec=replace(SMALL, heads=2))
    for mp, dp in ((0, 2), (1, 10), (1, 1)):
        (tmp_path / "a" / f"reshard-model_part-{mp}-shard{dp}.pt").unlink()
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, "mp=0, dp=2", "mp=1, dp=10", "mp=1, dp=1)")


def test_two_files_of_one_rank_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2, 2, True))
    double = folder / "reshard-model_part-01-shard1.pt"
    double.write_bytes((folder / "reshard-model_part-1-shard1.pt").read_bytes())
    fault = refusal(folder, tmp_path / "b", SOURCE, double.name, "reshard-model_part-1-shard1.pt")
    assert "duplicate-files" in references(fault)


def test_a_missing_part_at_the_end_is_noticed(tmp_path: Path) -> None:
    for flat in (False, True):
        folder = save(tmp_path / f"a{flat}", Layout(4, 1, flat))
        for path in folder.glob("*-model_part-3*.pt"):
            path.unlink()
        fault = refusal(folder, tmp_path / "b", SOURCE, "3 model-parallel parts", "self_attn.out_proj.weight")
        assert "wrong-number-of-parts" in references(fault)


def test_a_missing_part_at_the_end_is_noticed_where_the_layout_is_inferred(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(4, 2, True), metadata=False)
    for path in folder.glob("*-model_part-3*.pt"):
        path.unlink()
    refusal(folder, tmp_path / "b", SOURCE, "model-parallel parts")


@pytest.mark.parametrize("root_only", [False, True])
@pytest.mark.parametrize("metadata", [True, False])
def test_a_missing_shard_at_the_end_is_noticed(tmp_path: Path, metadata: bool, root_only: bool) -> None:
    layout = Layout(2, 5, True, root_only)
    folder = save(tmp_path / "a", layout, metadata=metadata, spec=replace(SMALL, head_dim=4, inner=40, vocabulary=40))
    for path in folder.glob("*-shard4.pt"):
        path.unlink()
    names = ("reshard-model_part-0-shard0.pt", "flat_param_0", "4 shards") if metadata else ("4 shards",)
    refusal(folder, tmp_path / "b", SOURCE, *names)


def test_mixed_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2, 2, True))
    save(folder, Layout(2))
    refusal(folder, tmp_path / "b", SOURCE, "reshard-model_part-0.pt", "reshard-model_part-0-shard0.pt")


def test_several_checkpoints_in_one_folder_are_a_choice(tmp_path: Path) -> None:
    write(tmp_path / "a", build(SMALL), Layout(2), prefix="one")
    write(tmp_path / "a", build(SMALL), Layout(2), prefix="two")
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, "one", "two", "--checkpoint")
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, "three", "one", "two", checkpoint="three")


def test_files_of_two_models_under_one_name_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2, 2, True))
    other = save(tmp_path / "other", Layout(2, 2, True), spec=replace(SMALL, seed=9))
    name = "reshard-model_part-1-shard1.pt"
    (folder / name).write_bytes((other / name).read_bytes())
    # Only replicas can tell: the second part's norms are half of one model, half of another.
    refusal(folder, tmp_path / "b", SOURCE, "model_part-1")


@pytest.mark.parametrize("what", ["nothing", "no such folder", "only a log"])
def test_a_folder_without_checkpoint_is_refused(tmp_path: Path, what: str) -> None:
    if what != "no such folder":
        (tmp_path / "a").mkdir()
    if what == "only a log":
        (tmp_path / "a" / "train.log").write_text("x")
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, str(tmp_path / "a"))


# -- single files


@pytest.mark.parametrize("rest", [0, 1, 100, 0.5, -1])
def test_a_truncated_or_empty_file_is_named(tmp_path: Path, rest: float) -> None:
    folder = save(tmp_path / "a", Layout(2, 2, True))
    path = folder / "reshard-model_part-1-shard0.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * rest) if rest == 0.5 else rest])
    refusal(folder, tmp_path / "b", SOURCE, path.name)


def test_all_damaged_files_are_told_at_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2, 2, True))
    for name, content in (("0-shard1", b"PK\x03\x04 rubbish"), ("1-shard0", b"<html>not found</html>")):
        (folder / f"reshard-model_part-{name}.pt").write_bytes(content)
    path = folder / "reshard-model_part-1-shard1.pt"
    path.write_bytes(path.read_bytes()[:-300])
    fault = refusal(folder, tmp_path / "b", SOURCE, "0-shard1.pt", "1-shard0.pt", "1-shard1.pt")
    assert len(fault.problems) >= 3


@pytest.mark.parametrize("content", [[1, 2], {"weights": 1}, {"model": None}, {"model": {}}, torch.zeros(3)])
def test_a_file_that_holds_no_model_is_named(tmp_path: Path, content: object) -> None:
    folder = save(tmp_path / "a", Layout(2))
    torch.save(content, folder / "reshard-model_part-1.pt")
    refusal(folder, tmp_path / "b", SOURCE, "reshard-model_part-1.pt")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 8).t(), torch.zeros(1).expand(8, 4), torch.zeros(3).to_sparse(), [1.0]]
)
def test_a_tensor_that_is_not_plain_and_contiguous_is_named(tmp_path: Path, tensor: object) -> None:
    folder = save(tmp_path / "a", Layout(1), edit=everywhere(lambda objects: objects["model"].update({FC1: tensor})))
    refusal(folder, tmp_path / "b", SOURCE, "reshard.pt", FC1)


# -- tensors and rules


def test_tensors_that_no_rule_matches_are_all_named(tmp_path: Path) -> None:
    def add(objects: Objects) -> None:
        objects["model"]["decoder.adapter.weight"] = torch.zeros(2)
        objects["model"]["decoder.layers.0.self_attn.rotary.inv_freq"] = torch.zeros(2)

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(add))
    names = ("decoder.adapter.weight", "decoder.layers.0.self_attn.rotary.inv_freq")
    fault = refusal(folder, tmp_path / "b", PLAN, *names)
    assert "unmatched-tensors" in references(fault)


def test_unmatched_names_in_flat_parameters_are_named(tmp_path: Path) -> None:
    def rename(objects: Objects) -> None:
        facts = objects["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]
        facts["names"][0] = "self_attn.everything.weight"

    folder = save(tmp_path / "a", Layout(2, 2, True), edit=everywhere(rename))
    refusal(folder, tmp_path / "b", PLAN, "decoder.layers.0.self_attn.everything.weight")


@pytest.mark.parametrize(
    ("pattern", "role"),
    [
        ("embed_tokens", "token embedding"),
        ("qkv_proj", "attention input"),
        ("out_proj.weight", "attention output"),
        ("fc1", "feed-forward input"),
        ("fc2.weight", "feed-forward output"),
    ],
)
def test_a_role_that_no_tensor_takes_is_named(tmp_path: Path, pattern: str, role: str) -> None:
    def lose(objects: Objects) -> None:
        objects["model"] = {name: tensor for name, tensor in objects["model"].items() if pattern not in name}

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(lose))
    refusal(folder, tmp_path / "b", PLAN, role)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "self_attn.q_proj.bias", "fc1.weight", "fc2.bias"])
def test_a_tensor_that_only_one_layer_lacks_is_named(tmp_path: Path, name: str) -> None:
    lost = f"decoder.layers.1.{name}"
    folder = save(
        tmp_path / "a",
        Layout(2),
        spec=replace(SMALL, fused=False),
        edit=everywhere(lambda objects: objects["model"].pop(lost)),
    )
    refusal(folder, tmp_path / "b", SOURCE, lost)


def test_a_projection_that_one_layer_lacks_is_named_where_the_target_is_fused(tmp_path: Path) -> None:
    lost = "decoder.layers.1.self_attn.v_proj.weight"
    folder = save(
        tmp_path / "a",
        Layout(2),
        spec=replace(SMALL, fused=False),
        edit=everywhere(lambda objects: objects["model"].pop(lost)),
    )
    refusal(folder, tmp_path / "b", SOURCE, lost, projection=Projection.FUSED)


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_missing_part_file_is_noticed(tmp_path: Path, lost: int) -> None:
    model = build(SMALL)
    names = list(model.tensors)
    for part in {0, 1, 2, 3, 4} - {lost}:
        held = {name: model.tensors[name] for name in names[part::5]}
        write(
            tmp_path / "a",
            model,
            Layout(1),
            name=lambda mp, dp, part=part: f"x_part{part}.pt",
            edit=everywhere(lambda objects, held=held: objects.update(model=held)),
        )
    refusal(tmp_path / "a", tmp_path / "b", SOURCE)


def test_a_layer_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    def lose(objects: Objects) -> None:
        objects["model"] = {name: tensor for name, tensor in objects["model"].items() if ".layers.1." not in name}

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(lose))
    refusal(folder, tmp_path / "b", SOURCE, "2 layers", "1")


def test_a_layer_in_the_middle_that_is_not_there_is_noticed_without_cfg(tmp_path: Path) -> None:
    def lose(objects: Objects) -> None:
        del objects["cfg"]
        objects["model"] = {name: tensor for name, tensor in objects["model"].items() if ".layers.1." not in name}

    folder = save(tmp_path / "a", Layout(2), spec=replace(SMALL, layers=3), edit=everywhere(lose))
    refusal(folder, tmp_path / "b", SOURCE, "decoder.layers.1")


def test_a_tensor_that_one_part_lacks_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2), edit=on(1, 0, lambda objects: objects["model"].pop(FC1)))
    refusal(folder, tmp_path / "b", SOURCE, FC1, "1")


def test_a_buffer_that_one_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "a", Layout(2, 3, True), edit=on(1, 2, lambda objects: objects["model"].pop("decoder.version"))
    )
    refusal(folder, tmp_path / "b", SOURCE, "decoder.version", "mp=1", "dp=2")


def test_a_flat_parameter_that_one_shard_lacks_is_named(tmp_path: Path) -> None:
    lost = "decoder.layers.1.flat_param_0"
    folder = save(tmp_path / "a", Layout(2, 3, True), edit=on(1, 2, lambda objects: objects["model"].pop(lost)))
    refusal(folder, tmp_path / "b", SOURCE, lost, "reshard-model_part-1-shard2.pt")


def test_fused_and_split_projections_at_once_are_refused(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attn.k_proj.weight"
    folder = save(
        tmp_path / "a", Layout(1), edit=everywhere(lambda objects: objects["model"].update({name: torch.zeros(8, 8)}))
    )
    refusal(folder, tmp_path / "b", SOURCE, name)


def test_the_same_tensor_in_two_part_files_is_named(tmp_path: Path) -> None:
    model = build(SMALL)
    for part in range(2):
        held = {name: t for number, (name, t) in enumerate(model.tensors.items()) if number % 2 == part or name == FC1}
        write(
            tmp_path / "a",
            model,
            Layout(1),
            name=lambda mp, dp, part=part: f"x_part{part}.pt",
            edit=everywhere(lambda objects, held=held: objects.update(model=held)),
        )
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, FC1, "x_part0.pt", "x_part1.pt")


# -- shapes, lengths, metadata


@pytest.mark.parametrize("name", [FC1, BIAS, "decoder.embed_tokens.weight"])
def test_shapes_that_disagree_between_parts_are_named(tmp_path: Path, name: str) -> None:
    def shorten(objects: Objects) -> None:
        objects["model"][name] = objects["model"][name][:-1].clone()

    folder = save(tmp_path / "a", Layout(2), edit=on(1, 0, shorten))
    refusal(folder, tmp_path / "b", SOURCE, name, "reshard-model_part-0.pt", "reshard-model_part-1.pt")


@pytest.mark.parametrize("wrong", [-1, 1, 1000])
def test_a_wrong_padding_in_the_metadata_is_named(tmp_path: Path, wrong: int) -> None:
    def pad(objects: Objects) -> None:
        objects["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["padding"] += wrong

    folder = save(tmp_path / "a", Layout(2, 3, True), edit=on(1, 2, pad))
    names = ("reshard-model_part-1-shard2.pt", "decoder.layers.0.flat_param_0", "padding")
    refusal(folder, tmp_path / "b", SOURCE, *names)


def test_stale_metadata_of_another_mesh_is_noticed(tmp_path: Path) -> None:
    other = save(tmp_path / "other", Layout(4, 1, True))
    stale = load(shards(other)[0])["shard_metadata"]
    restate = everywhere(lambda objects: objects.update(shard_metadata=stale))
    folder = save(tmp_path / "a", Layout(2, 1, True), edit=restate)
    refusal(folder, tmp_path / "b", SOURCE, "reshard-model_part-0-shard0.pt", "flat_param_0")


def test_metadata_that_differs_between_files_is_named(tmp_path: Path) -> None:
    def rename(objects: Objects) -> None:
        names = objects["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["names"]
        names[0], names[2] = names[2], names[0]

    folder = save(tmp_path / "a", Layout(2, 2, True), edit=on(1, 1, rename))
    refusal(folder, tmp_path / "b", SOURCE, "shard_metadata", "reshard-model_part-1-shard1.pt")


@pytest.mark.parametrize("change", ["numels", "names", "no params", "no padding", "a list"])
def test_metadata_that_is_not_fairscales_is_refused(tmp_path: Path, change: str) -> None:
    def spoil(objects: Objects) -> None:
        unit = objects["shard_metadata"]["param_metadata"][1]
        facts = unit["params"]["flat_param_0"]
        if change == "numels":
            facts["numels"][0] += 1
        elif change == "names":
            facts["names"].pop()
        elif change == "no params":
            del unit["params"]
        elif change == "no padding":
            del facts["padding"]
        else:
            objects["shard_metadata"] = [1]

    folder = save(tmp_path / "a", Layout(2, 2, True), edit=on(0, 1, spoil))
    refusal(folder, tmp_path / "b", SOURCE, "reshard-model_part-0-shard1.pt", "shard_metadata")


def test_lengths_that_differ_between_shards_without_metadata_are_named(tmp_path: Path) -> None:
    def shorten(objects: Objects) -> None:
        key = "decoder.layers.0.flat_param_0"
        objects["model"][key] = objects["model"][key][:-1].clone()

    folder = save(tmp_path / "a", Layout(2, 2, True), metadata=False, edit=on(1, 1, shorten))
    refusal(folder, tmp_path / "b", SOURCE, "mp=1, dp=1", "decoder.layers.0.flat_param_0")


def test_padding_that_is_not_zero_where_it_was_inferred_is_named(tmp_path: Path) -> None:
    spec = Spec(layers=1, heads=1, head_dim=5, inner=3, vocabulary=4)
    key = "decoder.layers.0.flat_param_0"

    def spoil(objects: Objects) -> None:
        objects["model"][key][-1] = 1.0

    layout = Layout(1, 3, True)
    paths = write(tmp_path / "a", build(spec), layout)
    padding = load(paths[-1])["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]["padding"]
    assert padding, "the example needs padding"
    write(tmp_path / "a", build(spec), layout, metadata=False, edit=on(0, 2, spoil))
    refusal(tmp_path / "a", tmp_path / "b", SOURCE, "reshard-model_part-0-shard2.pt", key, mp=1, dp=1, flat=False)


# -- replicas and ties


def bits(tensor: Tensor, value: int) -> None:
    tensor.view(torch.int16)[1] = value


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [(0x3C00, 0x3C01), (0x7E00, 0x7E01), (0x0000, -0x8000), (0x7C00, 0x7E00), (0x7E00, 0x3C00)],
    ids=["one bit", "NaN payloads", "signs of zero", "infinity and NaN", "NaN and one"],
)
def test_replicas_are_compared_bit_for_bit(tmp_path: Path, first: int, second: int, flat: bool) -> None:
    models = [build(SMALL), build(SMALL)]
    for model, value in zip(models, (first, second), strict=True):
        bits(model.tensors[BIAS], value)
    layout = Layout(2, 2 if flat else 1, flat)
    write(tmp_path / "a", models[0], layout)
    write(tmp_path / "other", models[1], layout)
    for path in (tmp_path / "other").glob("*model_part-1*"):
        (tmp_path / "a" / path.name).write_bytes(path.read_bytes())
    for mp, dp in ((2, None), (1, None), (4, 1)):
        names = (BIAS, "model_part-0", "model_part-1", "--replica-part")
        refusal(tmp_path / "a", tmp_path / f"b{mp}", SOURCE, *names, mp=mp, dp=dp)
    for part, model in enumerate(models):
        reshard(tmp_path / "a", tmp_path / f"c{part}", mp=1, dp=1, flat=False, replica_part=part)
        assert_same_tensors(read(shards(tmp_path / f"c{part}")), model.tensors)


@pytest.mark.parametrize("value", [0x7E01, -0x8000])
def test_equal_bits_are_equal_replicas_whatever_they_mean(tmp_path: Path, value: int) -> None:
    model = build(SMALL)
    bits(model.tensors[BIAS], value)
    write(tmp_path / "a", model, Layout(2))
    reshard(tmp_path / "a", tmp_path / "b", mp=1)
    assert_same_tensors(read(shards(tmp_path / "b")), model.tensors)


def test_a_buffer_that_differs_between_shards_is_named(tmp_path: Path) -> None:
    def older(objects: Objects) -> None:
        objects["model"]["decoder.version"][0] = 2.0

    folder = save(tmp_path / "a", Layout(2, 3, True), edit=on(0, 2, older))
    refusal(folder, tmp_path / "b", SOURCE, "decoder.version", "reshard-model_part-0-shard2.pt")


def test_checksums_that_torch_did_not_compute_prove_nothing(tmp_path: Path) -> None:
    def older(objects: Objects) -> None:
        objects["model"]["decoder.version"][0] = 2.0

    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "a", Layout(2, 2, True), edit=on(0, 1, older))
    finally:
        torch.serialization.set_crc32_options(True)
    refusal(folder, tmp_path / "b", SOURCE, "decoder.version")


def test_untied_tensors_without_checksums_stay_untied(tmp_path: Path) -> None:
    spec = replace(SMALL, output="untied")
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "a", Layout(1), spec=spec, edit=everywhere(lambda objects: objects.pop("cfg")))
    finally:
        torch.serialization.set_crc32_options(True)
    reshard(folder, tmp_path / "b", mp=2)
    assert_same_tensors(read(shards(tmp_path / "b")), build(spec).tensors)


def test_a_chosen_part_that_differs_in_itself_is_refused(tmp_path: Path) -> None:
    def older(objects: Objects) -> None:
        objects["model"]["decoder.version"][0] = 2.0

    folder = save(tmp_path / "a", Layout(2, 3, True), edit=on(0, 2, older))
    refusal(folder, tmp_path / "b", SOURCE, "decoder.version", "model_part-0-shard2.pt", replica_part=0)


def test_all_differing_replicas_are_told_at_once(tmp_path: Path) -> None:
    names = [BIAS, "decoder.layers.0.self_attn_layer_norm.weight", "decoder.embed_positions.weight"]

    def spoil(objects: Objects) -> None:
        for name in names:
            objects["model"][name] += 1

    folder = save(tmp_path / "a", Layout(2), edit=on(1, 0, spoil))
    refusal(folder, tmp_path / "b", SOURCE, *names, mp=4)


def test_a_part_of_replicas_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    save(tmp_path / "a", Layout(2))
    with pytest.raises(ReshardError, match="replica-part 2") as raised:
        reshard(tmp_path / "a", tmp_path / "b", replica_part=2)
    assert raised.value.exit_code == 2


def test_tensors_tied_by_cfg_that_differ_are_named(tmp_path: Path) -> None:
    def say_tied(objects: Objects) -> None:
        objects["cfg"]["model"].share_decoder_input_output_embed = True

    folder = save(tmp_path / "a", Layout(1), spec=replace(SMALL, output="untied"), edit=everywhere(say_tied))
    refusal(folder, tmp_path / "b", SOURCE, "decoder.output_projection.weight", "decoder.embed_tokens.weight")


def test_tensors_tied_by_cfg_that_are_equal_are_tied(tmp_path: Path) -> None:
    def copy(objects: Objects) -> None:
        held = objects["model"]
        held["decoder.output_projection.weight"] = held["decoder.embed_tokens.weight"].clone()

    folder = save(tmp_path / "a", Layout(2), spec=replace(SMALL, output="tied"), edit=everywhere(copy))
    reshard(folder, tmp_path / "b", mp=1)
    assert_same_tensors(read(shards(tmp_path / "b")), build(replace(SMALL, output="tied")).tensors)


# -- what cannot be planned


def test_a_number_of_parts_that_splits_a_head_is_refused(tmp_path: Path) -> None:
    # 4 heads of 2 rows each: 8 parts divide the rows, not the heads.
    folder = save(tmp_path / "a", Layout(2))
    fault = refusal(folder, tmp_path / "b", PLAN, "4 heads", "8 model-parallel parts", "self_attn", mp=8)
    assert "1, 2, 4" in str(fault)


def test_heads_may_be_stated_where_cfg_is_silent(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2), edit=everywhere(lambda objects: objects.pop("cfg")))
    refusal(folder, tmp_path / "b", PLAN, "4 heads", mp=8, heads=4)
    result = reshard(folder, tmp_path / "c", mp=8)
    assert any("heads" in note for note in result["notes"])


@pytest.mark.parametrize(("change", "unit"), [({"vocabulary": 10}, "vocabulary"), ({"inner": 10}, "inner features")])
def test_a_number_of_parts_that_does_not_divide_is_explained(tmp_path: Path, change: dict[str, int], unit: str) -> None:
    folder = save(tmp_path / "a", Layout(2), spec=replace(SMALL, **change))
    fault = refusal(folder, tmp_path / "b", PLAN, unit, "10", mp=4)
    assert "1, 2" in str(fault)


def test_everything_that_does_not_divide_is_told_at_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(1))
    refusal(folder, tmp_path / "b", PLAN, "4 heads", "vocabulary", "inner features", mp=3)


def test_unflat_shards_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    refusal(folder, tmp_path / "b", PLAN, "--dp 1", dp=2)
    refusal(folder, tmp_path / "b", PLAN, "--layout flat", dp=2, flat=False)


def test_flat_units_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(1), spec=replace(SMALL, norm_dtype=torch.float32))
    refusal(folder, tmp_path / "b", PLAN, "decoder.layers.0", "float32", "float16", "layer_norm", flat=True, dp=2)


def test_dtypes_that_differ_between_parts_are_named(tmp_path: Path) -> None:
    def widen(objects: Objects) -> None:
        objects["model"][FC1] = objects["model"][FC1].float()

    folder = save(tmp_path / "a", Layout(2), edit=on(1, 0, widen))
    refusal(folder, tmp_path / "b", SOURCE, FC1, "reshard-model_part-1.pt", "float32", "float16")


def test_dtypes_that_differ_between_shards_are_named(tmp_path: Path) -> None:
    key = "decoder.layers.1.flat_param_0"

    def widen(objects: Objects) -> None:
        objects["model"][key] = objects["model"][key].float()

    folder = save(tmp_path / "a", Layout(2, 2, True), edit=on(1, 1, widen))
    refusal(folder, tmp_path / "b", SOURCE, key, "float32", "float16", "model_part-1")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.complex64])
def test_weights_that_are_not_floating_point_numbers_are_not_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    def quantise(objects: Objects) -> None:
        objects["model"][FC1] = torch.zeros(objects["model"][FC1].shape, dtype=dtype)

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(quantise))
    refusal(folder, tmp_path / "b", PLAN, FC1, "--dtype keep", dtype="float32")
    reshard(folder, tmp_path / "c", mp=1)
    assert read(shards(tmp_path / "c"))[FC1].dtype is dtype


@pytest.mark.parametrize("where", ["last_optimizer_state", "ema", "ema_fp32_params"])
def test_training_state_that_only_some_shards_hold_is_named(tmp_path: Path, where: str) -> None:
    def train(objects: Objects) -> None:
        if where == "last_optimizer_state":
            moments = {"exp_avg": torch.zeros(objects["model"]["flat_param_0"].shape)}
            objects[where] = {"state": {0: moments}, "param_groups": [{"params": [0]}]}
        else:
            objects["extra_state"][where] = dict(objects["model"])

    folder = save(tmp_path / "a", Layout(2, 2, True), edit=on(1, 1, train))
    refusal(
        folder, tmp_path / "b", SOURCE, "optimizer state" if where == "last_optimizer_state" else where, "--state drop"
    )
    reshard(folder, tmp_path / "c", keep_state=False)


def test_a_memory_budget_that_is_too_small_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    refusal(folder, tmp_path / "b", PLAN, "--memory", "needed", memory_bytes=1 << 20)


def test_a_prefix_that_is_a_path_is_wrong_use(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    refusal(folder, tmp_path / "b", 2, "--prefix", prefix="../x")


def test_problems_of_the_plan_are_told_at_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    fault = refusal(folder, tmp_path / "b", PLAN, "--memory", "4 heads", "--dp 1", mp=3, dp=2, memory_bytes=1)
    assert len(fault.problems) >= 3


# -- the target


def test_a_target_that_holds_other_files_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("precious")
    refusal(folder, tmp_path / "b", TARGET, str(tmp_path / "b"), "thesis.txt", "--overwrite")
    reshard(folder, tmp_path / "b", overwrite=True)
    assert (tmp_path / "b" / "thesis.txt").read_text() == "precious"


def test_a_target_of_another_plan_is_refused_and_replaced_on_request(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    reshard(folder, tmp_path / "b", mp=4)
    refusal(folder, tmp_path / "b", TARGET, str(tmp_path / "b"), "another plan", "--overwrite", mp=1)
    reshard(folder, tmp_path / "b", mp=1, overwrite=True)
    assert [path.name for path in shards(tmp_path / "b")] == ["reshard.pt"]
    assert_same_tensors(read(shards(tmp_path / "b")), build(SMALL).tensors)


def test_a_changed_source_is_another_plan(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    reshard(folder, tmp_path / "b", mp=1)
    save(tmp_path / "a", Layout(2), spec=replace(SMALL, seed=5))
    refusal(folder, tmp_path / "b", TARGET, "another plan", mp=1)


def test_a_damaged_target_is_not_taken_for_finished(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2))
    reshard(folder, tmp_path / "b", mp=1)
    path = tmp_path / "b" / "reshard.pt"
    path.write_bytes(path.read_bytes()[:-1])
    refusal(folder, tmp_path / "b", TARGET, "reshard.pt", "--overwrite", mp=1)


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_overwrite_mends_a_damaged_target_of_the_same_plan(tmp_path: Path, damage: str) -> None:
    # The refusal's own next step is to pass --overwrite.
    folder = save(tmp_path / "a", Layout(2))
    reshard(folder, tmp_path / "b", mp=1)
    path = tmp_path / "b" / "reshard.pt"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    reshard(folder, tmp_path / "b", mp=1, overwrite=True)
    assert_same_tensors(read(shards(tmp_path / "b")), build(SMALL).tensors)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("mp", [2, 4])
@pytest.mark.parametrize("by_link", [False, True])
def test_the_source_is_never_the_target(tmp_path: Path, by_link: bool, mp: int, overwrite: bool) -> None:
    folder = save(tmp_path / "a", Layout(2))
    (tmp_path / "link").symlink_to(folder)
    before = contents(folder)
    with pytest.raises(ReshardError):
        reshard(folder, tmp_path / "link" if by_link else folder, mp=mp, overwrite=overwrite)
    assert contents(folder) == before


def test_a_source_problem_comes_before_a_target_problem(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", Layout(2), edit=on(1, 0, lambda objects: objects["model"].pop(FC1)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other.txt").write_text("x")
    refusal(folder, tmp_path / "b", SOURCE, FC1)


# -- cfg


def test_cfg_of_another_model_is_noticed(tmp_path: Path) -> None:
    def deepen(objects: Objects) -> None:
        objects["cfg"]["model"].decoder_layers = 3

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(deepen))
    refusal(folder, tmp_path / "b", SOURCE, "3 layers", "2")


def test_an_older_args_namespace_stands_in_for_cfg(tmp_path: Path) -> None:
    def older(objects: Objects) -> None:
        objects["args"] = Namespace(**vars(objects.pop("cfg")["model"]))

    folder = save(tmp_path / "a", Layout(2), edit=everywhere(older))
    refusal(folder, tmp_path / "b", PLAN, "4 heads", mp=8)
    reshard(folder, tmp_path / "c", mp=1)
    assert load(shards(tmp_path / "c")[0])["args"].model_parallel_size == 1
