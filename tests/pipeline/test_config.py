"""Every place of a configuration that states the mesh is made true; nothing else of it changes.

Kinds: plain dict, Namespace, `args` of older files, DictConfig of real omegaconf (see tests/data/omegaconf/README.md).
"""

from __future__ import annotations

import argparse
import io
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.torchfile.file_index import open_torch_file
from tasks.torchfile.pickler import dump_pickle
from tests.running import FIXTURES, load, reshard_here

OMEGACONF = Path(__file__).parents[1] / "data" / "omegaconf"
VERSIONS = sorted(
    path.name for path in OMEGACONF.iterdir() if (path / "checkpoint_last-model_part-0-shard0.pt").exists()
)
RANKED = FIXTURES / "mp2dp2-fp16-fused"


def flattened(node: Any) -> dict[str, object]:
    """List all leaves by their paths, sharing included: an object met again is told by its first path."""
    found: dict[str, object] = {}
    first: dict[int, str] = {}
    kept: list[object] = []  # no id is used twice
    stack: list[tuple[str, Any]] = [("cfg", node)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str | int | float | bool | bytes | None | type):
            found[path] = (type(item), item.__name__ if isinstance(item, type) else item)
            continue
        if id(item) in first:
            found[path] = f"same as {first[id(item)]}"
            continue
        first[id(item)] = path
        kept.append(item)
        found[f"{path}:"] = type(item).__name__
        below: dict[Any, Any] = dict(item) if isinstance(item, dict) else {}
        if isinstance(item, list | tuple):
            below = dict(enumerate(item))
        for name, value in {**getattr(item, "__dict__", {}), **below}.items():
            # omegaconf's inner names are left out, so that paths read alike for all kinds.
            stack.append((path if name in ("state", "_content", "_val") else f"{path}.{name}", value))
    return found


def changes(before: object, after: object) -> dict[str, object]:
    """Compare two trees; give the paths that changed with their new values. Types and paths must be the same."""
    old, new = flattened(before), flattened(after)
    assert list(old) == list(new)
    changed = {}
    for path, value in new.items():
        if value != old[path]:
            assert isinstance(value, tuple)
            assert value[0] is old[path][0], path  # type: ignore[index]
            changed[path] = value[1]
    return changed


def opcodes(path: Path, key: str) -> list[tuple[str, object]]:
    """List the opcodes of the object under a key, as a file of its own would have them."""
    data = path.read_bytes()
    found = open_torch_file(lambda offset, length: data[offset : offset + length], len(data), path.name)
    written, _ = dump_pickle(found.root[key])  # type: ignore[index]
    return [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(io.BytesIO(written))]


def changed_opcodes(before: Path, after: Path, key: str) -> list[tuple[object, object]]:
    """Compare what is written, opcode by opcode."""
    pairs = zip(opcodes(before, key), opcodes(after, key), strict=True)
    return [(old[1], new[1] if old[0] in ("BININT1", "BINUNICODE") else new[0]) for old, new in pairs if old != new]


def parts(target: Path, mp: int, dp: int) -> Iterator[tuple[int, int, Path]]:
    for part in range(mp):
        for shard in range(dp):
            yield part, shard, target / f"re-model_part-{part}-shard{shard}.pt"


def expected_of_fixture(part: int, shard: int, mp: int, dp: int) -> dict[str, object]:
    """The places of the trainer's own configuration (metaseq main), in five groups; the copies state no real rank."""
    return {
        **{f"cfg.{group}.model_parallel_size": mp for group in ("model", "criterion", "common", "checkpoint")},
        **{f"cfg.{group}.distributed_world_size": mp * dp for group in ("model", "criterion", "distributed_training")},
        "cfg.distributed_training.distributed_rank": shard * mp + part,
        "cfg.checkpoint.checkpoint_suffix": f"-model_part-{part}",
    }


def differing(before: object, expected: dict[str, object]) -> dict[str, object]:
    """Leave out what was so before. All paths must be there."""
    old = flattened(before)
    return {path: value for path, value in expected.items() if old[path] != (type(value), value)}


