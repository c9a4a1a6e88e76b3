"""Starts the head of a Ray cluster with its job server, as an operator would; asks it over HTTP and by `ray job`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.servers import free_ports

# On an idle machine: 5 s for a start, 2 s for a stop.
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

_NOT_OURS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Head:
    """A running head; everything it started has `directory` in its command line or is a child of such a process."""

    url: str
    process: int
    directory: Path

    def ray_job(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `ray job ...` as in a shell whose RAY_API_SERVER_ADDRESS names this head."""
        return subprocess.run(
            [Path(sys.executable).with_name("ray"), "job", *map(str, words)],
            env=_environment() | {"RAY_API_SERVER_ADDRESS": self.url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def details(self, submission_id: str) -> dict[str, Any]:
        """Return what the job API knows of a job: status, driver_exit_code and more."""
        return self._get(f"/api/jobs/{submission_id}")

    def logs(self, submission_id: str) -> str:
        """Return what the driver wrote to stdout and stderr until now."""
        return str(self._get(f"/api/jobs/{submission_id}/logs")["logs"])

    def wait(self, submission_id: str, seconds: float = 60.0) -> dict[str, Any]:
        """Return the details of a job once it has ended, however that was."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.details(submission_id)
            if found["status"] in ("SUCCEEDED", "FAILED", "STOPPED"):
                return found
            time.sleep(0.1)
        raise TimeoutError(f"{submission_id} has not ended after {seconds} s:\n{self.logs(submission_id)}")

    def processes(self, words: str) -> list[str]:
        """Return the command lines of the head's descendants that hold some words."""
        found = []
        for child in psutil.Process(self.process).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(" ".join(child.cmdline()))
        return [line for line in found if words in line]

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found


class NoDashboard(Exception):  # noqa: N818  it says what the head is
    """The head runs and its job server does not answer."""


@contextlib.contextmanager
def ray_head(*, num_cpus: int) -> Iterator[Head]:
    """Run a head on free ports of the loopback address.

    It is stopped by a signal to its own process: `ray stop` would end every Ray of the machine.
    """
    gcs, dashboard, agent, agent_grpc, metrics, client = free_ports(6)
    # Ray makes sockets in its folder, and their paths may have no more than 107 bytes: pytest's folders are too deep.
    with tempfile.TemporaryDirectory(prefix="rh", dir="/tmp", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        words = [
            f"--port={gcs}",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent}",
            f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--metrics-export-port={metrics}",
            f"--ray-client-server-port={client}",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={directory}",
            f"--num-cpus={num_cpus}",
            f"--object-store-memory={80 << 20}",
        ]
        with (directory / "head.log").open("wb") as log:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                cwd=directory,
                start_new_session=True,
            )
        head = Head(f"http://127.0.0.1:{dashboard}", process.pid, directory)
        try:
            _wait_until_up(process, head, directory / "head.log")
            yield head
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    """Return an environment without the project, in which `python` is the one of the tests."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "RAY_AUTH_MODE": "disabled",  # nobody but this machine can reach it
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds every port to 127.0.0.1, on Linux too
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _wait_until_up(process: subprocess.Popen[bytes], head: Head, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            # Answered only when the head's own agent, which starts the drivers, is there as well.
            with urllib.request.urlopen(f"{head.url}/api/jobs/", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise NoDashboard(f"the job server of the head does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    # Processes of this head only: an orderly stop leaves none.
    _, left = psutil.wait_procs(children, 5)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if process.poll() is None:
        process.kill()
        process.wait()
