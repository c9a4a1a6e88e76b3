"""The rules that keep the packages apart: two leaves and one root, a pure core, no checks by assert."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "tasks", "cluster")
FORBIDDEN = {
    "tasks": {"pipeline", "cluster", "ray"},
    "cluster": {"pipeline", "tasks", "torch"},
    "pipeline": {"ray"},
}
NOT_PURE = {"os", "io", "pathlib", "fsspec", "s3fs", "ray", "torch", "subprocess", "socket"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def tops(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imported(tree)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_leaves_do_not_import_the_root_or_each_other(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert (
        tops(ast.parse(path.read_text())) & FORBIDDEN[package] - ({"torch"} if package == "tasks" else set()) == set()
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_touch_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if (ast.get_docstring(tree) or "").lower().startswith("pure"):
        assert tops(tree) & NOT_PURE == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_and_checks_input_without_assert(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module docstring says what it decides or does"
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_workers_need_no_torch_unless_they_cast() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.relative_to(ROOT).parts[0] == "tasks" and "torch" in tops(ast.parse(path.read_text()))
    }
    assert importers == {"tasks/convert.py"}


def test_code_stands_in_four_folders_only() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {folder for folder in folders if list((ROOT / folder).rglob("*.py"))} == {*PACKAGES, "tests"}
