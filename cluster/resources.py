"""Pure. What a task of each kind asks of a machine, and whether a cluster can ever give it.

Ray uses these numbers only to admit tasks, never to limit them; a request that no machine can meet waits for ever
without a word, so `check_capacity` is asked before the first task is submitted.

>>> check_capacity({"write_target_shard": TaskResources(num_cpus=4)}, [{"CPU": 2.0}])[0].splitlines()[0]
'no machine can run write_target_shard: it asks CPU 4, the largest machine has CPU 2'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("unflatten_source_shard", "regroup_mp_slice", "write_target_shard")

# Every distinct request is a scheduling class of its own: 1,000 distinct memory values cost Ray 13 s, 8 cost 0.8 s.
# Four steps to a doubling waste at most a quarter of the memory asked and leave a handful of classes.
_MEMORY_STEPS_PER_DOUBLING = 4
_SMALLEST_MEMORY_CLASS_BYTES = 64 << 20

# Ray's own unit: it rounds to 1/10,000 and refuses fractions above one.
_SMALLEST_FRACTION = 0.0001

_RESERVED = frozenset({"CPU", "GPU", "memory", "object_store_memory"})


@dataclass(frozen=True, slots=True)
class TaskResources:
    """What one running task holds of its machine."""

    num_cpus: float = 1
    "whole, or a fraction below one"
    memory_bytes: int = 0
    "rounded up to a memory class when asked of Ray; 0 asks for none"
    num_gpus: float = 0
    "only to be placed on machines that have some: no task computes on one"
    custom: tuple[tuple[str, float], ...] = ()
    "names the operator gave to machines, and how much of each to hold"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={amount:g} is neither whole nor a fraction between {_SMALLEST_FRACTION} and 1"
            for name, amount in (("num_cpus", self.num_cpus), ("num_gpus", self.num_gpus), *self.custom)
            if not _is_askable(amount)
        ]
        if self.memory_bytes < 0:
            problems.append(f"memory_bytes={self.memory_bytes} is negative")
        names = [name for name, _ in self.custom]
        problems += [f"{name} is no custom resource: use num_cpus, num_gpus" for name in names if name in _RESERVED]
        problems += [f"{name} is given twice" for name in sorted({name for name in names if names.count(name) > 1})]
        if problems:
            raise ValueError("; ".join(problems))

    def requests(self) -> dict[str, float]:
        """Return what is asked under Ray's resource names, without what is asked at zero."""
        asked = {
            "CPU": self.num_cpus,
            "GPU": self.num_gpus,
            "memory": float(memory_class_bytes(self.memory_bytes)),
            **dict(self.custom),
        }
        return {name: amount for name, amount in asked.items() if amount > 0}

    def options(self) -> dict[str, object]:
        """Return the keyword arguments of `RemoteFunction.options`."""
        options: dict[str, object] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.memory_bytes:
            options["memory"] = memory_class_bytes(self.memory_bytes)
        if self.custom:
            options["resources"] = dict(self.custom)
        return options


@dataclass(frozen=True, slots=True)
class ResourceOptions:
    """What an operator may say about all kinds at once."""

    num_cpus: float = 1
    num_gpus: float = 0
    custom: tuple[tuple[str, float], ...] = ()


