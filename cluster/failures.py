"""Pure. What may go wrong with a node, which of it is tried again, and how an exception crosses to the driver.

    NodeFailed        one node failed for good; its `cause` is the original exception where that can travel
    Interrupted       a stop was asked for
    OutOfMemory       a machine ran out of memory, and again when the node was asked to take less
    RemoteFailure     stands for an exception that does not survive pickling

>>> RetryPolicy(retryable_exceptions=(ConnectionError,)).is_retryable(ConnectionResetError())
True
>>> RetryPolicy(retryable_exceptions=(ConnectionError,)).is_retryable(ValueError())
False
"""

from __future__ import annotations

import pickle
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass


class RemoteFailure(Exception):  # noqa: N818  it is a stand-in, its own name would only mislead
    """An exception of a worker that could not travel: its type names, message and traceback, as text."""

    def __init__(self, type_names: tuple[str, ...], message: str, traceback_text: str = "") -> None:
        super().__init__(type_names, message, traceback_text)
        self.type_names = type_names
        "of the class and its bases, most derived first, so that a retryable base is still recognised"
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.type_names[0]}: {self.message}"


class NodeFailed(Exception):  # noqa: N818
    """A node failed with an exception that is not retried, or once too often. The run was stopped."""

    def __init__(self, node_id: str, kind: str, attempts: int, cause: BaseException, traceback_text: str = "") -> None:
        super().__init__(node_id, kind, attempts, cause, traceback_text)
        self.node_id = node_id
        self.kind = kind
        self.attempts = attempts
        self.cause = cause
        self.traceback_text = traceback_text
        "of the worker, where there is one"

    def __reduce__(self) -> tuple[type[NodeFailed], tuple[object, ...]]:
        return type(self), (self.node_id, self.kind, self.attempts, portable(self.cause), self.traceback_text)

    def __str__(self) -> str:
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{self.kind} {self.node_id} failed after {attempts}: {_type_name(type(self.cause))}: {self.cause}"


class Interrupted(Exception):  # noqa: N818
    """The run was asked to stop; what was in flight has been cancelled."""

    def __init__(self, num_finished: int, num_unfinished: int) -> None:
        super().__init__(num_finished, num_unfinished)
        self.num_finished = num_finished
        self.num_unfinished = num_unfinished

    def __str__(self) -> str:
        return f"stopped on request: {self.num_finished} nodes finished, {self.num_unfinished} did not"


class OutOfMemory(Exception):  # noqa: N818
    """Ray killed the node's worker to save its machine, and the worker of its second attempt as well."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is tried again, how often, after how long.

    A crashed worker, a dead machine and a lost payload are always worth another attempt; a worker killed for memory is
    worth one.
    """

    retryable_exceptions: tuple[type[Exception], ...] = ()
    "raised by a function; subclasses count"
    max_retries: int = 3
    "attempts after the first, whatever the causes"
    initial_delay_seconds: float = 0.5
    "before the second attempt; doubled for each later one"
    max_delay_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.initial_delay_seconds < 0 or self.max_delay_seconds < 0:
            raise ValueError(f"a retry policy has no negative numbers: {self}")

    def is_retryable(self, error: BaseException) -> bool:
        """Tell whether a function's exception is worth another attempt, also where a stand-in came instead of it."""
        if isinstance(error, RemoteFailure):
            names = {_type_name(retryable) for retryable in self.retryable_exceptions}
            return not names.isdisjoint(error.type_names)
        return isinstance(error, self.retryable_exceptions)

    def delay_seconds(self, num_failures: int) -> float:
        """Return the pause after this many failures: exponential, with jitter so that a herd spreads out."""
        doublings = min(num_failures - 1, 32)  # no float holds two to the power of a few thousand
        ceiling = min(self.initial_delay_seconds * 2.0**doublings, self.max_delay_seconds)
        return ceiling * random.uniform(0.5, 1.0)


def call_portably(function: Callable[..., tuple[object, object]], values: tuple[object, ...]) -> tuple[object, object]:
    """Call a node's function so that whatever it raises can travel. To be used on a worker, around everything.

    Cancellation (KeyboardInterrupt) and exit are not exceptions of the function and pass unchanged.
    """
    try:
        result = function(*values)
    except Exception as error:
        substitute = portable(error)
        if substitute is error:
            raise
        raise substitute from None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{function.__qualname__} must return (summary, payload), not {type(result).__name__}")
    return result


def portable(error: BaseException) -> BaseException:
    """Return the exception itself if it survives pickling, otherwise a RemoteFailure that tells the same."""
    try:
        survivor = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  pickling runs code of any class: it may raise anything
        survivor = None
    if type(survivor) is type(error) and str(survivor) == str(error):
        return error
    names = tuple(_type_name(base) for base in type(error).__mro__ if base is not object)
    return RemoteFailure(names, str(error), "".join(traceback.format_exception(error)))


def _type_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
