"""Every kind of checkpoint that is out there, one example each: names of files, keys, flat parameters, metadata."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.errors import ReshardError
from tasks.target import Projection
from tests.oracle import (
    Layout,
    Model,
    Objects,
    Spec,
    assert_same_bits,
    assert_same_objects,
    assert_same_tensors,
    build,
    flat_objects,
    is_buffer,
    load,
    objects_of,
    parse_ranks,
    part_of,
    raw,
    read,
    with_projections,
    wrapped,
    write,
)
from tests.pipeline.inline_run import contents, refusal, reshard, shards

WHOLE = {"mp": 1, "dp": 1, "flat": False, "prefix": "whole"}
SMALL = Spec(layers=2, heads=2, head_dim=2, inner=4, vocabulary=4)


def merged(source: Path | str, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Reshard to one unflat file, and load that."""
    reshard(source, target, **{**WHOLE, **options})
    assert [path.name for path in shards(target)] == ["whole.pt"]
    return load(target / "whole.pt")["model"]


def assert_target(folder: Path, model: Model, layout: Layout) -> None:
    for path in shards(folder):
        mp, dp = parse_ranks(path.name)
        assert_same_objects(load(path)["model"], objects_of(model, layout, mp, dp)["model"], path.name)
        assert_same_objects(
            load(path).get("shard_metadata"), objects_of(model, layout, mp, dp).get("shard_metadata"), path.name
        )
    assert_same_tensors(read(shards(folder)), model.tensors)


# -- a1: names of files

NAMES: dict[str, tuple[Layout, Callable[[int, int], str]]] = {
    "N1 trainer": (Layout(2, 12, True), lambda mp, dp: f"checkpoint_last-model_part-{mp}-shard{dp}.pt"),
    "N2 updates": (Layout(2, 2, True), lambda mp, dp: f"checkpoint_10000-model_part-{mp}-shard{dp}.pt"),
    "N2 epoch": (Layout(2, 2, True), lambda mp, dp: f"checkpoint18-model_part-{mp}-shard{dp}.pt"),
    "N2 epoch and updates": (Layout(2, 2, True), lambda mp, dp: f"checkpoint_2_10000-model_part-{mp}-shard{dp}.pt"),
    "N3 without parts": (Layout(1, 11, True), lambda mp, dp: f"checkpoint_18-shard{dp}.pt"),
    "N4 uploaded": (Layout(2, 2, True), lambda mp, dp: f"checkpoint-model_part-{mp}-shard{dp}.pt"),
    "N5 merged, flat": (Layout(2, 1, True), lambda mp, dp: f"reshard-model_part-{mp}.pt"),
    "N5 merged, unflat": (Layout(2, 1), lambda mp, dp: f"reshard-model_part-{mp}.pt"),
    "N6 shard0, flat": (Layout(2, 1, True), lambda mp, dp: f"reshard-model_part-{mp}-shard0.pt"),
    "N6 shard0, unflat": (Layout(2, 1), lambda mp, dp: f"reshard-model_part-{mp}-shard0.pt"),
    "N7 singleton": (Layout(1, 1), lambda mp, dp: "reshard.pt"),
    "N8 .pt in the middle": (Layout(2, 1), lambda mp, dp: f"checkpoint_1_4000.pt-model_part-{mp}.pt"),
    "N9 sixteen parts": (Layout(16, 1), lambda mp, dp: f"checkpoint_1_8000-model_part-{mp}.pt"),
    "N10 restored": (Layout(1, 1), lambda mp, dp: "restored.pt"),
    "N11 consolidated": (Layout(1, 1), lambda mp, dp: "checkpoint_last_consolidated.pt"),
    "N11 consolidated parts": (Layout(2, 1), lambda mp, dp: f"checkpoint_last_consolidated-model_part-{mp}.pt"),
    "N11 only consolidated": (Layout(1, 1), lambda mp, dp: "consolidated.pt"),
}


@pytest.mark.parametrize("pattern", NAMES)
def test_every_naming_pattern_is_read(tmp_path: Path, pattern: str) -> None:
    layout, name = NAMES[pattern]
    model = build(replace(SMALL, heads=layout.mp * 2, inner=layout.mp * 4, vocabulary=layout.mp * 4, head_dim=1))
    # Digits and names of shards in the folders' names say nothing.
    folder = tmp_path / "step-7-shard3" / "model_part-5"
    write(folder, model, layout, name=name)
    assert_same_tensors(merged(folder, tmp_path / "out"), model.tensors)


@pytest.mark.parametrize("pattern", ["N1 trainer", "N8 .pt in the middle", "N3 without parts"])
def test_a_quoted_glob_names_a_checkpoint(tmp_path: Path, pattern: str) -> None:
    layout, name = NAMES[pattern]
    model = build(SMALL)
    write(tmp_path / "a", model, layout, name=name)
    write(tmp_path / "a", build(replace(SMALL, seed=1)), Layout(1), name=lambda mp, dp: "other.pt")
    assert_same_tensors(merged(f"{tmp_path / 'a'}/checkpoint*", tmp_path / "out"), model.tensors)


