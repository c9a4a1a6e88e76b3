"""Pure. Finds the checkpoints in a folder's listing, and everything that is wrong with the set of files of one.

Nothing is read: names and sizes are enough to see holes and doubles in the (mp, dp) grid, empty files, leftovers of
crashed saves, and checkpoints of kinds that are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.errors import ErrorKind, Problem, raise_if
from tasks.family import some
from tasks.formats.metaseq_names import FileName, is_leftover, is_mixture, parse
from tasks.layout import Mesh
from tasks.storage import FileIdentity, ListedFile


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of the checkpoint and its rank."""

    mp: int
    dp: int
    identity: FileIdentity


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint in a folder."""

    prefix: str
    mesh: Mesh
    files: tuple[ShardFile, ...]
    ignored: tuple[str, ...] = ()
    "names of files that were left out, with the reason"


def find_checkpoint(
    files: Sequence[ListedFile], *, where: str, wanted: str = "", aliases: Mapping[str, str] | None = None
) -> Found:
    """Choose the checkpoint among the files of a folder, and check its grid; raise all problems at once.

    `aliases` are names that lead to other names of the same folder (links, or what an archive tool made of links).
    """
    aliases = aliases or {}
    mixture = sorted(file.name for file in files if is_mixture(file.name))
    named = {file.name: file for file in files if file.name not in aliases}
    groups: dict[str, dict[FileName, list[ListedFile]]] = {}
    ignored = [f"{name} (link to {to})" for name, to in sorted(aliases.items())]
    for file in named.values():
        parsed = parse(file.name)
        if parsed is None:
            if is_leftover(file.name):
                ignored.append(f"{file.name} (left over by a save)")
            continue
        groups.setdefault(parsed.prefix, {}).setdefault(parsed, []).append(file)
    # What a crashed save leaves behind can be empty; an empty file among others is a fault of that checkpoint.
    for prefix in [p for p, group in groups.items() if _is_empty(group) and p != wanted]:
        ignored.append(f"{prefix}*.pt (empty)")
        del groups[prefix]
    if not groups or (mixture and len(mixture) == len([f for f in named.values() if f.size_bytes])):
        raise_if(_nothing_found(where, mixture, files))
    prefix = _choose(groups, where, _alias_target(wanted, aliases), mixture, ignored)
    return _check(prefix, groups[prefix], ignored)


def _is_empty(group: Mapping[FileName, Sequence[ListedFile]]) -> bool:
    return all(file.size_bytes == 0 for files in group.values() for file in files)


def _alias_target(wanted: str, aliases: Mapping[str, str]) -> str:
    for name, target in aliases.items():
        parsed, to = parse(name), parse(target)
        if parsed and to and parsed.prefix == wanted:
            return to.prefix
    return wanted


def _nothing_found(where: str, mixture: Sequence[str], files: Sequence[ListedFile]) -> list[Problem]:
    if mixture:
        return [_mixture_problem(mixture)]
    names = some(sorted(file.name for file in files)) or "nothing"
    message = f"{where} holds no checkpoint"
    hint = "pass the folder that holds the *.pt files, or one file"
    return [Problem(ErrorKind.SOURCE, "no-checkpoint", message, (f"expected: *.pt files; actual: {names}",), hint)]


def _mixture_problem(mixture: Sequence[str]) -> Problem:
    return Problem(
        ErrorKind.SOURCE,
        "mixture-of-experts",
        f"{len(mixture)} files are of a mixture-of-experts checkpoint: {some(list(mixture))}",
        hint="mixture-of-experts checkpoints are not supported: no file of theirs is used or left out",
    )


def _choose(
    groups: Mapping[str, Mapping[FileName, Sequence[ListedFile]]],
    where: str,
    wanted: str,
    mixture: Sequence[str],
    ignored: list[str],
) -> str:
    wanted = wanted.removesuffix(".pt") if wanted not in groups else wanted
    choices = sorted(groups)
    if wanted:
        if wanted in groups:
            return wanted
        message = f"{where} holds no checkpoint named {wanted}"
        raise_if([Problem(ErrorKind.SOURCE, "no-checkpoint", message, (f"there are: {some(choices)}",), "choose one")])
    if mixture:
        raise_if([_mixture_problem(mixture)])
    if len(choices) == 1:
        return choices[0]
    # A grid of files beside single files (a dictionary, a merged copy) is what most folders are: the grid is meant.
    grids = [name for name in choices if any(p.mp is not None or p.dp is not None for p in groups[name])]
    if len(grids) == 1:
        ignored += [
            f"{name}.pt (another checkpoint or file: take it with --checkpoint {name})"
            for name in choices
            if name != grids[0]
        ]
        return grids[0]
    message = f"{where} holds {len(choices)} checkpoints: {some(choices)}"
    raise_if([Problem(ErrorKind.SOURCE, "several-checkpoints", message, hint="choose one with --checkpoint NAME")])
    return ""


def _check(prefix: str, group: Mapping[FileName, Sequence[ListedFile]], ignored: Sequence[str]) -> Found:
    problems: list[Problem] = []
    styles = {(name.mp is not None, name.dp is not None, name.part is not None) for name in group}
    if len(styles) > 1:
        examples = [
            f"{next(files[0].name for n, files in group.items() if _style(n) == style)}" for style in sorted(styles)
        ]
        problems.append(
            Problem(
                ErrorKind.SOURCE,
                "mixed-checkpoints",
                f"the files of {prefix} are named in {len(styles)} ways, so they are of several checkpoints",
                tuple(f"for example {name}" for name in examples),
                "keep the files of one checkpoint, or pass a quoted glob that matches only those",
            )
        )
        raise_if(problems)
    cells: dict[tuple[int, int], list[ListedFile]] = {}
    for name, files in group.items():
        cells.setdefault((name.mp or 0, name.dp or 0), []).extend(files)
        if len(files) > 1:
            problems.append(_double(name, files))
    mesh = Mesh(max(mp for mp, _ in cells) + 1, max(dp for _, dp in cells) + 1)
    holes = [(mp, dp) for mp in range(mesh.mp) for dp in range(mesh.dp) if (mp, dp) not in cells]
    if holes:
        listed = some([f"(mp={mp}, dp={dp})" for mp, dp in holes], 12)
        problems.append(
            Problem(
                ErrorKind.SOURCE,
                "missing-files",
                f"{len(holes)} of {mesh.mp * mesh.dp} files of {prefix} are missing: {listed}",
                (f"declared: the names there are make a grid of {mesh}; actual: {len(cells)} files",),
                "copy the missing files, or save the checkpoint again",
            )
        )
    parts = {name.part for name in group if name.part is not None}
    if absent := sorted(set(range(max(parts, default=-1) + 1)) - parts):
        listed = some([f"{prefix}_part{part}.pt" for part in absent], 12)
        problems.append(
            Problem(
                ErrorKind.SOURCE,
                "missing-files",
                f"{len(absent)} files of {prefix} are missing: {listed}",
                (f"declared: parts up to {max(parts)}; actual: {len(parts)} files",),
                "copy the missing files, or save the checkpoint again",
            )
        )
    for files in cells.values():
        for file in files:
            if file.size_bytes == 0:
                message, hint = f"{file.identity.url} is empty", "copy it again, or save the checkpoint again"
                problems.append(Problem(ErrorKind.SOURCE, "empty-file", message, hint=hint))
    raise_if(problems)
    found = [(rank, file.identity) for rank in sorted(cells) for file in sorted(cells[rank], key=lambda f: f.name)]
    return Found(prefix, mesh, tuple(ShardFile(mp, dp, identity) for (mp, dp), identity in found), tuple(ignored))


def _style(name: FileName) -> tuple[bool, bool, bool]:
    return name.mp is not None, name.dp is not None, name.part is not None


def _double(cell: object, files: Sequence[ListedFile]) -> Problem:
    names = ", ".join(sorted(file.name for file in files))
    return Problem(
        ErrorKind.SOURCE,
        "duplicate-files",
        f"several files are of one rank: {names}",
        (f"rank: {cell}",),
        "take away the one that does not belong to this checkpoint",
    )
