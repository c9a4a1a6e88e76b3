"""The lease of the one run that writes into a target: taken before the first write, shown to be alive, given back.

    with Lease(storage.join(target, ".reshard", "lease"), plan_id) as lease:
        ...
        lease.check()    # before the commit

Each run that takes the lease creates the next of a row of files, by a create-only write: of several that try, one has
it. A run that was killed cannot give its lease back. Whoever comes next watches its sign of life: the same host sees
that the process is gone; from elsewhere it is dead once the sign has not changed for a while. No clocks are compared.

The lease keeps runs from working twice and from refusing each other's plans half way. What keeps files whole is that
they appear by an atomic rename with the same bytes whoever writes them: a zombie of a dead run can do no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasks import storage
from tasks.errors import ErrorKind, ReshardError, error

# Four signs fit into the time of silence after which a run counts as dead, so that one lost request does not kill it.
BEAT_SECONDS = 5.0
SILENCE_SECONDS = 20.0
# What /proc calls a process that has ended and is still in its table.
_DEAD = ("Z", "X", "x")


class Lease:
    """One run's claim to a target. Entering takes it or raises `target-in-use`; leaving gives it back."""

    def __init__(
        self,
        folder: str,
        plan_id: str,
        *,
        tell: Callable[[str], None] = lambda _text: None,
        beat_seconds: float = BEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._beat_seconds = beat_seconds
        self._silence_seconds = silence_seconds
        self._generation = 0
        self._mine = {"token": uuid.uuid4().hex, "plan_id": plan_id, **_who()}
        self._ended = threading.Event()
        self._beats: threading.Thread | None = None

    @storage.limited
    def __enter__(self) -> Self:
        storage.make_directory(self._folder)
        latest = latest_lease(self._folder)
        if latest is not None and not latest["holder"].get("released"):
            self._wait_for_death(latest)
        self._generation = (latest["generation"] if latest else 0) + 1
        if not storage.create_only(self._path(self._generation, "json"), json.dumps(self._mine).encode()):
            raise _in_use(self._folder, "another run took the lease at the same moment")
        self._clean_up()
        self._beats = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._beats is not None:
            self._beats.join(self._silence_seconds)  # no longer: a beat may hang with its storage
        # The next run would only have to wait a little if this fails; the first error is the news.
        with contextlib.suppress(ReshardError, OSError):
            self._give_back()

    @storage.limited
    def check(self) -> None:
        """Raise if another run took the lease over, which it does when it saw no sign of life for long."""
        latest = latest_lease(self._folder)
        if latest is None or latest["holder"].get("token") != self._mine["token"]:
            holder = "nobody" if latest is None else describe(latest["holder"])
            raise _in_use(self._folder, f"this run showed no sign of life for a while; the lease is now of {holder}")

    @storage.limited
    def _give_back(self) -> None:
        released = json.dumps({**self._mine, "released": True}).encode()
        storage.write_small(self._path(self._generation, "json"), released, durable=False)
        storage.delete(self._path(self._generation, "alive"))

    def _clean_up(self) -> None:
        """Remove what dead holders left half written; only now, since afterwards the signs of life are such files."""
        with contextlib.suppress(ReshardError, OSError):
            for remove in storage.leftovers(self._folder):
                remove()

    def _path(self, generation: int, ending: str) -> str:
        return storage.join(self._folder, f"{generation:06}.{ending}")

    def _beat(self) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            # A sign that could not be given is followed by others; if none gets through, `check` ends the run.
            with contextlib.suppress(ReshardError, OSError):
                storage.write_small(self._path(self._generation, "alive"), str(count).encode(), durable=False)
            self._ended.wait(self._beat_seconds)

    def _wait_for_death(self, latest: dict[str, Any]) -> None:
        """Return once the holder is known to be dead; raise if it lives."""
        holder = latest["holder"]
        alive = _is_alive_here(holder)
        if alive is False:
            return
        if alive is None:
            self._tell(f"the target's lease is of {describe(holder)}: watching for its sign of life")
            path = self._path(latest["generation"], "alive")
            before = _sign(path)
            deadline = time.monotonic() + self._silence_seconds
            while time.monotonic() < deadline:
                time.sleep(min(1.0, self._silence_seconds / 10))
                if _sign(path) != before:
                    alive = True
                    break
        if alive:
            raise _in_use(self._folder, f"it is in use by {describe(holder)}")


def latest_lease(folder: str) -> dict[str, Any] | None:
    """Return {'generation', 'holder'} of the newest lease, or None where there never was one."""
    try:
        names = [file.name for file in storage.list_files(folder) if file.name.endswith(".json")]
    except ReshardError as fault:
        if fault.problems[0].reference == "no-such-directory":
            return None
        raise
    if not names:
        return None
    name = max(names)
    try:
        holder = json.loads(storage.read_small(storage.join(folder, name)))
    except ValueError:
        holder = {}
    return {"generation": int(name.removesuffix(".json")), "holder": holder if isinstance(holder, dict) else {}}


def is_alive(folder: str, latest: dict[str, Any], seconds: float) -> bool:
    """Tell whether a lease's holder lives, by its process or by a sign of life within some seconds."""
    if latest["holder"].get("released"):
        return False
    here = _is_alive_here(latest["holder"])
    if here is not None:
        return here
    path = storage.join(folder, f"{latest['generation']:06}.alive")
    before, deadline = _sign(path), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
        if _sign(path) != before:
            return True
    return False


def describe(holder: dict[str, Any]) -> str:
    """Say who holds a lease."""
    return f"process {holder.get('process', '?')} on {holder.get('host', '?')}"


def _in_use(folder: str, why: str) -> ReshardError:
    target = storage.parent(storage.parent(folder))
    hint = "wait for the other run, or stop it; python -m pipeline.status TARGET tells how far it is"
    return error(ErrorKind.TARGET, "target-in-use", f"{target}: {why}", hint=hint)


def _sign(path: str) -> bytes:
    try:
        return storage.read_small(path)
    except ReshardError as fault:
        if fault.problems[0].reference == "no-such-file":
            return b""
        raise


def _who() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "namespace": _process_namespace(),
        "process": os.getpid(),
        "born": _born(os.getpid()),
    }


def _is_alive_here(holder: dict[str, Any]) -> bool | None:
    """Tell whether the holder's process lives, where it would be one that can be seen from here; else None."""
    if holder.get("host") != socket.gethostname() or holder.get("namespace") != _process_namespace():
        return None
    if not _process_namespace() or not isinstance(holder.get("process"), int):
        return None
    return _born(holder["process"]) == holder.get("born")


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(process: int) -> str:
    """Return when a process was started, in the kernel's ticks: a number is given to other processes in time.

    Empty for a dead one, also while its parent has not asked how it ended: in a container that may be never.
    """
    try:
        state, *facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in _DEAD else facts[18]
    except (OSError, ValueError, IndexError):
        return ""