@pytest.mark.parametrize(("mp", "dp"), [(1, 3), (1, 5), (2, 1)])
def test_every_place_of_a_dict_is_changed_and_nothing_else(mp: int, dp: int, tmp_path: Path) -> None:
    reshard_here(RANKED, tmp_path, mp=mp, dp=dp, flat=True, prefix="re")
    for part, shard, path in parts(tmp_path, mp, dp):
        provider = RANKED / f"checkpoint_last-model_part-{part}-shard{min(shard, 1)}.pt"
        before = load(provider)["cfg"]
        expected = differing(before, expected_of_fixture(part, shard, mp, dp))
        assert len(expected) >= 3
        assert changes(before, load(path)["cfg"]) == expected
        assert len(changed_opcodes(provider, path, "cfg")) <= len(expected)


def test_a_target_of_single_files_states_that_its_state_is_not_sharded(tmp_path: Path) -> None:
    reshard_here(RANKED, tmp_path, mp=1, dp=1, flat=False, prefix="re")
    before = load(RANKED / "checkpoint_last-model_part-0-shard0.pt")["cfg"]
    assert changes(before, load(tmp_path / "re.pt")["cfg"]) == {
        **differing(before, expected_of_fixture(0, 0, 1, 1)),
        **{f"cfg.{group}.use_sharded_state": False for group in ("model", "criterion", "distributed_training")},
    }


def test_the_same_mesh_changes_nothing(tmp_path: Path) -> None:
    reshard_here(RANKED, tmp_path, mp=2, dp=2, flat=True, prefix="re")
    for part, shard, path in parts(tmp_path, 2, 2):
        source = RANKED / f"checkpoint_last-model_part-{part}-shard{shard}.pt"
        assert changed_opcodes(source, path, "cfg") == []


def rewritten(target: Path, change: Any) -> Path:
    """The fixture with other objects in it, saved by torch; every file says its rank."""
    target.mkdir()
    for part in range(2):
        for shard in range(2):
            name = f"checkpoint_last-model_part-{part}-shard{shard}.pt"
            root = load(RANKED / name)
            change(root, part, shard)
            torch.save(root, target / name)
    return target


def as_namespace(root: dict[str, Any], part: int, shard: int) -> None:
    cfg = {
        name: argparse.Namespace(**group) if isinstance(group, dict) else group for name, group in root["cfg"].items()
    }
    for group in ("model", "criterion", "distributed_training"):
        cfg[group].distributed_rank = shard * 2 + part
    cfg["checkpoint"].checkpoint_suffix = f"-model_part-{part}-shard{shard}"
    root["cfg"] = argparse.Namespace(**cfg)


def as_args(root: dict[str, Any], part: int, shard: int) -> None:
    root["args"] = root.pop("cfg")["model"]
    root["args"].distributed_rank = shard * 2 + part
    root["args"].checkpoint_suffix = f"-model_part-{part}-shard{shard}"


@pytest.mark.parametrize(("mp", "dp"), [(1, 2), (2, 3)])
def test_namespaces_in_namespaces_are_changed_like_dicts(mp: int, dp: int, tmp_path: Path) -> None:
    source = rewritten(tmp_path / "source", as_namespace)
    reshard_here(source, tmp_path / "target", mp=mp, dp=dp, flat=True, prefix="re")
    for part, shard, path in parts(tmp_path / "target", mp, dp):
        before = load(source / f"checkpoint_last-model_part-{part}-shard{min(shard, 1)}.pt")["cfg"]
        after = load(path)["cfg"]
        assert type(after) is argparse.Namespace
        expected = {
            **expected_of_fixture(part, shard, mp, dp),
            **{f"cfg.{group}.distributed_rank": shard * mp + part for group in ("model", "criterion")},
            "cfg.checkpoint.checkpoint_suffix": f"-model_part-{part}-shard{shard}",
        }
        assert changes(before, after) == differing(before, expected)


def test_the_args_of_older_files_are_changed(tmp_path: Path) -> None:
    source = rewritten(tmp_path / "source", as_args)
    reshard_here(source, tmp_path / "target", mp=1, dp=3, flat=True, prefix="re")
    for _, shard, path in parts(tmp_path / "target", 1, 3):
        root = load(path)
        assert "cfg" not in root
        assert type(root["args"]) is argparse.Namespace
        assert root["args"].distributed_rank == shard
        provider = load(source / f"checkpoint_last-model_part-0-shard{min(shard, 1)}.pt")["args"]
        expected = {
            "cfg.model_parallel_size": 1,
            "cfg.distributed_world_size": 3,
            "cfg.distributed_rank": shard,
            "cfg.checkpoint_suffix": f"-model_part-0-shard{shard}",
        }
        assert changes(provider, root["args"]) == differing(provider, expected)