def test_n4_marker_files_are_left_out(tmp_path: Path) -> None:
    model = build(SMALL)
    folder = tmp_path / "checkpoint_100"
    write(folder, model, Layout(2, 2, True), prefix="checkpoint")
    (folder / "_DONE").write_text("x")
    (folder / "_checkpoint-model_part-0-shard2.pt").write_text("x")
    assert_same_tensors(merged(folder, tmp_path / "out"), model.tensors)


@pytest.mark.parametrize("virtual", ["reshard.pt", "reshard"])
def test_n7_the_virtual_name_stands_for_the_parts(tmp_path: Path, virtual: str) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2))
    assert_same_tensors(merged(tmp_path / "a" / virtual, tmp_path / "out"), model.tensors)


def test_n7_the_virtual_name_with_pt_in_the_middle(tmp_path: Path) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2), prefix="checkpoint_1_4000.pt")
    assert_same_tensors(merged(tmp_path / "a" / "checkpoint_1_4000.pt", tmp_path / "out"), model.tensors)


def test_n7_one_file_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(1), prefix="one")
    write(tmp_path / "a", build(replace(SMALL, seed=1)), Layout(1), prefix="two")
    assert_same_tensors(merged(tmp_path / "a" / "one.pt", tmp_path / "out"), model.tensors)


@pytest.mark.parametrize("flat", [False, True])
def test_n10_a_bare_state_dict_is_a_checkpoint(tmp_path: Path, flat: bool) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(1), prefix="restored", edit=lambda objects, mp, dp: objects["model"])
    layout = Layout(2, 3, flat=True) if flat else Layout(2)
    reshard(tmp_path / "a", tmp_path / "b", mp=layout.mp, dp=layout.dp, flat=flat, heads=2)
    assert_same_tensors(read(shards(tmp_path / "b")), model.tensors)
    written = load(shards(tmp_path / "b")[0])
    assert list(written) == (["model", "shard_metadata"] if flat else list(model.tensors))


def test_n12_tensors_spread_over_part_files_are_read_together(tmp_path: Path) -> None:
    model = build(SMALL)
    objects = objects_of(model, Layout(1), 0, 0)
    names = list(objects["model"])
    (tmp_path / "a").mkdir()
    for part in range(11):
        held = {name: objects["model"][name] for name in names[part::11]}
        torch.save({**objects, "model": held}, tmp_path / "a" / f"checkpoint_last_part{part}.pt")
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "out"), model.tensors)


@pytest.mark.parametrize("suffix", ["", "-shard3"])
def test_n13_mixtures_of_experts_are_refused_by_name(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a", build(SMALL), Layout(1), name=lambda mp, dp: f"checkpoint_last-shared{suffix}.pt")
    write(tmp_path / "a", build(SMALL), Layout(1), name=lambda mp, dp: f"checkpoint_last-rank-3{suffix}.pt")
    refusal(
        tmp_path / "a", tmp_path / "out", 3, f"checkpoint_last-rank-3{suffix}.pt", f"checkpoint_last-shared{suffix}.pt"
    )


def test_n13_expert_weights_in_the_metadata_are_refused_by_name(tmp_path: Path) -> None:
    def own(objects: Objects, mp: int, dp: int) -> Objects:
        objects["shard_metadata"]["param_metadata"][1]["no_broadcast_optim_state"] = True
        return objects

    write(tmp_path / "a", build(SMALL), Layout(1, 2, True), edit=own)
    refusal(tmp_path / "a", tmp_path / "out", 3, "decoder.layers.0.flat_param_0", "no_broadcast_optim_state")


def test_n14_leftovers_of_saves_are_left_out(tmp_path: Path) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 2, True), prefix="checkpoint_5")
    (tmp_path / "a" / "checkpoint_5-model_part-0-shard2.pt.tmp").write_bytes(b"half")
    (tmp_path / "a" / "dummy0").write_bytes(b"")
    (tmp_path / "a" / "checkpoint_6-model_part-0-shard0.pt").write_bytes(b"")
    (tmp_path / "a" / "train.log").write_text("x")
    result = reshard(tmp_path / "a", tmp_path / "out", **WHOLE)
    assert_same_tensors(load(tmp_path / "out" / "whole.pt")["model"], model.tensors)
    notes = " ".join(result["notes"])
    assert "checkpoint_5-model_part-0-shard2.pt.tmp" in notes
    assert "checkpoint_6" in notes


def test_n14_links_to_the_last_checkpoint_are_no_checkpoint(tmp_path: Path) -> None:
    model = build(SMALL)
    for path in write(tmp_path / "a", model, Layout(2, 2, True), prefix="checkpoint_5"):
        path.with_name(path.name.replace("checkpoint_5", "checkpoint_last")).symlink_to(path.name)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "out"), model.tensors)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "out2", checkpoint="checkpoint_last"), model.tensors)
    single = tmp_path / "a" / "checkpoint_last-model_part-0-shard0.pt"
    assert os.readlink(single) == "checkpoint_5-model_part-0-shard0.pt"


