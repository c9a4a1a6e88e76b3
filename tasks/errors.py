"""What can be wrong, and how it is told.

A problem has a reference that can be searched, says what was declared against what is there, and ends with the next
step. Checks collect problems and raise them once, worst first.

>>> raise_if([])
>>> ReshardError([Problem(ErrorKind.SOURCE, "empty-file", "a.pt is empty", hint="copy it again")]).exit_code
3
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ErrorKind(IntEnum):
    """One exit code per class of error; the value is the code."""

    USAGE = 2
    SOURCE = 3
    PLAN = 4
    TASK = 5
    DIFFERENCE = 6
    TARGET = 7


# A bad source makes every later finding doubtful, so it is told first; then a target that must not be touched.
_WORST_FIRST = (
    ErrorKind.USAGE,
    ErrorKind.SOURCE,
    ErrorKind.TARGET,
    ErrorKind.PLAN,
    ErrorKind.DIFFERENCE,
    ErrorKind.TASK,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: ErrorKind
    reference: str
    "kebab-case, stable: what people search for"
    message: str
    "what is wrong and where, with the file or the tensor named"
    context: tuple[str, ...] = ()
    "declared against actual, one fact a line"
    hint: str = ""
    "the next step"

    def __str__(self) -> str:
        lines = [f"error[{self.reference}]: {self.message}"]
        lines += [f"  {fact}" for fact in self.context]
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)


class ReshardError(Exception):
    """All the problems found, worst first. Survives pickling, so it can cross a process boundary."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(
            sorted(problems, key=lambda problem: _WORST_FIRST.index(problem.kind))
        )
        super().__init__(self.problems)

    @property
    def exit_code(self) -> int:
        return int(self.problems[0].kind)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def error(
    kind: ErrorKind, reference: str, message: str, *, context: Iterable[str] = (), hint: str = ""
) -> ReshardError:
    """Make an error of one problem."""
    return ReshardError([Problem(kind, reference, message, tuple(context), hint)])


def raise_if(problems: Iterable[Problem]) -> None:
    """Raise all problems at once; do nothing where there are none."""
    found = tuple(problems)
    if found:
        raise ReshardError(found)
