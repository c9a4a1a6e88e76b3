"""A DAG in this process: the semantics of an execution, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.dag import Node
from cluster.events import Event, EventKind
from cluster.failures import Interrupted, NodeFailed, RetryPolicy
from cluster.inline import InlineExecution
from tests.cluster.functions import TransientError, counted, echo, raise_until

FUNCTIONS: dict[str, Callable[..., tuple[object, object]]] = {
    "echo": echo,
    "counted": counted,
    "raise_until": raise_until,
}
AT_ONCE = RetryPolicy(retryable_exceptions=(TransientError,), initial_delay_seconds=0)


def test_payloads_follow_the_arguments_in_the_order_of_needs() -> None:
    execution = InlineExecution(FUNCTIONS)
    summaries = execution.run(
        [Node("c", "echo", (1,), needs=("b", "a")), Node("a", "echo", ("x",)), Node("b", "echo", ("y",))]
    )
    assert list(summaries) == ["c", "a", "b"]
    assert summaries["c"] == (1, ("y",), ("x",))


def test_later_runs_may_need_earlier_nodes_also_released_ones(tmp_path: Path) -> None:
    with InlineExecution(FUNCTIONS) as execution:
        assert execution.run([Node("a", "counted", (str(tmp_path), "a"))]) == {"a": 1}
        execution.run([Node("b", "echo", needs=("a",))])
        assert not (tmp_path / "a.2").exists()
        execution.release(["a"])
        assert list(execution.run([Node("c", "echo", needs=("a",))])) == ["c"]
        assert (tmp_path / "a.2").exists()


def test_events_tell_the_story_of_a_retry(tmp_path: Path) -> None:
    events: list[Event] = []
    execution = InlineExecution(FUNCTIONS, retry=AT_ONCE, observe=events.append)
    assert execution.run([Node("a", "raise_until", (str(tmp_path), "a", 2, "transient"))]) == {"a": 2}
    assert [(event.kind.value, event.attempt) for event in events] == [
        ("submitted", 1),
        ("retried", 1),
        ("submitted", 2),
        ("finished", 2),
    ]
    assert events[-1].summary == 2


def test_attempts_are_limited(tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match=r"after 4 attempts: .*TransientError: come again"):
        InlineExecution(FUNCTIONS, retry=AT_ONCE).run([Node("a", "raise_until", (str(tmp_path), "a", 9, "transient"))])


def test_other_exceptions_end_the_run_at_once(tmp_path: Path) -> None:
    execution = InlineExecution(FUNCTIONS, retry=AT_ONCE)
    with pytest.raises(NodeFailed, match="after 1 attempt: ValueError") as caught:
        execution.run([Node("a", "raise_until", (str(tmp_path), "a", 2, "value")), Node("b", "echo")])
    assert isinstance(caught.value.cause, ValueError)
    assert execution.run([Node("b", "echo")]) == {"b": ()}  # what did not run may be given again


def test_a_stop_ends_the_run_between_nodes() -> None:
    stop = threading.Event()

    def observe(event: Event) -> None:
        if event.kind is EventKind.FINISHED:
            stop.set()

    with pytest.raises(Interrupted) as caught:
        InlineExecution(FUNCTIONS, stop=stop, observe=observe).run([Node("a", "echo"), Node("b", "echo")])
    assert (caught.value.num_finished, caught.value.num_unfinished) == (1, 1)


def test_a_bad_dag_starts_nothing() -> None:
    events: list[Event] = []
    with pytest.raises(ValueError, match="needs 'gone'"):
        InlineExecution(FUNCTIONS, observe=events.append).run([Node("a", "echo"), Node("b", "echo", needs=("gone",))])
    assert events == []