def test_n14_links_that_an_archive_turned_into_small_files_are_links(tmp_path: Path) -> None:
    model = build(SMALL)
    for path in write(tmp_path / "a", model, Layout(2), prefix="checkpoint_5"):
        path.with_name(path.name.replace("checkpoint_5", "checkpoint_last")).write_text(path.name)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "out"), model.tensors)


def test_of_several_checkpoints_one_is_chosen_by_name(tmp_path: Path) -> None:
    models = {prefix: build(replace(SMALL, seed=len(prefix))) for prefix in ("checkpoint_1", "checkpoint_10")}
    for prefix, model in models.items():
        write(tmp_path / "a", model, Layout(2, 2, True), prefix=prefix)
    refusal(tmp_path / "a", tmp_path / "out", 3, "checkpoint_1", "checkpoint_10", "--checkpoint")
    for prefix, model in models.items():
        assert_same_tensors(merged(tmp_path / "a", tmp_path / prefix, checkpoint=prefix), model.tensors)


# -- a3: what the model dict looks like

L_SPECS: dict[str, tuple[Spec, Layout]] = {
    "L1 flat, layer-wrapped": (SMALL, Layout(2, 3, True)),
    "L2 flat, one root": (SMALL, Layout(2, 3, True, root_only=True)),
    "L3 unflat": (SMALL, Layout(2)),
    "L4 unflat, split": (replace(SMALL, fused=False), Layout(1)),
    "L5 350M": (replace(SMALL, fused=False, projected=3, final_norm=False), Layout(1)),
    "L6 blocks": (replace(SMALL, layers=5, block=2), Layout(2, 3, True)),
    "L9 gate": (replace(SMALL, gate=True), Layout(2, 3, True)),
    "L9 inner norm": (replace(SMALL, inner_norm=True), Layout(2, 3, True)),
    "L9 untied output": (replace(SMALL, output="untied"), Layout(1, 3, True)),
    "L9 tied output": (replace(SMALL, output="tied"), Layout(2, 3, True)),
    "L9 tied output, unflat": (replace(SMALL, output="tied"), Layout(2)),
    "L9 sinusoidal positions": (replace(SMALL, positions=0), Layout(2, 3, True)),
    "L9 no bias": (replace(SMALL, bias=False), Layout(2, 3, True)),
    "L9 no affine norms": (replace(SMALL, affine=False), Layout(2, 3, True)),
    "mixed dtypes": (replace(SMALL, norm_dtype=torch.float32), Layout(2)),
}


@pytest.mark.parametrize("kind", L_SPECS)
def test_every_kind_of_model_dict_is_read_and_written(tmp_path: Path, kind: str) -> None:
    spec, layout = L_SPECS[kind]
    model = build(spec)
    write(tmp_path / "a", model, layout)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)
    back = Layout(layout.mp, layout.dp, layout.flat, layout.root_only)
    reshard(tmp_path / "whole", tmp_path / "back", mp=back.mp, dp=back.dp, flat=back.flat)
    assert_target(tmp_path / "back", model, back)


@pytest.mark.parametrize("flat_name", ["flat_param_0", "flat_param"])
def test_l7_l8_wrapper_modules_and_the_old_flat_name_are_cleaned(tmp_path: Path, flat_name: str) -> None:
    model = build(SMALL)
    layout = Layout(2, 3, True)
    write(tmp_path / "a", model, layout, edit=lambda objects, mp, dp: wrapped(objects, flat_name=flat_name))
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)
    reshard(tmp_path / "a", tmp_path / "b", dp=2)
    assert_target(tmp_path / "b", model, Layout(2, 2, True))


def test_l8_wrapper_modules_in_names_of_tensors_are_cleaned(tmp_path: Path) -> None:
    def wrap(objects: Objects, mp: int, dp: int) -> Objects:
        objects["model"] = {
            f"_fsdp_wrapped_module.{name.replace('.fc1', '._fpw_module.fc1')}": tensor
            for name, tensor in objects["model"].items()
        }
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2), edit=wrap)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


@pytest.mark.parametrize("target_mp", [1, 2, 4])
def test_l9_legacy_norms_take_each_parts_own_copy(tmp_path: Path, target_mp: int) -> None:
    spec = replace(SMALL, heads=4, inner=8, inner_norm=True)
    model = build(spec)

    def legacy(objects: Objects, mp: int, dp: int) -> Objects:
        held = {}
        for name, tensor in objects["model"].items():
            if ".ffn_layernorm." not in name:
                held[name] = tensor
                continue
            for part in range(2):
                initial = torch.ones_like(tensor) if name.endswith("weight") else torch.zeros_like(tensor)
                held[name.replace(".ffn_layernorm.", f".ffn_layernorm.lns.{part}.")] = tensor if part == mp else initial
        objects["model"] = held
        return objects

    write(tmp_path / "a", model, Layout(2), edit=legacy)
    result = reshard(tmp_path / "a", tmp_path / "b", mp=target_mp, prefix="out")
    assert_same_tensors(read(shards(tmp_path / "b")), model.tensors)
    assert any("lns" in name for name in result["dropped"]), "the copies that nobody trained are dropped by name"


