"""Runs a request in this process, without Ray, and tells what a refused one was refused for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.dag import Node
from cluster.failures import NodeFailed
from cluster.inline import InlineExecution
from pipeline import nodes
from pipeline.discovery import discover
from pipeline.driver import execute
from pipeline.messages import Progress
from pipeline.options import Request, check_request
from pipeline.planning import Plan, index_here, make_plan
from tasks.errors import ReshardError


class ShuffledExecution(InlineExecution):
    """Takes the nodes of each call in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__(nodes.FUNCTIONS)
        self._random = random.Random(seed)

    def run(self, nodes: Sequence[Node]) -> dict[str, object]:
        return super().run(self._random.sample(list(nodes), len(nodes)))


def reshard(
    source: Path | str, target: Path, *, execution: InlineExecution | None = None, **options: Any
) -> Mapping[str, Any]:
    """Carry a request out; errors come as the command line would tell them."""
    request = Request(source=str(source), target=str(target), **options)
    check_request(request)
    found = discover(request.source, request.checkpoint)
    with execution or InlineExecution(nodes.FUNCTIONS) as inline:
        try:
            return execute(request, found, inline, Progress())
        except NodeFailed as fault:
            if isinstance(fault.cause, ReshardError):
                raise fault.cause from fault
            raise


def plan_of(source: Path, target: Path, **options: Any) -> Plan:
    request = Request(source=str(source), target=str(target), **options)
    found = discover(request.source, request.checkpoint)
    return make_plan(request, found, index_here(found.files))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"))


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, to see that nothing was written."""
    if not folder.exists():
        return {}
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(source: Path | str, target: Path, exit_code: int, *names: str, **options: Any) -> ReshardError:
    """Assert that a request is refused with this code, names each of `names`, and leaves the target as it was."""
    before, existed = contents(target), target.exists()
    with pytest.raises(ReshardError) as raised:
        reshard(source, target, **options)
    fault = raised.value
    assert fault.exit_code == exit_code, f"exit code {fault.exit_code} instead of {exit_code}: {fault}"
    text = str(fault)
    for name in names:
        assert name in text, f"{name!r} is not named in: {text}"
    for problem in fault.problems:
        assert problem.hint.strip(), f"there is no next step in: {problem}"
    assert (contents(target), target.exists()) == (before, existed), "the target was written to"
    return fault
