"""The contract on fsspec's memory storage."""

# ruff: noqa: PT012 - what a context does when it is left is what is tested

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tests.tasks.storage.contract import StorageContract, problem


class TestMemory(StorageContract):
    num_leftovers = 0

    @pytest.fixture
    def root(self) -> Iterator[str]:
        root = f"memory://{uuid.uuid4().hex}"
        storage.make_directory(root)
        yield root
        fsspec.filesystem("memory").rm(root, recursive=True)

    def test_a_file_changed_while_it_is_read_is_noticed(self, root: str) -> None:
        """Here the bytes after the change may be read, but not kept: leaving the reader raises."""
        url = storage.join(root, "a.pt")
        identity = self.put(url, b"0123456789")
        with pytest.raises(ReshardError) as caught, storage.open_reader(identity) as reader:
            storage.write_small(url, b"abcdefghij")
            reader.read(3, 3)
        assert problem(caught) == (ErrorKind.SOURCE, "source-changed")


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(ReshardError) as caught:
        storage.stat("nosuchprotocol://a/b")
    assert problem(caught) == (ErrorKind.USAGE, "unknown-protocol")