def test_l9_legacy_norms_in_flat_parameters_take_each_parts_own_copy(tmp_path: Path) -> None:
    spec = replace(SMALL, heads=4, inner=8, inner_norm=True)
    model, layout = build(spec), Layout(2, 3, True)

    def legacy(objects: Objects, mp: int, dp: int) -> Objects:
        held: dict[str, torch.Tensor] = {}
        for name, tensor in part_of(model, mp, 2).items():
            if not name.endswith(".ffn_layernorm.weight"):
                if ".ffn_layernorm." not in name:
                    held[name] = tensor
                continue
            stem = name.removesuffix("weight")
            own = {"weight": tensor, "bias": part_of(model, mp, 2)[f"{stem}bias"]}
            initial = {"weight": torch.ones_like(tensor), "bias": torch.zeros_like(tensor)}
            for part in range(2):
                for kind, value in (own if part == mp else initial).items():
                    held[f"{stem}lns.{part}.{kind}"] = value
        objects["model"], objects["shard_metadata"] = flat_objects(spec, held, layout, dp)
        return objects

    write(tmp_path / "a", model, layout, edit=legacy)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)
    reshard(tmp_path / "a", tmp_path / "b", mp=4, dp=2)
    assert_target(tmp_path / "b", model, Layout(4, 2, True))


def test_the_model_may_be_an_ordered_dict(tmp_path: Path) -> None:
    def order(objects: Objects, mp: int, dp: int) -> Objects:
        objects["model"] = OrderedDict(objects["model"])
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 2, True), edit=order)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


def test_tensors_may_be_views_of_one_storage(tmp_path: Path) -> None:
    def views(objects: Objects, mp: int, dp: int) -> Objects:
        held = objects["model"]
        everything = torch.cat([tensor.reshape(-1) for tensor in held.values()])
        pieces = everything.split([tensor.numel() for tensor in held.values()])
        objects["model"] = {
            name: piece.view(tensor.shape) for (name, tensor), piece in zip(held.items(), pieces, strict=True)
        }
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2), edit=views)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


def test_parameters_are_tensors_too(tmp_path: Path) -> None:
    def parameters(objects: Objects, mp: int, dp: int) -> Objects:
        objects["model"] = {
            name: tensor if is_buffer(name) else torch.nn.Parameter(tensor) for name, tensor in objects["model"].items()
        }
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 3, True), edit=parameters)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


def test_cfg_may_be_a_namespace(tmp_path: Path) -> None:
    def spaced(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"] = Namespace(**objects["cfg"])
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 3, True), metadata=False, edit=spaced)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)
    assert load(tmp_path / "whole" / "whole.pt")["cfg"].common["model_parallel_size"] == 1


def test_tied_tensors_come_out_as_one_storage(tmp_path: Path) -> None:
    write(tmp_path / "a", build(replace(SMALL, output="tied")), Layout(2, 3, True))
    held = merged(tmp_path / "a", tmp_path / "whole")
    assert held["decoder.output_projection.weight"].data_ptr() == held["decoder.embed_tokens.weight"].data_ptr()


def test_files_of_before_zip_archives_are_read(tmp_path: Path) -> None:
    model = build(SMALL)
    for path in write(tmp_path / "a", model, Layout(2, 3, True)):
        torch.save(load(path), path, _use_new_zipfile_serialization=False)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


# -- a4: metadata


def test_a4_metadata_of_other_fairscale_users_is_read(tmp_path: Path) -> None:
    def foreign(objects: Objects, mp: int, dp: int) -> Objects:
        for unit in objects["shard_metadata"]["param_metadata"]:
            for name, facts in unit["params"].items():
                shapes = [torch.Size(shape) for shape in facts["shapes"]]
                # In another order, and in another kind of dict.
                unit["params"][name] = OrderedDict(
                    padding=facts["padding"], numels=facts["numels"], shapes=shapes, names=facts["names"]
                )
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 5, True), edit=foreign)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "whole"), model.tensors)


def test_a4_a_tie_that_the_metadata_denies_is_not_invented(tmp_path: Path) -> None:
    # cfg says that embeddings are shared; the model dict has no output_projection, and gets none on the way back.
    def say_tied(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["model"].share_decoder_input_output_embed = True
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2), edit=say_tied)
    reshard(tmp_path / "a", tmp_path / "flat", flat=True, dp=3)
    assert_same_tensors(read(shards(tmp_path / "flat")), model.tensors)
    assert_same_tensors(merged(tmp_path / "flat", tmp_path / "back"), model.tensors)


def test_a4_unflat_files_may_say_how_they_were_flat(tmp_path: Path) -> None:
    # The release of April 2023, and with a wrong number of parts what an older tool left behind.
    for stale_mp in (2, 4):
        spec = replace(SMALL, heads=4, inner=8)
        model = build(spec)

        def stale(objects: Objects, mp: int, dp: int, spec: Spec = spec, stale_mp: int = stale_mp) -> Objects:
            held = part_of(build(spec), mp, stale_mp)
            objects["shard_metadata"] = flat_objects(spec, held, Layout(stale_mp, 5, True), 4)[1]
            return objects

        folder = tmp_path / str(stale_mp)
        write(folder / "a", model, Layout(2), edit=stale)
        reshard(folder / "a", folder / "b", mp=4, dp=3, flat=True)
        assert_target(folder / "b", model, Layout(4, 3, True))
        result = reshard(folder / "a", folder / "c", mp=1)
        assert_same_tensors(read(shards(folder / "c")), model.tensors)
        assert "shard_metadata" not in load(folder / "c" / "reshard.pt")
        assert "shard_metadata" in result["dropped"], "nothing is dropped but by name"


