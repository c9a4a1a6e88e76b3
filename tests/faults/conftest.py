"""The target of a run that nothing disturbed."""

from __future__ import annotations

import pytest

from tests.faults.targets import OPTIONS, SOURCE, published
from tests.running import reshard_here


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    reshard_here(SOURCE, folder, keep_state=True, **OPTIONS)
    return published(folder)
