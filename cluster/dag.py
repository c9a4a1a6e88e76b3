"""Pure. The DAG as plain data: nodes, whether they make sense together, and which may start next.

Nothing here runs a node. Ray has a DAG of its own (`dag.bind().execute()`); it is not used, because it is deprecated,
makes a new remote function for every node (2,000 nodes: 103 s against 1.4 s) and knows no bound on what is in flight.

>>> frontier = Frontier()
>>> frontier.add([Node("sum", "add", needs=("a", "b")), Node("a", "load"), Node("b", "load", cost_bytes=9)])
>>> [frontier.pop().id, frontier.pop().id, frontier.pop()]
['b', 'a', None]
>>> frontier.complete("a"), frontier.complete("b")
(None, None)
>>> frontier.pop().id
'sum'
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One call of one kind of task."""

    id: str
    "unique in an execution, over all its runs"
    kind: str
    "names the function"
    arguments: tuple[object, ...] = ()
    "passed first; small, or a handle made by `share`"
    needs: tuple[str, ...] = ()
    "ids of nodes whose payloads are passed after the arguments, in this order"
    smaller: tuple[object, ...] | None = None
    "the arguments of the one more attempt after a worker was killed because its machine ran out of memory"
    cost_bytes: int = 0
    "what it counts against the bound on bytes in flight"
    priority: int = 0
    "lower starts first"

    def __post_init__(self) -> None:
        if self.cost_bytes < 0:
            raise ValueError(f"node {self.id!r}: cost_bytes={self.cost_bytes} is negative")


def check_dag(nodes: Sequence[Node], *, kinds: Collection[str], known: Collection[str] = ()) -> None:
    """Raise ValueError that lists everything wrong with the nodes; `known` are ids of nodes that ran before."""
    problems = dag_problems(nodes, kinds=kinds, known=known)
    if problems:
        raise ValueError("the DAG cannot run:\n" + "\n".join(f"  {problem}" for problem in problems))


def dag_problems(nodes: Sequence[Node], *, kinds: Collection[str], known: Collection[str] = ()) -> tuple[str, ...]:
    """Return everything wrong with the nodes: ids, kinds, needs, cycles."""
    counts = Counter(node.id for node in nodes)
    problems = [f"node {node_id!r} is given {count} times" for node_id, count in counts.items() if count > 1]
    problems += [f"node {node_id!r} ran before: choose another id" for node_id in counts if node_id in known]
    for node in nodes:
        if node.kind not in kinds:
            problems.append(f"node {node.id!r} is of the unknown kind {node.kind!r}; known: {', '.join(sorted(kinds))}")
        problems += [
            f"node {node.id!r} needs {need!r}, which is no node"
            for need in dict.fromkeys(node.needs)
            if need not in counts and need not in known
        ]
    cycle = _find_cycle(nodes)
    if cycle:
        problems.append("nodes need one another in a circle: " + " -> ".join(cycle))
    return tuple(problems)


def _find_cycle(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the ids along one cycle, the first repeated at the end, or () where there is none."""
    needs = {node.id: node.needs for node in nodes}
    open_needs = {node_id: sum(need in needs for need in node_needs) for node_id, node_needs in needs.items()}
    dependents: dict[str, list[str]] = {}
    for node_id, node_needs in needs.items():
        for need in node_needs:
            dependents.setdefault(need, []).append(node_id)
    startable = [node_id for node_id, count in open_needs.items() if count == 0]
    while startable:
        node_id = startable.pop()
        del open_needs[node_id]
        for dependent in dependents.get(node_id, ()):
            open_needs[dependent] -= 1
            if open_needs[dependent] == 0:
                startable.append(dependent)
    if not open_needs:
        return ()
    # Every node left needs another that is left, so walking along needs must come round.
    path = [min(open_needs)]
    while path[-1] not in path[:-1]:
        path.append(min(need for need in needs[path[-1]] if need in open_needs))
    return tuple(path[path.index(path[-1]) :])


class Frontier:
    """Which nodes may start now, in the order (priority, larger cost first, id).

    A node is *pending* from the moment a run of it is wanted until that run completes, and *available* while its
    payload is there. Losing a payload costs nothing until somebody needs it: then that node becomes pending again,
    and so, on and on, do its own needs that are gone. Nodes must have been checked by `check_dag`.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._available: set[str] = set()
        self._ever_finished: set[str] = set()
        self._pending: set[str] = set()
        self._num_missing: dict[str, int] = {}
        self._waiters: dict[str, list[str]] = {}
        self._ready: list[tuple[int, int, str]] = []

    @property
    def known(self) -> Collection[str]:
        """The ids of all nodes ever added and not forgotten."""
        return self._nodes.keys()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def node(self, node_id: str) -> Node:
        return self._nodes[node_id]

    def add(self, nodes: Sequence[Node]) -> None:
        """Want one run of each node."""
        self._nodes.update((node.id, node) for node in nodes)
        for node in nodes:
            self._want(node.id)

    def peek(self) -> Node | None:
        """Return the node that starts next, leaving it there, or None where none is ready."""
        while self._ready:
            node = self._nodes[self._ready[0][2]]
            if self._available.issuperset(node.needs):
                return node
            heapq.heappop(self._ready)  # a need was lost while it stood here
            self.again(node.id)
        return None

    def pop(self) -> Node | None:
        """Take the node that starts next; it stays pending until `complete` or `again`."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._ready)
        return node

    def complete(self, node_id: str) -> None:
        """Say that a started node has finished and its payload is there."""
        self._pending.discard(node_id)
        self._available.add(node_id)
        self._ever_finished.add(node_id)
        for waiter in self._waiters.pop(node_id, ()):
            self._num_missing[waiter] -= 1
            if self._num_missing[waiter] == 0:
                self._push(waiter)

    def again(self, node_id: str) -> None:
        """Want another run of a started node, after its needs that are gone."""
        self._pending.discard(node_id)
        self._want(node_id)

    def lose(self, node_ids: Iterable[str]) -> None:
        """Say that the payloads of these nodes are gone."""
        self._available.difference_update(node_ids)

    def forget_pending(self) -> None:
        """Drop every run that is wanted, and the nodes that never ran."""
        for node_id in self._pending - self._ever_finished:
            del self._nodes[node_id]
        self._pending.clear()
        self._num_missing.clear()
        self._waiters.clear()
        self._ready.clear()

    def _want(self, node_id: str) -> None:
        stack = [node_id]
        while stack:
            current = stack.pop()
            if current in self._pending:
                continue
            self._pending.add(current)
            gone = [need for need in self._nodes[current].needs if need not in self._available]
            self._num_missing[current] = len(gone)
            for need in gone:
                self._waiters.setdefault(need, []).append(current)
            stack += gone
            if not gone:
                self._push(current)

    def _push(self, node_id: str) -> None:
        node = self._nodes[node_id]
        heapq.heappush(self._ready, (node.priority, -node.cost_bytes, node_id))
