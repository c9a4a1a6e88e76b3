"""A time limit for calls that have none: a hard NFS mount waits for its server for ever, and no signal ends that.

The call cannot be ended, but waited for no longer: the task fails with a transient error and is tried again, in this
process or elsewhere. Should the call return after all, its thread ends at that moment and touches nothing more.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from tasks.storage.problems import TransientStorageError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Long enough for a server that starts again. RESHARD_PATIENCE_SECONDS says otherwise.
_PATIENCE_SECONDS = 600.0
_LOOK_SECONDS = 1.0
# What a thread that is to end may take until its next call.
_PARTING_SECONDS = 2.0

# By thread: what is waited for, and since when.
_calls: dict[threading.Thread, tuple[str, float]] = {}
# Threads that are to end, and helpers of theirs, which others may use again.
_given_up: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_helpers_given_up: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def patience_seconds() -> float:
    """Return how long a call may take."""
    return float(os.environ.get("RESHARD_PATIENCE_SECONDS", _PATIENCE_SECONDS))


@contextmanager
def call(url: str) -> Iterator[None]:
    """Mark what is inside as one call of storage; inside another it is part of that."""
    me = threading.current_thread()
    if me in _calls:
        yield
        return
    _end_if_given_up(me, url)
    _calls[me] = (url, time.monotonic())
    try:
        yield
    finally:
        del _calls[me]
        _end_if_given_up(me, url)


def longest_call() -> tuple[str, float]:
    """Return what is waited for longest, and for how many seconds; ("", 0) if nothing is."""
    waiting = [
        (url, since)
        for thread, (url, since) in list(_calls.items())
        if thread not in _given_up and thread not in _helpers_given_up
    ]
    if not waiting:
        return "", 0.0
    url, since = min(waiting, key=lambda found: found[1])
    return url, time.monotonic() - since


def _give_helpers_up(owner: threading.Thread) -> None:
    """Let a task's helpers end that have waited long: one dead server may hold several threads."""
    long_ago = time.monotonic() - patience_seconds() / 2
    _helpers_given_up.update(
        thread for thread, (_, since) in list(_calls.items()) if since < long_ago and thread is not owner
    )


def limited(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function in a thread of its own; raise TransientStorageError when a call in it takes too long."""

    @functools.wraps(function)
    def run(*values: Parameters.args, **named: Parameters.kwargs) -> Result:
        result: Future[Result] = Future()
        thread = threading.Thread(target=_work, args=(result, lambda: function(*values, **named)), daemon=True)
        thread.start()
        try:
            while not wait([result], timeout=_LOOK_SECONDS).done:
                url, seconds = longest_call()
                if seconds > patience_seconds():
                    _give_helpers_up(thread)
                    raise TransientStorageError(f"{url}: no answer for {seconds:.0f} s")
        except BaseException:
            # Stopped from outside, too: nothing that was begun here may go on behind the caller's back.
            _given_up.add(thread)
            thread.join(_PARTING_SECONDS)
            raise
        thread.join()
        return result.result()

    return run


def _work(result: Future[Result], function: Callable[[], Result]) -> None:
    try:
        result.set_result(function())
    except BaseException as fault:  # noqa: BLE001  whatever it is, it is the caller's
        result.set_exception(fault)
    finally:
        _given_up.discard(threading.current_thread())


def _end_if_given_up(thread: threading.Thread, url: str) -> None:
    if thread in _given_up or thread in _helpers_given_up:
        _helpers_given_up.discard(thread)
        raise TransientStorageError(f"{url}: was waited for no longer")
