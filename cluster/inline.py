"""Runs a DAG in the calling process, without Ray: for tests, for documentation, and to debug one node.

A node is a plain function, so it needs no cluster to be tried:

>>> def load(name): return len(name), name.upper()
>>> def join(separator, *payloads): return len(payloads), separator.join(payloads)
>>> execution = InlineExecution({"load": load, "join": join})
>>> loads = [Node("x", "load", ("ab",)), Node("y", "load", ("c",))]
>>> execution.run([Node("all", "join", ("-",), needs=("x", "y")), *loads])
{'all': 2, 'x': 2, 'y': 1}

Order, retries, errors and events are those of `loop.Execution` with one node in flight.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from cluster.dag import Frontier, Node, check_dag
from cluster.events import Event, EventKind, ignore
from cluster.failures import Interrupted, NodeFailed, RetryPolicy, call_portably


class InlineExecution:
    """Runs nodes one after another; see `loop.Execution` for what the methods promise."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., tuple[object, object]]],
        *,
        retry: RetryPolicy | None = None,
        observe: Callable[[Event], None] = ignore,
        stop: threading.Event | None = None,
    ) -> None:
        self._functions = dict(functions)
        self._retry = retry or RetryPolicy()
        self._observe = observe
        self._stop = stop or threading.Event()
        self._frontier = Frontier()
        self._payloads: dict[str, object] = {}
        self._attempts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, nodes: Sequence[Node]) -> dict[str, object]:
        check_dag(nodes, kinds=self._functions, known=self._frontier.known)
        self._frontier.add(nodes)
        summaries: dict[str, object] = {}
        try:
            while (node := self._frontier.pop()) is not None:
                if self._stop.is_set():
                    raise Interrupted(len(summaries), len(nodes) - len(summaries))
                self._try(node, summaries)
        except KeyboardInterrupt as error:
            raise Interrupted(len(summaries), len(nodes) - len(summaries)) from error
        finally:
            self._frontier.forget_pending()
        return {node.id: summaries[node.id] for node in nodes}

    def share(self, value: object) -> object:
        return value

    def release(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self._payloads.pop(node_id, None)
            self._frontier.lose([node_id])

    def close(self) -> None:
        self._payloads.clear()
        self._frontier = Frontier()

    def _try(self, node: Node, summaries: dict[str, object]) -> None:
        self._attempts[node.id] += 1
        attempt = self._attempts[node.id]
        self._observe(Event(EventKind.SUBMITTED, node.id, node.kind, attempt))
        started = time.monotonic()
        values = (*node.arguments, *(self._payloads[need] for need in node.needs))
        try:
            summary, payload = call_portably(self._functions[node.kind], values)
        except Exception as error:
            self._failures[node.id] += 1
            seconds = time.monotonic() - started
            if self._failures[node.id] > self._retry.max_retries or not self._retry.is_retryable(error):
                self._observe(Event(EventKind.FAILED, node.id, node.kind, attempt, seconds, message=str(error)))
                raise NodeFailed(node.id, node.kind, attempt, error) from error
            self._observe(Event(EventKind.RETRIED, node.id, node.kind, attempt, seconds, message=str(error)))
            self._stop.wait(self._retry.delay_seconds(self._failures[node.id]))
            self._frontier.again(node.id)
            return
        self._payloads[node.id] = payload
        summaries[node.id] = summary
        self._frontier.complete(node.id)
        seconds = time.monotonic() - started
        self._observe(Event(EventKind.FINISHED, node.id, node.kind, attempt, seconds, summary=summary))
