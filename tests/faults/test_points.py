"""The list of points is the list of places: a point that nothing reaches would be tested in vain."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import faults
from tasks.errors import ReshardError
from tasks.storage import TransientStorageError

ROOT = Path(__file__).parent.parent.parent


def reached_in(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "reach"]
    return [ast.literal_eval(call.args[0]) for call in named]


def test_every_point_is_one_place_in_the_code() -> None:
    files = [path for package in ("pipeline", "tasks", "cluster") for path in (ROOT / package).rglob("*.py")]
    places = [point for path in files for point in reached_in(path)]
    assert sorted(places) == sorted(faults.POINTS)
    assert len(set(faults.POINTS)) == len(faults.POINTS)


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    (tmp_path / "planned:fail:1").touch()
    faults.reach("planned")
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "missing"))
    faults.reach("planned")


def test_a_fault_is_counted_down_and_happens_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    (tmp_path / "planned:fail:3").touch()
    faults.reach("planned")
    faults.reach("folder-opened")
    faults.reach("planned")
    assert [path.name for path in tmp_path.iterdir()] == ["planned:fail:1"]
    with pytest.raises(ReshardError, match="there: injected at planned"):
        faults.reach("planned", "there")
    faults.reach("planned")
    assert [path.name for path in tmp_path.iterdir()] == ["planned:happened"]


def test_a_fault_for_ever_does_not_wear_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    (tmp_path / "planned:raise:always").touch()
    for _ in range(3):
        with pytest.raises(TransientStorageError):
            faults.reach("planned")


def test_passes_at_the_same_moment_are_all_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    num_threads, num_passes = 8, 25
    (tmp_path / f"planned:raise:{num_threads * num_passes}").touch()

    def pass_by(_: int) -> int:
        hits = 0
        for _ in range(num_passes):
            try:
                faults.reach("planned")
            except TransientStorageError:
                hits += 1
        return hits

    with ThreadPoolExecutor(num_threads) as pool:
        assert sum(pool.map(pass_by, range(num_threads))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["planned:happened"]
