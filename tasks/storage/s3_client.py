"""One S3 client per process, and its requests: repeated when that may help, explained when it does not.

Configuration and credentials come the usual ways only: AWS_* variables, ~/.aws, instance roles, and fsspec's own
configuration such as FSSPEC_S3_ENDPOINT_URL. They stay inside the client: no error, repr or pickle made here has them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
import s3fs

from tasks.errors import ErrorKind
from tasks.storage import patience, retry, s3_errors

_Result = TypeVar("_Result")

# The one layer which repeats requests is the one below: botocore (5) under s3fs (5) makes 25 requests in 49 s against a
# store which sheds load, and neither repeats a broken body. Checksums are sent and checked by the callers, in the forms
# that older compatible stores know. Completing a large upload may keep a store busy for longer than s3fs's 15 s.
_CONFIGURATION = {
    "retries": {"mode": "standard", "total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 32,
}

_file_systems: dict[int, Any] = {}


def forget() -> None:
    """Let go of this process's client; the next request makes a new one, with the configuration of that moment."""
    _file_systems.pop(os.getpid(), None)


def split(url: str) -> tuple[str, str]:
    """Return bucket and key; understands access points."""
    bucket, key, _ = _file_system().split_path(url)
    return str(bucket), str(key)


def run(url: str, function: Callable[..., Coroutine[Any, Any, _Result]], *arguments: Any, **named: Any) -> _Result:
    """Run a coroutine about `url` on the loop of the client and wait for it."""
    with patience.call(url):
        result: _Result = fsspec.asyn.sync(_file_system().loop, function, *arguments, **named)
    return result


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the client, for callers which do not wait."""
    running: asyncio.AbstractEventLoop = _file_system().loop
    return running


async def call_once(method: str, **arguments: Any) -> Any:
    """Make one request; raises what botocore, aiohttp and s3fs raise."""
    # The public call_s3 is the same for synchronous callers.
    return await _file_system()._call_s3(method, **arguments)  # noqa: SLF001


async def call(method: str, url: str, kind: ErrorKind, **arguments: Any) -> Any:
    """Make a request about `url`, repeat it while its errors are transient, and raise our own errors."""
    pauses = retry.delays_seconds()
    while True:
        try:
            if "Body" in arguments:
                arguments["Body"].seek(0)
            return await call_once(method, **arguments)
        except s3_errors.REQUEST_ERRORS as cause:
            pause = next(pauses, None)
            if pause is None or not s3_errors.is_transient(cause):
                raise s3_errors.failure(cause, url, kind) from cause
        await asyncio.sleep(pause)


def _file_system() -> Any:
    """Make the file system of this process: its loop and connections do not survive a fork."""
    process = os.getpid()
    if process not in _file_systems:
        configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        made = s3fs.S3FileSystem(
            use_listings_cache=False, skip_instance_cache=True, config_kwargs={**_CONFIGURATION, **configured}
        )
        made.retries = 1
        _file_systems.setdefault(process, made)
    return _file_systems[process]