def test_a5_what_stands_in_stated_padding_is_not_copied(tmp_path: Path) -> None:
    def fill(objects: Objects, mp: int, dp: int) -> Objects:
        for unit in objects["shard_metadata"]["param_metadata"]:
            key = f"{unit['fsdp_path']}.flat_param_0".lstrip(".")
            padding = unit["params"]["flat_param_0"]["padding"]
            shard = objects["model"][key]
            shard[len(shard) - padding :] = float("nan")
        return objects

    model = build(Spec(layers=1, heads=1, head_dim=5, inner=3, vocabulary=4))
    write(tmp_path / "a", model, Layout(1, 7, True), edit=fill)
    for dp in (1, 4, 7, 9):
        reshard(tmp_path / "a", tmp_path / str(dp), dp=dp)
        assert_target(tmp_path / str(dp), model, Layout(1, dp, True))


# -- flat files without metadata


@pytest.mark.parametrize("dp", range(1, 10))
@pytest.mark.parametrize("kind", ["layers", "root", "blocks"])
def test_flat_files_without_metadata_are_inferred_from_cfg(tmp_path: Path, kind: str, dp: int) -> None:
    spec = Spec(layers=3, heads=4, head_dim=4, inner=16, vocabulary=20, block=2 if kind == "blocks" else 1)
    model = build(spec)
    layout = Layout(2, dp, True, root_only=kind == "root")
    write(tmp_path / "a", model, layout, metadata=False)
    result = reshard(tmp_path / "a", tmp_path / "b", **WHOLE)
    assert_same_tensors(load(tmp_path / "b" / "whole.pt")["model"], model.tensors)
    assert any("inferred" in note for note in result["notes"])
    reshard(tmp_path / "a", tmp_path / "c", mp=4, dp=3)
    assert_target(tmp_path / "c", model, Layout(4, 3, True, root_only=kind == "root"))


@pytest.mark.parametrize("root_only", [False, True])
@pytest.mark.parametrize(
    "change", [{"gate": True}, {"bias": False}, {"affine": False}, {"inner_norm": True}, {"positions": 0}]
)
def test_optional_tensors_of_files_without_metadata_are_inferred(
    tmp_path: Path, change: dict[str, Any], root_only: bool
) -> None:
    spec = replace(Spec(layers=2, heads=4, head_dim=4, inner=32, vocabulary=20), **change)
    if root_only and spec.inner_norm:
        pytest.skip("one root unit may hold more of the vocabulary instead: see the test of ambiguous files")
    model = build(spec)
    write(tmp_path / "a", model, Layout(2, 3, True, root_only=root_only), metadata=False)
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "b"), model.tensors)


@pytest.mark.parametrize("fused", [True, False])
def test_without_metadata_or_parts_the_user_says_how_k_v_and_q_lie(tmp_path: Path, fused: bool) -> None:
    model = build(Spec(layers=2, heads=4, head_dim=4, inner=32, vocabulary=20, fused=fused))

    def plain(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["model"]._name = objects["cfg"]["model"].arch = "transformer_lm_gpt"
        return objects

    write(tmp_path / "a", model, Layout(1, 3, True), metadata=False, edit=plain)
    refusal(tmp_path / "a", tmp_path / "no", 3, "k, v and q", "--source-qkv")
    assert_same_tensors(merged(tmp_path / "a", tmp_path / "b", source_fused=fused), model.tensors)


@pytest.mark.parametrize("key", ["decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim"])
def test_files_without_metadata_that_do_not_fit_cfg_are_refused(tmp_path: Path, key: str) -> None:
    def wrong(objects: Objects, mp: int, dp: int) -> Objects:
        setattr(objects["cfg"]["model"], key, getattr(objects["cfg"]["model"], key) + 2)
        return objects

    model = build(Spec(layers=2, heads=4, head_dim=4, inner=32, vocabulary=20))
    write(tmp_path / "a", model, Layout(2, 3, True), metadata=False, edit=wrong)
    refusal(tmp_path / "a", tmp_path / "b", 3, "without shard_metadata" if key != "decoder_layers" else "layers")


def test_files_with_neither_metadata_nor_cfg_are_refused(tmp_path: Path) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 2, True), metadata=False, edit=lambda o, mp, dp: {"model": o["model"]})
    refusal(tmp_path / "a", tmp_path / "b", 3, "no cfg")


def assert_right_or_refused(source: Path, target: Path, model: Model) -> None:
    fault = None
    try:
        held = merged(source, target, source_fused=True)
    except ReshardError as raised:
        fault = raised
    if fault is None:
        assert_same_tensors(held, model.tensors)
    else:
        assert fault.exit_code == 3
        assert all(problem.hint for problem in fault.problems)


