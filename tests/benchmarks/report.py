"""Turns measurements into ratios, goals met or missed, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.benchmarks.ours import JOBS
from tests.benchmarks.rounds import CP, CP_FSYNC, OURS, OURS_FSYNC, Measured

MOST_RATIO = 1.3
MOST_MEMORY_BYTES = 100_000_000
MOST_PLANNING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One number that must not be larger than its limit."""

    name: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit


def ratio(numbers: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio within a round."""
    return median(a / b for a, b in zip(numbers, others, strict=True))


def goals(measured: Measured, planning_seconds: float | None) -> list[Goal]:
    """Compare like with like: without fsync to `cp`; with it, as is the default, to `cp` and fsync."""
    seconds = measured.seconds
    found = [
        Goal(f"{kind} / {copy}: {job.name}", ratio(seconds[f"{kind}: {job.name}"], seconds[copy]), MOST_RATIO)
        for kind, copy in ((OURS, CP), (OURS_FSYNC, CP_FSYNC))
        for job in JOBS
    ]
    found.append(Goal("worker above an idle one, MB", above_idle(measured) / 1e6, MOST_MEMORY_BYTES / 1e6))
    if planning_seconds is not None:
        found.append(Goal("dry run of OPT-175B, s", planning_seconds, MOST_PLANNING_SECONDS))
    return found


def above_idle(measured: Measured) -> int:
    by_results = measured.bytes["beyond the idle worker, by its results"]
    return max(measured.bytes["worker"] - measured.bytes["idle worker"], by_results)


def table(measured: Measured, found: Sequence[Goal]) -> str:
    """Lay everything out for people."""
    seconds = measured.seconds
    lines = [f"{'seconds':52} {'best':>7} {'median':>7} {'/ cp':>6} {'/ (cp + fsync)':>15}"]
    for name, numbers in seconds.items():
        line = f"{name:52} {min(numbers):7.2f} {median(numbers):7.2f}"
        if not name.startswith(("command", "dry run")):
            line += f" {ratio(numbers, seconds[CP]):6.2f} {ratio(numbers, seconds[CP_FSYNC]):15.2f}"
        lines.append(line)
    lines += ["", f"{'memory':52} {'MB':>7}"]
    lines += [f"{name:52} {number / 1e6:7.0f}" for name, number in measured.bytes.items()]
    lines += ["", *(f"{name}: {fact}" for name, fact in measured.facts.items())]
    lines += ["", f"load average after each round: {', '.join(map(str, measured.loads))}"]
    lines += [f"measured again, because the machine's host took memory away meanwhile: {measured.repeated}"]
    lines += ["ratios are medians of the ratios within rounds; `ours` is the work of the three kinds of tasks", ""]
    lines += [
        f"{'pass' if goal.is_met else 'MISS'}  {goal.name}: {goal.value:.2f} (at most {goal.limit:g})" for goal in found
    ]
    return "\n".join(lines)


def as_json(measured: Measured, found: Sequence[Goal]) -> dict[str, Any]:
    return {**vars(measured), "goals": [{**asdict(goal), "is_met": goal.is_met} for goal in found]}