# omegaconf


def test_there_are_files_of_old_and_new_versions() -> None:
    assert VERSIONS == ["2.0.6", "2.1.2", "2.2.3", "2.3.0", "2.4.0.dev4"]


def expected_of_omegaconf(version: str, part: int, shard: int, mp: int, dp: int, *, flat: bool) -> dict[str, object]:
    """Interpolated copies (`checkpoint.model_parallel_size`, `dataset.num_shards`) follow by themselves."""
    sizes = ["common", "model", "criterion", "stages.0"]
    sharded = ["model", "distributed_training", "stages.0"]
    if version >= "2.2":
        sizes.append("union")
        sharded.append("union")
    return {
        **{f"cfg.{group}.model_parallel_size": mp for group in sizes},
        **{
            f"cfg.{group}.distributed_world_size": mp * dp
            for group in ("model", "criterion", "distributed_training", "stages.1.0")
        },
        **{f"cfg.{group}.distributed_rank": shard * mp + part for group in ("model", "distributed_training")},
        **{f"cfg.{group}.use_sharded_state": flat for group in sharded},
        "cfg.checkpoint.checkpoint_suffix": f"-model_part-{part}-shard{shard}",
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("mp", "dp", "flat"), [(1, 3, True), (1, 1, False), (2, 2, True)])
def test_every_place_of_a_dictconfig_is_changed_and_nothing_else(
    version: str, mp: int, dp: int, flat: bool, tmp_path: Path
) -> None:
    reshard_here(OMEGACONF / version, tmp_path, mp=mp, dp=dp, flat=flat, prefix="re")
    files = list(parts(tmp_path, mp, dp)) if flat else [(0, 0, tmp_path / "re.pt")]
    for part, shard, path in files:
        provider = OMEGACONF / version / f"checkpoint_last-model_part-{part}-shard0.pt"
        before, after = load(provider)["cfg"], load(path)["cfg"]
        expected = differing(before, expected_of_omegaconf(version, part, shard, mp, dp, flat=flat))
        assert changes(before, after) == expected
        # Nothing else of what is written differs, to the opcode.
        assert len(changed_opcodes(provider, path, "cfg")) <= len(expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_omegaconf_itself_reads_the_result(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed: tests/data/omegaconf/README.md")
    if omegaconf.__version__ < version:
        pytest.skip(f"omegaconf {omegaconf.__version__} is older than the file")
    monkeypatch.syspath_prepend(OMEGACONF)
    reshard_here(OMEGACONF / version, tmp_path, mp=1, dp=3, flat=True, prefix="re")
    for _, shard, path in parts(tmp_path, 1, 3):
        cfg = torch.load(path, weights_only=False)["cfg"]
        source = torch.load(OMEGACONF / version / "checkpoint_last-model_part-0-shard0.pt", weights_only=False)["cfg"]
        for group in (cfg.common, cfg.model, cfg.criterion, cfg.checkpoint, cfg.stages[0]):
            assert group.model_parallel_size == 1
        for group in (cfg.model, cfg.criterion, cfg.distributed_training, cfg.stages[1][0]):
            assert group.distributed_world_size == 3
        assert cfg.dataset.num_shards == 3
        assert cfg.model.distributed_rank == cfg.distributed_training.distributed_rank == shard
        assert cfg.checkpoint.checkpoint_suffix == f"-model_part-0-shard{shard}"
        assert cfg.distributed_training.distributed_backend == source.distributed_training.distributed_backend
        if version >= "2.2":
            assert cfg.union.model_parallel_size == 1
        for config in (cfg, source):
            omegaconf.OmegaConf.set_readonly(config, False)
            omegaconf.OmegaConf.set_readonly(config.common, False)
        for group in (source.common, source.model, source.criterion, source.stages[0]):
            group.model_parallel_size = 1
        for group in (source.model, source.criterion, source.distributed_training, source.stages[1][0]):
            group.distributed_world_size = 3
        source.model.distributed_rank = source.distributed_training.distributed_rank = shard
        source.checkpoint.checkpoint_suffix = f"-model_part-0-shard{shard}"
        if version >= "2.2":
            source.union.model_parallel_size = 1
        assert cfg == source