@pytest.mark.parametrize("vocabulary", [16, 20])
def test_an_ambiguous_vocabulary_is_refused_or_taken_from_cfg(tmp_path: Path, vocabulary: int) -> None:
    # Rows of two elements over nine shards: several numbers of rows have the same length of a shard.
    model = build(Spec(layers=1, heads=2, head_dim=1, inner=4, vocabulary=vocabulary))
    write(tmp_path / "a", model, Layout(1, 9, True), metadata=False)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


def test_untied_output_without_metadata_is_never_taken_for_vocabulary(tmp_path: Path) -> None:
    model = build(Spec(layers=1, heads=4, head_dim=4, inner=32, vocabulary=20, output="untied"))
    write(tmp_path / "a", model, Layout(1, 3, True), metadata=False)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


@pytest.mark.parametrize("root_only", [False, True])
def test_projected_embeddings_without_metadata_are_never_taken_for_vocabulary(tmp_path: Path, root_only: bool) -> None:
    def widths(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["model"].decoder_input_dim = objects["cfg"]["model"].decoder_output_dim = 8
        return objects

    model = build(Spec(layers=1, heads=4, head_dim=4, inner=32, vocabulary=20, projected=8, final_norm=False))
    write(tmp_path / "a", model, Layout(1, 2, True, root_only=root_only), metadata=False, edit=widths)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


def test_a_missing_final_norm_without_metadata_is_never_taken_for_vocabulary(tmp_path: Path) -> None:
    model = build(Spec(layers=1, heads=4, head_dim=4, inner=32, vocabulary=20, final_norm=False))

    def without(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["model"].no_decoder_final_norm = True
        return objects

    write(tmp_path / "a", model, Layout(1, 2, True), metadata=False, edit=without)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


def test_inner_norms_in_one_root_without_metadata_are_never_taken_for_vocabulary(tmp_path: Path) -> None:
    model = build(Spec(layers=2, heads=4, head_dim=4, inner=32, vocabulary=20, inner_norm=True))

    def scaled(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["model"].scale_fc = True
        return objects

    write(tmp_path / "a", model, Layout(1, 2, True, root_only=True), metadata=False, edit=scaled)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


def test_a_vocabulary_that_cfg_states_is_checked(tmp_path: Path) -> None:
    def states(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"]["task"].dict_size = 16
        objects["cfg"]["model"].max_target_positions += 1
        return objects

    model = build(Spec(layers=1, heads=4, head_dim=4, inner=32, vocabulary=20))
    write(tmp_path / "a", model, Layout(1, 3, True), metadata=False, edit=states)
    assert_right_or_refused(tmp_path / "a", tmp_path / "b", model)


# Rows of one element over two shards: cfg to the letter fits twice, so nothing else may be taken instead.
@example(
    layers=1,
    heads=1,
    head_dim=1,
    inner=1,
    vocabulary=1,
    change={},
    mp=1,
    dp=2,
    root_only=True,
    states_vocabulary=False,
    seed=0,
)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 4]),
    head_dim=st.integers(1, 6),
    inner=st.integers(1, 6),
    vocabulary=st.integers(1, 6),
    change=st.sampled_from([{}, {"gate": True}, {"bias": False}, {"affine": False}, {"positions": 0}, {"block": 2}]),
    mp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 9),
    root_only=st.booleans(),
    states_vocabulary=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_inferred_is_right_or_refused(
    layers: int,
    heads: int,
    head_dim: int,
    inner: int,
    vocabulary: int,
    change: dict[str, Any],
    mp: int,
    dp: int,
    root_only: bool,
    states_vocabulary: bool,
    seed: int,
) -> None:
    mp = min(mp, heads)
    size = {"inner": inner * heads, "vocabulary": vocabulary * heads}
    spec = replace(Spec(layers=layers, heads=heads, head_dim=head_dim, seed=seed, **size), **change)

    def states(objects: Objects, at_mp: int, at_dp: int) -> Objects:
        if states_vocabulary:
            objects["cfg"]["task"].dict_size = spec.vocabulary - 4
        return objects

    model = build(spec)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "a", model, Layout(mp, dp, True, root_only), metadata=False, edit=states)
        assert_right_or_refused(folder / "a", folder / "b", model)


def test_inference_files_without_metadata_become_training_shards(tmp_path: Path) -> None:
    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2))
    reshard(tmp_path / "a", tmp_path / "b", mp=1, dp=5, flat=True)
    layout = Layout(1, 5, True)
    assert_target(tmp_path / "b", model, layout)
    for path in shards(tmp_path / "b"):
        mp, dp = parse_ranks(path.name)
        assert_same_objects(load(path), objects_of(model, layout, mp, dp), path.name)
    assert "last_optimizer_state" not in load(shards(tmp_path / "b")[0])


