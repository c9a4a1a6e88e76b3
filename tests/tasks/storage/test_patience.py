"""Calls that never return, as those to a mount whose server is gone: real ones, to pipes that nobody writes to."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tasks import storage
from tasks.storage import TransientStorageError, limited, s3_client
from tasks.storage.local_errors import reading
from tasks.storage.patience import longest_call
from tasks.write_behind import WriteBehind


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_PATIENCE_SECONDS", "0.5")


def hanging_file(folder: Path) -> storage.FileIdentity:
    """Describe a file that has become a pipe: opening it waits for a writer."""
    path = folder / "a.pt"
    path.write_bytes(b"12345")
    identity = storage.stat(str(path))
    path.unlink()
    os.mkfifo(path)
    return identity


def answer(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


def test_a_call_that_hangs_fails_as_one_that_may_be_tried_again(tmp_path: Path) -> None:
    identity = hanging_file(tmp_path)
    ended = threading.Event()

    @limited
    def read() -> bytes:
        try:
            with storage.open_reader(identity) as reader:
                return reader.read(0, 5)
        finally:
            ended.set()

    with pytest.raises(TransientStorageError, match=f"{identity.url}: no answer for"):
        read()
    assert longest_call()[0] == "", "the next task of this process is not to suffer"
    assert not ended.is_set()
    answer(identity.url)
    assert ended.wait(10), "what comes back after all ends"


def test_a_helper_that_hangs_is_noticed_and_can_be_used_again(tmp_path: Path) -> None:
    identity = hanging_file(tmp_path)
    ended = threading.Event()

    def hang(_offset: int, _view: memoryview) -> None:
        storage.open_reader(identity)

    @limited
    def write() -> None:
        try:
            with WriteBehind(hang) as behind:
                behind.write(0, memoryview(b""), 0)
        finally:
            ended.set()

    with pytest.raises(TransientStorageError, match="no answer for"):
        write()
    answer(identity.url)
    assert ended.wait(10)
    assert longest_call()[0] == ""


def test_a_store_that_takes_a_request_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        s3_client.forget()
        try:
            with pytest.raises(TransientStorageError, match="s3://bucket/key: no answer for"):
                limited(storage.stat)("s3://bucket/key")
        finally:
            s3_client.forget()


def test_what_was_given_up_touches_nothing_more(tmp_path: Path) -> None:
    identity = hanging_file(tmp_path)
    ended = threading.Event()

    @limited
    def read_then_write() -> None:
        try:
            for _ in range(2):  # the second attempt is of code that retries by itself
                try:
                    storage.open_reader(identity)
                except TransientStorageError:
                    continue
            storage.write_small(str(tmp_path / "late"), b"late")
        finally:
            ended.set()

    with pytest.raises(TransientStorageError):
        read_then_write()
    answer(identity.url)
    assert ended.wait(10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_many_short_calls_are_not_one_long_one() -> None:
    @limited
    def calls() -> str:
        for _ in range(8):
            with reading("here"):
                time.sleep(0.1)
        return "done"

    assert calls() == "done"


def test_results_and_errors_pass_unchanged() -> None:
    def divide(a: int, *, by: int) -> float:
        return a / by

    assert limited(divide)(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        limited(divide)(1, by=0)
