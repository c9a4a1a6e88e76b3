"""A cluster of two machines: both work, and the death of one costs time only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch, packages = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("packages")
    (packages / "shipped_package").mkdir()
    (packages / "shipped_package" / "__init__.py").write_text("NAME = 'shipped'\n")
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_hosts", str(scratch), str(packages / "shipped_package")],
        cwd=ROOT,
        env={
            **clean,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_joined_cluster_is_not_local_and_all_its_machines_count(seen: dict[str, Any]) -> None:
    assert (seen["is_local"], seen["num_workers"]) == (False, 2)


def test_packages_and_variables_reach_the_workers(seen: dict[str, Any]) -> None:
    assert seen["shipped"] == {"package": "shipped", "variable": "yes"}


def test_nodes_run_on_both_machines(seen: dict[str, Any]) -> None:
    assert len(seen["hosts"]) == 2


def test_a_run_outlives_the_death_of_a_machine(seen: dict[str, Any]) -> None:
    assert "slow-0" in seen["death"]["retried"]


def test_lost_payloads_are_made_again_all_at_once(seen: dict[str, Any]) -> None:
    assert seen["death"]["sum"] == 3 * 7 * (1 << 20)
    assert seen["death"]["makes"] == [f"make-{n}.{attempt}" for n in range(3) for attempt in (1, 2)]
    assert seen["death"]["attempts_of_sum"] == 2


def test_what_a_silent_machine_was_given_runs_elsewhere(seen: dict[str, Any]) -> None:
    silence = seen["silence"]
    assert silence["elsewhere"]
    assert len(silence["retries"]) == 1
    assert silence["retries"][0].startswith("a machine was lost, and nothing has finished for")