# -- k, v and q


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("asked", ["keep", "fused", "split"])
@pytest.mark.parametrize("fused", [True, False])
def test_qkv_is_kept_fused_or_split_as_asked(tmp_path: Path, fused: bool, asked: str, flat: bool) -> None:
    model = build(replace(SMALL, fused=fused, heads=4))
    first = Layout(2, 2 if flat else 1, flat)
    second = Layout(4, 3 if flat else 1, flat)
    write(tmp_path / "a", model, first)
    reshard(tmp_path / "a", tmp_path / "b", mp=4, dp=second.dp, projection=Projection(asked))
    expected = model if asked == "keep" else with_projections(model, fused=asked == "fused")
    assert_target(tmp_path / "b", expected, second)
    # Both are readable again.
    reshard(tmp_path / "b", tmp_path / "c", mp=2, dp=first.dp, projection=Projection("fused" if fused else "split"))
    assert_target(tmp_path / "c", model, first)


def test_the_fused_projection_holds_k_then_v_then_q_on_each_part(tmp_path: Path) -> None:
    write(tmp_path / "a", build(SMALL), Layout(1))
    reshard(tmp_path / "a", tmp_path / "b", mp=2)
    reshard(tmp_path / "a", tmp_path / "c", projection=Projection.SPLIT)
    apart = load(tmp_path / "c" / "reshard.pt")["model"]
    stem = "decoder.layers.1.self_attn"
    for part in range(2):
        fused = load(tmp_path / "b" / f"reshard-model_part-{part}.pt")["model"][f"{stem}.qkv_proj.weight"]
        thirds = [apart[f"{stem}.{letter}_proj.weight"][2 * part : 2 * part + 2] for letter in "kvq"]
        assert_same_bits(fused, torch.cat(thirds))


# -- dtypes

CASTS = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("asked", CASTS)
@pytest.mark.parametrize("stored", CASTS)
def test_casts_are_torchs_and_leave_buffers_alone(tmp_path: Path, stored: str, asked: str, flat: bool) -> None:
    model = build(replace(SMALL, dtype=getattr(torch, stored), tame=True))
    write(tmp_path / "a", model, Layout(2, 3 if flat else 1, flat))
    reshard(tmp_path / "a", tmp_path / "b", mp=1, dtype=asked)
    expected = {
        name: tensor if is_buffer(name) else tensor.to(getattr(torch, asked)) for name, tensor in model.tensors.items()
    }
    assert_same_tensors(read(shards(tmp_path / "b")), expected)


