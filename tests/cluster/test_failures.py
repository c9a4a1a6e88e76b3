"""What is retried, and how exceptions travel."""

from __future__ import annotations

import pickle

import pytest

from cluster.failures import Interrupted, NodeFailed, RemoteFailure, RetryPolicy, call_portably, portable
from tests.cluster.functions import LockHolderError, SubTransientError, TransientError, not_a_pair


def test_an_exception_that_survives_pickling_travels_as_itself() -> None:
    error = OSError(5, "Input/output error", "a.pt")
    assert portable(error) is error


@pytest.mark.parametrize("error", [LockHolderError("held"), SubTransientError("a", "b")])
def test_an_exception_that_does_not_is_told_by_a_stand_in(error: Exception) -> None:
    stand_in = portable(error)
    assert isinstance(stand_in, RemoteFailure)
    assert stand_in.message == str(error)
    assert stand_in.type_names[0] == f"tests.cluster.functions.{type(error).__name__}"
    assert type(error).__name__ in stand_in.traceback_text
    assert str(pickle.loads(pickle.dumps(stand_in))) == str(stand_in)


def test_a_stand_in_of_a_retryable_subclass_is_retryable() -> None:
    policy = RetryPolicy(retryable_exceptions=(TransientError,))
    assert policy.is_retryable(portable(SubTransientError("a", "b")))
    assert not policy.is_retryable(portable(LockHolderError("held")))


def test_a_node_failure_survives_pickling_with_its_cause() -> None:
    failure = pickle.loads(pickle.dumps(NodeFailed("n", "copy", 2, ValueError("bad"), "trace")))
    assert (failure.node_id, failure.kind, failure.attempts, failure.traceback_text) == ("n", "copy", 2, "trace")
    assert isinstance(failure.cause, ValueError)
    assert str(failure) == "copy n failed after 2 attempts: ValueError: bad"


def test_a_node_failure_survives_pickling_though_its_cause_does_not() -> None:
    failure = pickle.loads(pickle.dumps(NodeFailed("n", "copy", 1, LockHolderError("held"))))
    assert isinstance(failure.cause, RemoteFailure)
    assert "held" in str(failure)


def test_an_interruption_survives_pickling() -> None:
    assert "2 nodes finished, 3 did not" in str(pickle.loads(pickle.dumps(Interrupted(2, 3))))


def test_pauses_double_up_to_the_limit() -> None:
    policy = RetryPolicy(initial_delay_seconds=1, max_delay_seconds=6)
    for num_failures, ceiling in [(1, 1), (2, 2), (3, 4), (4, 6), (2000, 6)]:
        assert ceiling / 2 <= policy.delay_seconds(num_failures) <= ceiling


def test_a_policy_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="max_retries=-1"):
        RetryPolicy(max_retries=-1)


def test_a_function_must_return_a_pair() -> None:
    with pytest.raises(TypeError, match=r"not_a_pair must return \(summary, payload\), not str"):
        call_portably(not_a_pair, ())
