"""Runs a DAG on Ray: submits plain tasks, bounds what is in flight, owns the retries.

A node's function is called on a worker as `function(*arguments, *payloads_of_needs)` and returns
`(summary, payload)`. The summary is fetched by the driver, so it is small; the payload stays in the object store and
goes from worker to worker, never through the driver. What `dag.py` says about Ray's own DAG is why there is none here.

    with ray_session(None) as session, Execution({"copy": copy}, {"copy": TaskResources()}) as execution:
        summaries = execution.run([Node("a", "copy", ("in", "out"))])

Ray itself retries nothing (`max_retries=0`): its retries are invisible to the driver, know no pause and no limit per
cause. Attempts of one node may overlap, because a worker that Ray believes dead can live on for a while: functions
must tolerate that (write to a name of their own, then rename; or write the same bytes).

`run` to `_settle` is the loop when all goes well; from `_fail` on is what happens when it does not.
"""

from __future__ import annotations

import heapq
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from cluster.dag import Frontier, Node, check_dag
from cluster.events import Event, EventKind, ignore
from cluster.failures import Interrupted, NodeFailed, OutOfMemory, RetryPolicy
from cluster.losses import holds_error, is_lost_by_ray, is_out_of_memory, lost_needs
from cluster.resources import TaskResources
from cluster.silence import Silence
from cluster.worker import RemoteFunctions, Report

# Ray returns from a wait as soon as this many are ready. Asking for more makes each wait longer, fewer costs calls.
_MAX_SETTLED_AT_ONCE = 64

# Where many are in flight, a first, short wait gathers a batch: 2,000 small nodes a second instead of 1,600. Where few
# are, it would delay what waits for one of them. Only if nothing is there do we wait for a single one, no longer than a
# stop may take to be noticed.
_FEW = 16
_GATHER_SECONDS = 0.01
_WAIT_SECONDS = 0.25

# A cancelled task sees KeyboardInterrupt between two Python instructions, so one that is copying a large buffer needs
# a moment. After this its worker is killed: half of the 3 s after which `ray job stop` kills the driver, who could then
# not say what it was doing.
_CANCEL_SECONDS = 1.5

# Long enough that a normal pause between nodes does not ask Ray for its list of machines over and over.
_SILENCE_SECONDS = 10.0


@dataclass(slots=True)
class _Attempt:
    """A node that is in flight."""

    node: Node
    payload: Any
    submitted: float


