"""The target of a run that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.make_checkpoint import make_checkpoint
from tests.faults.targets import IN_PIECES, LARGE_SHAPE, OPTIONS, SOURCE, published
from tests.running import reshard_here


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    reshard_here(SOURCE, folder, keep_state=True, **OPTIONS)
    return published(folder)


@pytest.fixture(scope="session")
def large_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "source"
    make_checkpoint(folder, LARGE_SHAPE, 2, 4)
    return folder


@pytest.fixture(scope="session")
def whole(large_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The target that is made of the large source in pieces, made whole."""
    folder = tmp_path_factory.mktemp("whole")
    reshard_here(large_source, folder, **{**IN_PIECES, "piece_bytes": 1 << 30})
    return published(folder)
