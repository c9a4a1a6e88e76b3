"""Names of files and sets of files: parsed, never matched by substring; every fault of the grid is told."""

from __future__ import annotations

import pytest

from tasks.errors import ReshardError
from tasks.formats.metaseq_files import find_checkpoint
from tasks.formats.metaseq_names import is_leftover, is_mixture, parse, target_name
from tasks.layout import Mesh
from tasks.storage import FileIdentity, ListedFile


def listed(*names: str, size: int = 10) -> list[ListedFile]:
    return [ListedFile(name, size, FileIdentity(f"/somewhere/{name}", size, "1")) for name in names]


def grid(mp: int, dp: int, prefix: str = "c") -> list[str]:
    return [f"{prefix}-model_part-{m}-shard{d}.pt" for m in range(mp) for d in range(dp)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checkpoint_last-model_part-10-shard2.pt", ("checkpoint_last", 10, 2, None)),
        ("checkpoint_18-shard3.pt", ("checkpoint_18", None, 3, None)),
        ("reshard-model_part-1.pt", ("reshard", 1, None, None)),
        ("reshard.pt", ("reshard", None, None, None)),
        ("checkpoint_1_6000.pt-model_part-0.pt", ("checkpoint_1_6000.pt", 0, None, None)),
        ("model_part1.pt", ("model", None, None, 1)),
        ("dir-shard5-model_part-0-shard12.pt", ("dir-shard5", 0, 12, None)),
    ],
)
def test_names_are_parsed(name: str, expected: tuple[object, ...]) -> None:
    found = parse(name)
    assert found is not None
    assert (found.prefix, found.mp, found.dp, found.part) == expected


def test_leftovers_and_mixtures_are_no_checkpoints() -> None:
    assert all(is_leftover(name) for name in ("a.pt.tmp", "dummy3", "_SUCCESS", ".nfs01"))
    assert is_mixture("checkpoint_last-rank-12.pt")
    assert parse("checkpoint_last-shared-shard3.pt") is None


def test_ranks_sort_as_numbers() -> None:
    found = find_checkpoint(listed(*grid(1, 12)), where="x")
    assert [file.dp for file in found.files] == list(range(12))
    assert found.mesh == Mesh(1, 12)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([*grid(2, 3)[:4], grid(2, 3)[5]], "(mp=1, dp=1)"),
        ([*grid(1, 2), "c-model_part-0-shard01.pt"], "c-model_part-0-shard01.pt"),
        ([*grid(1, 2), "c-model_part-0.pt"], "named in 2 ways"),
        ([*grid(1, 2, "a"), *grid(1, 2, "b")], "--checkpoint"),
        (["c-rank-0.pt", "c-rank-1.pt", "c-shared.pt"], "c-rank-0.pt"),
        (["notes.txt"], "notes.txt"),
        ([], "holds no checkpoint"),
    ],
)
def test_faults_of_the_set_are_told_with_names(names: list[str], said: str) -> None:
    with pytest.raises(ReshardError) as caught:
        find_checkpoint(listed(*names), where="x")
    assert caught.value.exit_code == 3
    assert said in str(caught.value)


def test_an_empty_file_of_the_grid_is_a_fault_and_an_empty_stranger_is_not() -> None:
    files = listed(*grid(1, 2)) + listed("old.pt", size=0)
    assert find_checkpoint(files, where="x").prefix == "c"
    with pytest.raises(ReshardError, match=r"shard1\.pt is empty"):
        find_checkpoint(listed(grid(1, 2)[0]) + listed(grid(1, 2)[1], size=0), where="x")


def test_links_are_followed_by_name() -> None:
    names = grid(1, 2, "checkpoint_3") + grid(1, 2, "checkpoint_last")
    aliases = dict(zip(grid(1, 2, "checkpoint_last"), grid(1, 2, "checkpoint_3"), strict=True))
    for wanted in ("", "checkpoint_last", "checkpoint_3"):
        assert find_checkpoint(listed(*names), where="x", wanted=wanted, aliases=aliases).prefix == "checkpoint_3"


def test_targets_are_named_as_metaseq_names_them() -> None:
    assert target_name("c", mp=0, dp=0, num_mp=1, flat=False) == "c.pt"
    assert target_name("c", mp=1, dp=0, num_mp=2, flat=False) == "c-model_part-1.pt"
    assert target_name("c", mp=0, dp=0, num_mp=1, flat=True) == "c-model_part-0-shard0.pt"