class Execution:
    """Runs nodes on Ray, over one or several `run`s. Needs an initialised Ray; used from one thread.

    Args:
        functions: by kind. They must be importable on the workers.
        resources: by kind, for every kind in `functions`. Few distinct ones: each costs Ray scheduling time.
        max_in_flight: nodes submitted and not finished; a little more than the cluster runs at once keeps it busy.
            None: no bound.
        max_in_flight_bytes: sum of their `cost_bytes`. A node above the bound runs when nothing else does.
        retry: which failures are tried again.
        observe: called in the driver for every event, so it should be quick; what it raises ends the run.
        stop: once set, the run is cancelled and `Interrupted` raised: noticed within half a second, after which
            cancelling takes as long as tasks need to let go, at most three seconds.
        silence_seconds: without a finished node for this long, the machines are looked at (`silence.py`), and WAITING
            is told if none can run what is in flight.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., tuple[object, object]]],
        resources: Mapping[str, TaskResources],
        *,
        max_in_flight: int | None = None,
        max_in_flight_bytes: int | None = None,
        retry: RetryPolicy | None = None,
        observe: Callable[[Event], None] = ignore,
        stop: threading.Event | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        missing = sorted(functions.keys() - resources.keys())
        if missing:
            raise ValueError(f"no resources given for: {', '.join(missing)}")
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight} would start nothing")
        self._remotes = RemoteFunctions(functions, resources)
        self._max_in_flight = max_in_flight
        self._max_in_flight_bytes = max_in_flight_bytes
        self._retry = retry or RetryPolicy()
        self._observe = observe
        self._stop = stop or threading.Event()
        self._frontier = Frontier()
        self._payloads: dict[str, Any] = {}
        self._workers: dict[str, str] = {}
        self._attempts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._starved: Counter[str] = Counter()
        self._in_flight: dict[Any, _Attempt] = {}
        self._in_flight_bytes = 0
        self._delayed: list[tuple[float, str]] = []
        self._summaries: dict[str, object] = {}
        self._silence = Silence(silence_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, nodes: Sequence[Node]) -> dict[str, object]:
        """Run the nodes and return their summaries by id, in the order given.

        Nodes may need nodes of earlier runs. Raises ValueError before anything starts if the DAG makes no sense,
        NodeFailed when a node failed for good, Interrupted when stopped; by then nothing is in flight any more.
        """
        check_dag(nodes, kinds=self._remotes.kinds, known=self._frontier.known)
        self._frontier.add(nodes)
        self._summaries = {}
        if self._silence.begin():
            self._remotes.renew()
        try:
            while self._frontier.num_pending:
                if self._stop.is_set():
                    raise self._interrupted(nodes)
                self._wake()
                self._submit_ready()
                for summary_ref in self._wait():
                    self._settle(summary_ref)
                self._look_if_silent()
        except KeyboardInterrupt as error:
            raise self._interrupted(nodes) from error
        finally:
            self._cancel_in_flight()
            self._delayed.clear()
            self._frontier.forget_pending()
        return {node.id: self._summaries[node.id] for node in nodes}

    def share(self, value: object) -> Any:
        """Put a value into the object store once; the handle, as an argument of many nodes, arrives as the value."""
        import ray

        return ray.put(value)

    def release(self, node_ids: Iterable[str]) -> None:
        """Let go of the payloads of nodes. Always safe: a node that is needed again runs again."""
        for node_id in node_ids:
            self._payloads.pop(node_id, None)
            self._frontier.lose([node_id])

    def close(self) -> None:
        """Let go of all payloads and forget all nodes."""
        self._payloads.clear()
        self._frontier = Frontier()

    def _wake(self) -> None:
        """Put nodes whose pause is over back among the ready ones."""
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            self._frontier.again(heapq.heappop(self._delayed)[1])

    def _submit_ready(self) -> None:
        while (node := self._frontier.peek()) is not None and self._has_room(node):
            self._frontier.pop()
            self._submit(node)

    def _has_room(self, node: Node) -> bool:
        if not self._in_flight:
            return True
        if self._max_in_flight is not None and len(self._in_flight) >= self._max_in_flight:
            return False
        bound = self._max_in_flight_bytes
        return bound is None or self._in_flight_bytes + node.cost_bytes <= bound

    def _submit(self, node: Node) -> None:
        self._attempts[node.id] += 1
        payloads = [self._payloads[need] for need in node.needs]
        smaller = node.smaller if self._starved[node.id] else None
        arguments = node.arguments if smaller is None else smaller
        summary_ref, payload_ref = self._remotes.submit(node.kind, [*arguments, *payloads])
        self._in_flight[summary_ref] = _Attempt(node, payload_ref, time.monotonic())
        self._in_flight_bytes += node.cost_bytes
        self._observe(Event(EventKind.SUBMITTED, node.id, node.kind, self._attempts[node.id]))

    def _wait(self) -> list[Any]:
        """Return some references that have settled; after a short while, none.

        `fetch_local=False`, or Ray would pull results to the driver's machine just to say that they exist.
        """
        import ray

        if not self._in_flight:
            due = self._delayed[0][0] - time.monotonic() if self._delayed else 0.0
            self._stop.wait(min(max(due, 0.0), _WAIT_SECONDS))
            return []
        refs = list(self._in_flight)
        batch = min(len(refs), _MAX_SETTLED_AT_ONCE)
        patience = _GATHER_SECONDS if len(refs) > _FEW else 0
        settled, _ = ray.wait(refs, num_returns=batch, timeout=patience, fetch_local=False)
        if not settled:
            settled, _ = ray.wait(refs, num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        return list(settled)

    def _settle(self, summary_ref: Any) -> None:
        """Take a finished attempt out of flight: keep what it returned, or decide what its failure means."""
        import ray

        attempt = self._in_flight.pop(summary_ref)
        node = attempt.node
        self._in_flight_bytes -= node.cost_bytes
        self._silence.sign()
        try:
            report: Report = ray.get(summary_ref)
        except ray.exceptions.RayError as error:
            self._fail(attempt, error)
            return
        self._payloads[node.id] = attempt.payload
        self._workers[node.id] = report.worker
        self._summaries[node.id] = report.summary
        self._frontier.complete(node.id)
        self._observe(
            Event(
                EventKind.FINISHED,
                node.id,
                node.kind,
                self._attempts[node.id],
                report.seconds,
                worker=report.worker,
                summary=report.summary,
            )
        )

    def _fail(self, attempt: _Attempt, error: Any) -> None:
        """Decide what a failure means."""
        import ray

        node = attempt.node
        holds_error(attempt.payload)
        is_from_task = isinstance(error, ray.exceptions.RayTaskError)
        cause = error.cause if is_from_task else error
        message = f"{type(cause).__name__}: {cause}"
        if is_out_of_memory(cause):
            self._starved[node.id] += 1
            may_pass = self._starved[node.id] == 1
            cause = cause if may_pass else OutOfMemory(message)
        else:
            may_pass = is_lost_by_ray(cause) or self._retry.is_retryable(cause)
        trace = _COLOURS.sub("", str(error)) if is_from_task else ""
        self._try_again(attempt, cause, message, may_pass=may_pass, trace=trace)
        if isinstance(cause, ray.exceptions.ObjectLostError):
            payloads = {need: self._payloads[need] for need in node.needs if need in self._payloads}
            lost = lost_needs(payloads, self._workers, cause)
            self._frontier.lose(lost)
            for need in lost:
                self._payloads.pop(need, None)

    def _try_again(
        self, attempt: _Attempt, cause: BaseException, message: str, *, may_pass: bool = True, trace: str = ""
    ) -> None:
        """Plan another attempt after a pause, or end the run by raising NodeFailed."""
        node, num_attempts = attempt.node, self._attempts[attempt.node.id]
        self._failures[node.id] += 1
        num_failures = self._failures[node.id]
        seconds = time.monotonic() - attempt.submitted
        if num_failures > self._retry.max_retries or not may_pass:
            self._observe(Event(EventKind.FAILED, node.id, node.kind, num_attempts, seconds, message=message))
            raise NodeFailed(node.id, node.kind, num_attempts, cause, trace) from cause
        self._observe(Event(EventKind.RETRIED, node.id, node.kind, num_attempts, seconds, message=message))
        due = time.monotonic() + self._retry.delay_seconds(num_failures)
        heapq.heappush(self._delayed, (due, node.id))

    def _look_if_silent(self) -> None:
        """Begin again what went with a machine; say so when no live machine could run what is in flight."""
        if not self._silence.is_due() or not self._in_flight:
            return
        resources = self._remotes.resources(attempt.node.kind for attempt in self._in_flight.values())
        seen = self._silence.look(self._in_flight, resources)
        if seen.has_machine_gone:
            self._remotes.renew()
        if seen.shortages:
            message = "\n".join(seen.shortages)
            self._observe(Event(EventKind.WAITING, seconds=self._silence.seconds, message=message))
        for summary_ref in seen.lost:
            self._abandon(summary_ref)

    def _abandon(self, summary_ref: Any) -> None:
        import ray

        attempt = self._in_flight.pop(summary_ref)
        self._in_flight_bytes -= attempt.node.cost_bytes
        ray.cancel(summary_ref, force=True)  # should it run on another machine after all, or still be waiting
        message = f"a machine was lost, and nothing has finished for {self._silence.seconds:.0f} s"
        self._try_again(attempt, ray.exceptions.WorkerCrashedError(), message)

    def _interrupted(self, nodes: Sequence[Node]) -> Interrupted:
        num_finished = sum(node.id in self._summaries for node in nodes)
        return Interrupted(num_finished, len(nodes) - num_finished)

    def _cancel_in_flight(self) -> None:
        """Cancel and wait briefly, so that no task of ours still writes when the caller goes on; then use force."""
        import ray

        refs = list(self._in_flight)  # by submission, so those that run come first
        for force in (False, True):
            for ref in refs:
                ray.cancel(ref, force=force)
            if refs:
                _, refs = ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_SECONDS, fetch_local=False)
        for summary_ref, attempt in self._in_flight.items():
            if holds_error(summary_ref):
                holds_error(attempt.payload)
        self._in_flight.clear()
        self._in_flight_bytes = 0


# Ray colours the name of the task in the text of an error.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
