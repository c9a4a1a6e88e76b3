"""An S3 store of one object which misbehaves on request, for what a real store does too seldom to test."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fault(Enum):
    """What goes wrong with one request."""

    NONE = auto()
    UNAVAILABLE = auto()
    "503 SlowDown"
    DENIED = auto()
    NO_BUCKET = auto()
    RESET = auto()
    "half of the body, then a reset"
    CUT = auto()
    "half of the body, then an orderly end"
    SHORT = auto()
    "a well-formed answer with fewer bytes than asked for"
    WHOLE = auto()
    "the whole object instead of the range"
    LOST = auto()
    "the request is carried out, and the connection closed before the answer"


@dataclass
class FaultyStore:
    """The object, and what is to happen to the next requests of each method; the last fault of a list stays."""

    data: bytes
    etag: str = '"v1"'
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    owner: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, method: str, *faults: Fault) -> None:
        self.faults[method] = deque(faults)

    def next_fault(self, method: str) -> Fault:
        with self.lock:
            self.requests[method] += 1
            planned = self.faults.get(method)
            if not planned:
                return Fault.NONE
            return planned.popleft() if len(planned) > 1 else planned[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FaultyStore

    def do_HEAD(self) -> None:
        if not self._refused(self.store.next_fault("HEAD")):
            if self.store.owner is None and not self.store.data:
                self._answer(404, b"")
            else:
                self._answer(200, b"", {"Content-Length": str(len(self.store.data)), **self._metadata()})

    def do_GET(self) -> None:
        fault = self.store.next_fault("GET")
        if self._refused(fault):
            return
        data = self.store.data
        if self.headers.get("If-Match", self.store.etag) != self.store.etag:
            self._refuse(412, "PreconditionFailed")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        assert found, "every read is ranged"
        start, stop = int(found[1]), int(found[2]) + 1
        if fault is Fault.WHOLE:
            self._answer(200, data)
            return
        if fault is Fault.SHORT:
            stop -= 1
        body = data[start:stop]
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Content-Length": str(len(body))}
        if fault in (Fault.RESET, Fault.CUT):
            self._answer(206, body[: len(body) // 2], span)
            if fault is Fault.RESET:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()
        else:
            self._answer(206, body, span)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        fault = self.store.next_fault("PUT")
        if self._refused(fault):
            return
        if self.headers.get("If-None-Match") and (self.store.data or self.store.owner):
            self._refuse(412, "PreconditionFailed")
            return
        self.store.data, self.store.owner = body, self.headers.get("x-amz-meta-writer")
        if fault is Fault.LOST:
            self.close_connection = True
        else:
            self._answer(200, b"", {"Content-Length": "0"})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _metadata(self) -> dict[str, str]:
        return {"x-amz-meta-writer": self.store.owner} if self.store.owner else {}

    def _refused(self, fault: Fault) -> bool:
        if fault is Fault.UNAVAILABLE:
            self._refuse(503, "SlowDown")
        elif fault is Fault.DENIED:
            self._refuse(403, "AccessDenied")
        elif fault is Fault.NO_BUCKET:
            self._refuse(404, "NoSuchBucket")
        return fault in (Fault.UNAVAILABLE, Fault.DENIED, Fault.NO_BUCKET)

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self._answer(status, b"" if self.command == "HEAD" else body)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"ETag": self.store.etag, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def faulty_store(data: bytes) -> Iterator[tuple[FaultyStore, str]]:
    """Serve the object under every name; give the store and its endpoint."""
    store = FaultyStore(data)
    handler = type("Handler", (_Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield store, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