@pytest.mark.parametrize(
    ("stored", "asked"), [("float16", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_casts_of_random_bits_are_torchs(tmp_path: Path, stored: str, asked: str) -> None:
    model = build(replace(SMALL, dtype=getattr(torch, stored), positions=0))
    if asked == "bfloat16":  # what overflows is refused, so nothing here may
        for tensor in model.tensors.values():
            bits = tensor.view(torch.int32)
            bits[(bits & 0x7FFF0000) == 0x7F7F0000] = 0
    write(tmp_path / "a", model, Layout(2))
    held = merged(tmp_path / "a", tmp_path / "b", dtype=asked)
    for name, tensor in model.tensors.items():
        expected = tensor if is_buffer(name) else tensor.to(getattr(torch, asked))
        numbers = ~torch.isnan(expected)
        assert_same_bits(held[name][numbers], expected[numbers], name)
        assert torch.equal(torch.isnan(held[name]), torch.isnan(expected))


def test_a_cast_makes_mixed_dtypes_one(tmp_path: Path) -> None:
    model = build(replace(SMALL, norm_dtype=torch.float32, tame=True))
    write(tmp_path / "a", model, Layout(1))
    reshard(tmp_path / "a", tmp_path / "b", mp=2, dp=2, flat=True, dtype="float16")
    for name, tensor in read(shards(tmp_path / "b")).items():
        assert_same_bits(tensor, model.tensors[name].to(torch.float16), name)


@pytest.mark.parametrize("flat", [False, True])
def test_weights_above_65504_are_not_cast_to_fp16(tmp_path: Path, flat: bool) -> None:
    model = build(replace(SMALL, dtype=torch.bfloat16, tame=True))
    model.tensors["decoder.layers.1.fc2.bias"][1] = 70000.0
    write(tmp_path / "a", model, Layout(1, 2 if flat else 1, flat))
    with pytest.raises(ReshardError) as raised:
        reshard(tmp_path / "a", tmp_path / "b", mp=2, dtype="float16")
    assert raised.value.exit_code == 4
    assert "float16" in str(raised.value)
    assert "bf16" in str(raised.value)
    assert not (tmp_path / "b" / "manifest.json").exists()
    merged(tmp_path / "a", tmp_path / "c", dtype="float32")


def test_65504_and_infinity_are_cast_to_fp16(tmp_path: Path) -> None:
    model = build(replace(SMALL, dtype=torch.float32, tame=True))
    bias = model.tensors["decoder.layers.1.fc2.bias"]
    bias[:4] = torch.tensor([65504.0, float("inf"), float("nan"), -0.0])
    write(tmp_path / "a", model, Layout(1))
    held = merged(tmp_path / "a", tmp_path / "b", dtype="float16")["decoder.layers.1.fc2.bias"]
    assert raw(held) == raw(bias.to(torch.float16))


# -- everything that is not the model


def test_other_state_passes_through_unchanged(tmp_path: Path) -> None:
    def more(objects: Objects, mp: int, dp: int) -> Objects:
        objects["extra_state"] |= {
            "zero_dimensional": torch.tensor(2.5),
            "counts": torch.arange(5),
            "flags": torch.tensor([True, False]),
            "double": torch.tensor([1.0], dtype=torch.float64),
            "empty": torch.zeros(0, 3),
        }
        objects["unknown"] = Namespace(a={"b": (1, None, {2, 3}, slice(1, 2), b"x", 1 << 70)})
        return objects

    write(tmp_path / "a", build(SMALL), Layout(2, 2, True), edit=more)
    reshard(tmp_path / "a", tmp_path / "b", mp=1, dp=3)
    for path in shards(tmp_path / "b"):
        written = load(path)
        expected = more({"extra_state": {}}, 0, 0)
        for name, tensor in expected["extra_state"].items():
            assert_same_bits(written["extra_state"][name], tensor, name)
        assert written["unknown"] == expected["unknown"]


def test_random_states_stay_with_their_part_or_are_dropped_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a", build(SMALL), Layout(2, 2, True), random_parts=True)
    kept = reshard(tmp_path / "a", tmp_path / "b", dp=3)
    assert not any("rng_tracker_states" in name for name in kept["dropped"])
    for path in shards(tmp_path / "b"):
        state = load(path)["extra_state"]["rng_tracker_states"]["model-parallel-rng"]
        assert int(state[0]) == parse_ranks(path.name)[0]
    dropped = reshard(tmp_path / "a", tmp_path / "c", mp=1)
    assert any("rng_tracker_states" in name for name in dropped["dropped"])
    for path in shards(tmp_path / "c"):
        assert "rng_tracker_states" not in load(path)["extra_state"]


def test_every_place_of_cfg_states_the_new_mesh(tmp_path: Path) -> None:
    write(tmp_path / "a", build(SMALL), Layout(2, 2, True))
    reshard(tmp_path / "a", tmp_path / "b", mp=1, dp=1, flat=False)
    cfg = load(tmp_path / "b" / "reshard.pt")["cfg"]
    assert cfg["model"].model_parallel_size == 1
    assert cfg["common"]["model_parallel_size"] == 1
    assert cfg["checkpoint"]["model_parallel_size"] == 1
    assert cfg["distributed_training"]["distributed_world_size"] == 1
    assert cfg["distributed_training"]["use_sharded_state"] is False
    assert cfg["common"]["seed"] == 1


def test_the_position_in_the_training_data_of_rank_0_goes_to_rank_0_only(tmp_path: Path) -> None:
    def first_only(objects: Objects, mp: int, dp: int) -> Objects:
        if (mp, dp) == (0, 0):
            objects["extra_state"]["train_iterator"]["tokenization_cache"] = ["rank 0"]
        return objects

    write(tmp_path / "a", build(SMALL), Layout(2, 2, True), edit=first_only)
    for mp, dp in ((1, 1), (2, 4), (1, 3), (2, 1)):
        target = tmp_path / f"{mp}-{dp}"
        reshard(tmp_path / "a", target, mp=mp, dp=dp)
        having = [
            path.name for path in shards(target) if "tokenization_cache" in load(path)["extra_state"]["train_iterator"]
        ]
        assert having == ["reshard-model_part-0-shard0.pt"]


def test_training_state_is_dropped_on_request_and_named(tmp_path: Path) -> None:
    def train(objects: Objects, mp: int, dp: int) -> Objects:
        moments = {key: torch.rand_like(tensor) for key, tensor in objects["model"].items()}
        objects["last_optimizer_state"] = {"state": {0: {"step": 1, "exp_avg": torch.rand(3), "exp_avg_scale": 2.0}}}
        objects["extra_state"]["ema"] = moments
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2, 2, True), edit=train)
    result = reshard(tmp_path / "a", tmp_path / "b", mp=1, dp=3, keep_state=False)
    assert {"last_optimizer_state", "extra_state.ema"} <= set(result["dropped"])
    assert_target(tmp_path / "b", model, Layout(1, 3, True))
    written = load(shards(tmp_path / "b")[0])
    assert "last_optimizer_state" not in written
    assert "ema" not in written["extra_state"]


def test_files_load_with_weights_only_where_the_source_does(tmp_path: Path) -> None:
    def plain(objects: Objects, mp: int, dp: int) -> Objects:
        objects["cfg"] = {key: dict(vars(v)) if isinstance(v, Namespace) else v for key, v in objects["cfg"].items()}
        return objects

    model = build(SMALL)
    write(tmp_path / "a", model, Layout(2), edit=plain)
    reshard(tmp_path / "a", tmp_path / "b", mp=1, dp=2, flat=True)
    for path in shards(tmp_path / "b"):
        assert torch.load(path, weights_only=True)["cfg"]["model"]["model_parallel_size"] == 1
    assert_same_tensors(read(shards(tmp_path / "b")), model.tensors)


def test_a_finished_target_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path / "a", build(SMALL), Layout(2))
    reshard(tmp_path / "a", tmp_path / "b", mp=1)
    before = contents(tmp_path / "b")
    assert reshard(tmp_path / "a", tmp_path / "b", mp=1)["already_done"] is True
    assert contents(tmp_path / "b") == before