def memory_class_bytes(memory_bytes: int) -> int:
    """Round up to one of a few classes; 0 stays 0.

    >>> [memory_class_bytes(mebibytes << 20) >> 20 for mebibytes in (0, 1, 64, 65, 1024, 1025)]
    [0, 64, 64, 80, 1024, 1280]
    """
    if memory_bytes <= 0:
        return 0
    at_least = max(memory_bytes, _SMALLEST_MEMORY_CLASS_BYTES)
    step_bytes = (1 << (at_least.bit_length() - 1)) // _MEMORY_STEPS_PER_DOUBLING
    return -(-at_least // step_bytes) * step_bytes


def default_resources(
    memory_bytes: int, *, num_cpus: float = 1, num_gpus: float = 0, custom: Iterable[tuple[str, float]] = ()
) -> dict[str, TaskResources]:
    """Return the resources of every kind: the one place where they are decided.

    `memory_bytes` is the budget of one worker. All kinds ask the same: each is planned to stay within the budget, and
    each is one thread that mostly waits for storage.
    """
    same = TaskResources(num_cpus=num_cpus, memory_bytes=memory_bytes, num_gpus=num_gpus, custom=tuple(custom))
    return dict.fromkeys(KINDS, same)


def parse_resource_options(items: Sequence[str]) -> ResourceOptions:
    """Read `name=amount` items; raise ValueError that lists every bad one.

    >>> parse_resource_options(["num_gpus=0.25", "fast_disk=1"])
    ResourceOptions(num_cpus=1, num_gpus=0.25, custom=(('fast_disk', 1.0),))
    """
    amounts: dict[str, float] = {}
    problems: list[str] = []
    for item in items:
        name, equals, text = item.partition("=")
        amount = _parse_amount(text)
        if not name or not equals or amount is None:
            problems.append(f"{item!r} is not name=amount, as in num_gpus=0.25 or fast_disk=1")
        elif name == "memory_bytes" or name in _RESERVED:
            problems.append(f"{item!r}: {name} is not set here; use num_cpus, num_gpus or a name of your own")
        elif name in amounts:
            problems.append(f"{item!r}: {name} is given twice")
        elif not _is_askable(amount):
            problems.append(f"{item!r}: neither whole nor a fraction between {_SMALLEST_FRACTION} and 1")
        else:
            amounts[name] = amount
    if problems:
        raise ValueError("\n".join(problems))
    return ResourceOptions(
        num_cpus=amounts.pop("num_cpus", 1), num_gpus=amounts.pop("num_gpus", 0), custom=tuple(amounts.items())
    )


def check_capacity(resources: Mapping[str, TaskResources], nodes: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Return one message for each kind that no single machine could ever run, though it were idle.

    `nodes` has the total resources of each live machine under Ray's names, as `Session.nodes` returns them.
    """
    if not nodes:
        return ("no machine is alive in the cluster\n  next: start workers, or check the address",)
    messages = []
    for kind, asked in resources.items():
        requests = asked.requests()
        if any(_num_fitting(requests, node) for node in nodes):
            continue
        best = max(nodes, key=lambda node: _closeness(requests, node))
        short = {name: amount for name, amount in requests.items() if amount > best.get(name, 0)}
        wants = ", ".join(_show(name, amount) for name, amount in short.items())
        has = ", ".join(_show(name, best.get(name, 0)) for name in short)
        messages.append(
            f"no machine can run {kind}: it asks {wants}, the largest machine has {has}\n  next: {_advice(short)}"
        )
    return tuple(messages)


def count_slots(resources: TaskResources, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many such tasks the machines could run at once, were they idle."""
    requests = resources.requests()
    return sum(_num_fitting(requests, node) for node in nodes)


def _num_fitting(requests: Mapping[str, float], node: Mapping[str, float]) -> int:
    # A task that asks nothing still needs a core to run on: without one, a machine is not counted.
    asked = requests or {"CPU": 1.0}
    return min(int((node.get(name, 0) + _SMALLEST_FRACTION / 2) // amount) for name, amount in asked.items())


def _closeness(requests: Mapping[str, float], node: Mapping[str, float]) -> tuple[int, float, float]:
    """Order machines by how many requests they meet, then by the share they give of the others."""
    shares = [min(node.get(name, 0) / amount, 1.0) for name, amount in requests.items()]
    return sum(share >= 1 for share in shares), sum(shares), node.get("memory", 0)


def _advice(short: Iterable[str]) -> str:
    advice = {
        "memory": "lower the memory budget of one worker, or add machines with more memory",
        "CPU": "lower num_cpus, or add machines with more cores",
        "GPU": "lower num_gpus, or add machines with GPUs",
    }
    return "; ".join(advice.get(name, f"start workers with the resource {name}") for name in short)


def _show(name: str, amount: float) -> str:
    return f"memory {amount / (1 << 20):,.0f} MiB" if name == "memory" else f"{name} {amount:g}"


def _is_askable(amount: float) -> bool:
    if not math.isfinite(amount) or amount < 0:
        return False
    return amount == int(amount) or _SMALLEST_FRACTION <= amount < 1


def _parse_amount(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
