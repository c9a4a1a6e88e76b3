"""What must be true of the files of one checkpoint together, on hand-made indexes."""

from __future__ import annotations

import pytest

from tasks.checkpoint import OptimizerIndex, ParameterState, ShardIndex
from tasks.formats.metaseq_checks import scalar_problems
from tasks.storage.interface import FileIdentity

FIRST = OptimizerIndex((ParameterState(0, (), (("step", "3"),)), ParameterState(1, (), (("step", "3"),))), ((0, 1),))


def indexes(*optimizers: OptimizerIndex | None) -> list[ShardIndex]:
    """One file each, of part 0."""
    return [
        ShardIndex(FileIdentity(f"shard{dp}.pt", 1, ""), 0, dp, optimizer=optimizer)
        for dp, optimizer in enumerate(optimizers)
    ]


def test_files_that_agree_and_files_without_state_are_no_fault() -> None:
    assert scalar_problems(indexes(FIRST, None, FIRST)) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            OptimizerIndex((FIRST.parameters[0], ParameterState(1, (), (("step", "4"),))), FIRST.groups),
            "the optimizer's state of parameter 1 differs between files",
        ),
        (
            OptimizerIndex(FIRST.parameters[:1], FIRST.groups),
            "the optimizer's state is of different parameters or moments in these files: ",
        ),
        (OptimizerIndex(FIRST.parameters, ((0,), (1,))), "param_groups differ between files: "),
    ],
)
def test_each_way_to_disagree_is_told_with_the_files(other: OptimizerIndex, message: str) -> None:
    (problem,) = scalar_problems(indexes(FIRST, None, other))
    assert problem.reference == "optimizer-states-differ"
    assert problem.message.startswith(message)
    told = problem.message + " ".join(problem.context)
    assert "shard0.pt (mp=0, dp=0)" in told
    assert "shard2.pt (mp=0, dp=2)" in told
