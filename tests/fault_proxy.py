"""A proxy in front of a real S3 server that has bad days: what is asked and answered is real, what arrives is not all.

One request for each connection. Which requests are hit is random, by a seed; none more often than a client may bear.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit


class Fault(StrEnum):
    """What happens to a request."""

    NONE = "none"
    SLOW_DOWN = "503 SlowDown; the server never hears of it"
    RESET = "the connection breaks; the server never hears of it"
    LOST = "the server does it, and the connection breaks before the answer"
    CUT = "the connection breaks in the middle of the answer"
    SLOW = "the first byte is late"
    EXPIRED = "400 ExpiredToken; the server never hears of it"


_PASSING = (Fault.SLOW_DOWN, Fault.RESET, Fault.LOST, Fault.CUT, Fault.SLOW)
_REFUSALS = {
    Fault.SLOW_DOWN: ("503 Slow Down", "SlowDown"),
    Fault.EXPIRED: ("400 Bad Request", "ExpiredToken"),
}
_LATE_SECONDS = 0.3
# Of one request, in a row: a client tries eight times.
_MOST_IN_A_ROW = 3


@dataclass
class BadDays:
    """How bad it is, and what it was."""

    seed: int
    rate: float
    "how many of the requests are hit"
    expired_after: int | None = None
    "requests, after which the credentials have expired"
    counts: Counter[Fault] = field(default_factory=Counter)
    _row: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def choose(self, request: str) -> Fault:
        if self.expired_after is not None and self.counts.total() >= self.expired_after:
            fault = Fault.EXPIRED
        elif self._random.random() < self.rate and self._row[request] < _MOST_IN_A_ROW:
            fault = self._random.choice(_PASSING)
        else:
            fault = Fault.NONE
        self._row[request] = self._row[request] + 1 if fault is not Fault.NONE else 0
        self.counts[fault] += 1
        return fault


@contextlib.contextmanager
def fault_proxy(endpoint: str, days: BadDays) -> Iterator[str]:
    """Run a proxy in a thread; yield its endpoint."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault-proxy")
    thread.start()
    upstream = urlsplit(endpoint)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _answer(reader, writer, (upstream.hostname or "", upstream.port or 80), days)
        writer.close()

    try:
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop)
        server = starting.result(10)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loop.call_soon_threadsafe(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: tuple[str, int], days: BadDays
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    line, *headers = head.decode("latin-1").rstrip().split("\r\n")
    lengths = [header.partition(":")[2] for header in headers if header.lower().startswith("content-length:")]
    if any(header.lower().startswith("expect:") for header in headers):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        headers = [header for header in headers if not header.lower().startswith("expect:")]
    body = await reader.readexactly(int(lengths[0]) if lengths else 0)
    fault = days.choose(line)
    if fault in _REFUSALS:
        status, code = _REFUSALS[fault]
        error = (
            f"<Error><Code>{code}</Code><Message>as planned</Message></Error>" if not line.startswith("HEAD") else ""
        )
        answered = f"HTTP/1.1 {status}\r\nContent-Length: {len(error)}\r\nConnection: close\r\n\r\n{error}"
        writer.write(answered.encode())
        await writer.drain()
        return
    if fault is Fault.RESET:
        _break(writer)
        return
    if fault is Fault.SLOW:
        await asyncio.sleep(_LATE_SECONDS)
    closing = [header for header in headers if not header.lower().startswith("connection:")]
    there, back = await asyncio.open_connection(*upstream)
    back.write("\r\n".join([line, *closing, "Connection: close", "", ""]).encode("latin-1") + body)
    answer = await there.read()
    back.close()
    if fault is Fault.LOST:
        _break(writer)
        return
    if fault is Fault.CUT:
        writer.write(answer[: max(len(answer) - 1, 0) // 2])
        await writer.drain()
        _break(writer)
        return
    writer.write(answer)
    await writer.drain()


def _break(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
