"""The same on a local Ray: what only real processes can show."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cluster.dag import Node
from cluster.events import Event, EventKind
from cluster.failures import Interrupted, NodeFailed, OutOfMemory, RemoteFailure, RetryPolicy
from cluster.loop import Execution
from cluster.resources import TaskResources
from tests.cluster import functions
from tests.cluster.functions import TransientError

pytestmark = pytest.mark.usefixtures("local_ray")

FUNCTIONS = {
    function.__name__: function
    for function in (
        functions.echo,
        functions.nothing,
        functions.whoami,
        functions.counted,
        functions.total,
        functions.crash_once,
        functions.crash,
        functions.raise_until,
        functions.sleep_and_mark,
        functions.deaf_and_mark,
        functions.not_a_pair,
        functions.starve,
    )
}
RESOURCES = dict.fromkeys(FUNCTIONS, TaskResources(num_cpus=1))
QUICK = RetryPolicy(retryable_exceptions=(TransientError,), initial_delay_seconds=0.05)


def execution(
    *,
    max_in_flight: int | None = None,
    max_in_flight_bytes: int | None = None,
    events: list[Event] | None = None,
    stop: threading.Event | None = None,
) -> Execution:
    return Execution(
        FUNCTIONS,
        RESOURCES,
        retry=QUICK,
        max_in_flight=max_in_flight,
        max_in_flight_bytes=max_in_flight_bytes,
        observe=(events if events is not None else []).append,
        stop=stop,
    )


def test_payloads_follow_the_arguments_and_run_on_workers() -> None:
    with execution() as ray_execution:
        handle = ray_execution.share("shared")
        summaries = ray_execution.run(
            [
                Node("c", "echo", (handle,), needs=("b", "a")),
                Node("a", "echo", ("x",)),
                Node("b", "echo", ("y",)),
                Node("pid", "whoami"),
            ]
        )
        assert list(summaries) == ["c", "a", "b", "pid"]
        assert summaries["c"] == ("shared", ("y",), ("x",))
        assert summaries["pid"] != os.getpid()


def test_a_large_payload_goes_from_worker_to_worker(tmp_path: Path) -> None:
    with execution() as ray_execution:
        ray_execution.run([Node("big", "counted", (str(tmp_path), "big", 4 << 20))])
        assert ray_execution.run([Node("sum", "total", needs=("big", "big"))]) == {"sum": 2 * 7 * (4 << 20)}


def test_a_released_payload_is_made_again_when_needed(tmp_path: Path) -> None:
    with execution() as ray_execution:
        ray_execution.run([Node("big", "counted", (str(tmp_path), "big", 1 << 20))])
        ray_execution.release(["big"])
        assert ray_execution.run([Node("sum", "total", needs=("big",))]) == {"sum": 7 << 20}
        assert (tmp_path / "big.2").exists()


def test_a_crashed_worker_is_replaced(tmp_path: Path) -> None:
    events: list[Event] = []
    with execution(events=events) as ray_execution:
        assert ray_execution.run([Node("a", "crash_once", (str(tmp_path), "a"))]) == {"a": 2}
    assert [event.kind for event in events] == [
        EventKind.SUBMITTED,
        EventKind.RETRIED,
        EventKind.SUBMITTED,
        EventKind.FINISHED,
    ]
    assert "WorkerCrashedError" in events[1].message
    assert events[-1].worker


def test_a_node_that_always_crashes_is_given_up() -> None:
    with execution() as ray_execution, pytest.raises(NodeFailed, match="crash a failed after 4 attempts"):
        ray_execution.run([Node("a", "crash")])


@pytest.mark.parametrize("error", ["transient", "subclass"])
def test_a_named_exception_is_retried_also_through_its_stand_in(tmp_path: Path, error: str) -> None:
    with execution() as ray_execution:
        assert ray_execution.run([Node("a", "raise_until", (str(tmp_path), "a", 3, error))]) == {"a": 3}


def test_another_exception_stops_the_run_and_what_is_in_flight(tmp_path: Path) -> None:
    started = time.monotonic()
    with execution() as ray_execution, pytest.raises(NodeFailed) as caught:
        ray_execution.run(
            [
                Node("slow", "sleep_and_mark", (str(tmp_path), "done", 20)),
                Node("bad", "raise_until", (str(tmp_path), "bad", 9, "value")),
            ]
        )
    assert time.monotonic() - started < 10
    assert (caught.value.node_id, caught.value.attempts) == ("bad", 1)
    assert type(caught.value.cause) is ValueError
    assert str(caught.value.cause) == "the file is bad"
    assert "in raise_until" in caught.value.traceback_text
    assert not (tmp_path / "done").exists()


def test_an_exception_that_cannot_be_pickled_is_still_told(tmp_path: Path) -> None:
    with execution() as ray_execution, pytest.raises(NodeFailed, match="LockHolderError: holds a lock") as caught:
        ray_execution.run([Node("a", "raise_until", (str(tmp_path), "a", 9, "lock"))])
    assert isinstance(caught.value.cause, RemoteFailure)
    assert "in raise_until" in caught.value.cause.traceback_text


def test_a_function_that_returns_no_pair_is_told() -> None:
    with execution() as ray_execution, pytest.raises(NodeFailed, match=r"must return \(summary, payload\)"):
        ray_execution.run([Node("a", "not_a_pair")])


@pytest.mark.parametrize(
    ("max_in_flight", "max_in_flight_bytes", "most"), [(3, None, 3), (None, 25, 2), (None, 5, 1), (1, 100, 1)]
)
def test_bounds_on_what_is_in_flight_hold(
    max_in_flight: int | None, max_in_flight_bytes: int | None, most: int
) -> None:
    events: list[Event] = []
    with execution(
        max_in_flight=max_in_flight, max_in_flight_bytes=max_in_flight_bytes, events=events
    ) as ray_execution:
        ray_execution.run([Node(f"{index:02}", "nothing", cost_bytes=10) for index in range(12)])
    in_flight = np.cumsum([1 if event.kind is EventKind.SUBMITTED else -1 for event in events])
    assert in_flight.max() == most
    submitted = [event.node_id for event in events if event.kind is EventKind.SUBMITTED]
    assert submitted == sorted(submitted)


def test_a_pause_before_a_retry_does_not_hold_up_others(tmp_path: Path) -> None:
    events: list[Event] = []
    slow_retry = RetryPolicy(retryable_exceptions=(TransientError,), initial_delay_seconds=2)
    with Execution(FUNCTIONS, RESOURCES, max_in_flight=1, retry=slow_retry, observe=events.append) as ray_execution:
        ray_execution.run(
            [
                Node("a", "raise_until", (str(tmp_path), "a", 2, "transient")),
                *(Node(f"other-{index}", "nothing") for index in range(5)),
            ]
        )
    assert [event.node_id for event in events if event.kind is EventKind.FINISHED][-1] == "a"


def test_a_stop_cancels_what_is_in_flight(tmp_path: Path) -> None:
    stop = threading.Event()
    watcher = threading.Thread(target=_set_when_there, args=(tmp_path / "done.started", stop))
    watcher.start()
    started = time.monotonic()
    with execution(stop=stop) as ray_execution, pytest.raises(Interrupted) as caught:
        ray_execution.run(
            [Node("slow", "sleep_and_mark", (str(tmp_path), "done", 20)), Node("after", "nothing", needs=("slow",))]
        )
    watcher.join()
    assert time.monotonic() - started < 10
    assert (caught.value.num_finished, caught.value.num_unfinished) == (0, 2)
    assert not (tmp_path / "done").exists()


def test_a_stop_takes_less_than_the_three_seconds_of_a_ray_job_though_a_task_is_deaf_to_it(tmp_path: Path) -> None:
    stop = threading.Event()
    told: list[float] = []

    def tell() -> None:
        _set_when_there(tmp_path / "done.started", stop)
        told.append(time.monotonic())

    watcher = threading.Thread(target=tell)
    watcher.start()
    with execution(stop=stop) as ray_execution, pytest.raises(Interrupted):
        ray_execution.run([Node("deaf", "deaf_and_mark", (str(tmp_path), "done", 20))])
    watcher.join()
    assert time.monotonic() - told[0] < 3
    assert not (tmp_path / "done").exists()


def test_an_interrupt_of_the_driver_cancels_too(tmp_path: Path) -> None:
    def observe(event: Event) -> None:
        if event.kind is EventKind.FINISHED:
            raise KeyboardInterrupt

    with Execution(FUNCTIONS, RESOURCES, observe=observe) as ray_execution, pytest.raises(Interrupted):
        ray_execution.run([Node("slow", "sleep_and_mark", (str(tmp_path), "done", 20)), Node("quick", "nothing")])
    assert not (tmp_path / "done").exists()


def test_what_no_machine_can_run_is_told_instead_of_waiting_in_silence() -> None:
    stop = threading.Event()
    events: list[Event] = []

    def observe(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.WAITING:
            stop.set()

    impossible = {"nothing": TaskResources(custom=(("no_such_label", 1),))}
    with (
        Execution(
            {"nothing": functions.nothing}, impossible, observe=observe, stop=stop, silence_seconds=0.5
        ) as ray_execution,
        pytest.raises(Interrupted),
    ):
        ray_execution.run([Node("a", "nothing")])
    assert "start workers with the resource no_such_label" in events[-1].message


def test_a_bad_dag_or_bad_bounds_start_nothing() -> None:
    with execution() as ray_execution, pytest.raises(ValueError, match="unknown kind"):
        ray_execution.run([Node("a", "no-such-kind")])
    with pytest.raises(ValueError, match="no resources given for: echo"):
        Execution({"echo": functions.echo}, {})
    with pytest.raises(ValueError, match="max_in_flight=0"):
        Execution({"echo": functions.echo}, RESOURCES, max_in_flight=0)


def _set_when_there(path: Path, event: threading.Event) -> None:
    while not path.exists():
        time.sleep(0.02)
    event.set()


def test_a_worker_killed_for_memory_is_tried_once_more_with_less() -> None:
    events: list[Event] = []
    with execution(events=events) as running:
        assert running.run([Node("a", "starve", (2,), smaller=(1,))]) == {"a": 1}
    assert [event.kind for event in events] == [
        EventKind.SUBMITTED,
        EventKind.RETRIED,
        EventKind.SUBMITTED,
        EventKind.FINISHED,
    ]


@pytest.mark.parametrize("smaller", [None, (2,)])
def test_a_worker_killed_for_memory_twice_ends_the_run(smaller: tuple[object, ...] | None) -> None:
    with execution() as running, pytest.raises(NodeFailed, match="failed after 2 attempts") as caught:
        running.run([Node("a", "starve", (2,), smaller=smaller)])
    assert isinstance(caught.value.cause, OutOfMemory)
