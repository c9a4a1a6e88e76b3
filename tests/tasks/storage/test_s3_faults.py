"""S3 reads and commits are exact, or an error, whatever happens on the way."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tasks.storage import retry, s3_client
from tests.servers import S3Server, environment
from tests.tasks.storage.contract import problem
from tests.tasks.storage.faulty_s3 import Fault, FaultyStore, faulty_store

_DATA = os.urandom(100_000)
_URL = "s3://bucket/a.pt"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """Give a store in place of every S3 endpoint; the pauses are shortened, their number is not."""
    monkeypatch.setattr(retry, "_FIRST_DELAY_SECONDS", 0.001)
    with faulty_store(_DATA) as (store, endpoint), environment(**S3Server(endpoint).environment()):
        s3_client.forget()
        yield store
        s3_client.forget()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.SHORT, Fault.WHOLE])
def test_a_passing_fault_does_no_harm(store: FaultyStore, fault: Fault) -> None:
    store.plan("GET", fault, fault, Fault.NONE)
    with storage.open_reader(storage.stat(_URL)) as reader:
        assert reader.read(1000, 50_000) == _DATA[1000:51_000]
    assert store.requests["GET"] == 3


def test_a_broken_body_is_resumed_where_it_broke(store: FaultyStore) -> None:
    store.plan("GET", *[Fault.CUT] * (retry.ATTEMPTS - 1), Fault.NONE)
    with storage.open_reader(storage.stat(_URL)) as reader:
        assert reader.read(0, len(_DATA)) == _DATA


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.WHOLE])
def test_an_endless_unfit_answer_is_a_short_read(store: FaultyStore, fault: Fault) -> None:
    store.plan("GET", fault)
    with storage.open_reader(storage.stat(_URL)) as reader, pytest.raises(ReshardError) as caught:
        reader.read(1000, 5000)
    assert problem(caught) == (ErrorKind.SOURCE, "short-read")
    assert _URL in str(caught.value)
    assert "1000 to 6000" in str(caught.value)
    assert store.requests["GET"] == retry.ATTEMPTS


def test_an_endless_fault_is_a_transient_error_which_travels(store: FaultyStore) -> None:
    store.plan("GET", Fault.UNAVAILABLE)
    with storage.open_reader(storage.stat(_URL)) as reader, pytest.raises(storage.TransientStorageError) as caught:
        reader.read(1000, 5000)
    assert store.requests["GET"] == retry.ATTEMPTS
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert _URL in str(caught.value)


def test_denied_access_is_not_repeated(store: FaultyStore) -> None:
    identity = storage.stat(_URL)
    store.plan("GET", Fault.DENIED)
    with storage.open_reader(identity) as reader, pytest.raises(ReshardError) as caught:
        reader.read(0, 10)
    assert problem(caught) == (ErrorKind.SOURCE, "access-denied")
    assert store.requests["GET"] == 1


@pytest.mark.parametrize(("fault", "reference"), [(Fault.DENIED, "access-denied"), (Fault.NO_BUCKET, "no-such-bucket")])
def test_a_target_that_refuses_is_told_as_a_target(store: FaultyStore, fault: Fault, reference: str) -> None:
    store.plan("PUT", fault)
    with pytest.raises(ReshardError) as caught:
        storage.write_small(_URL, b"1")
    assert problem(caught) == (ErrorKind.TARGET, reference)
    assert store.requests["PUT"] == 1


def test_a_put_is_repeated_with_its_whole_body(store: FaultyStore) -> None:
    store.plan("PUT", Fault.LOST, Fault.UNAVAILABLE, Fault.NONE)
    storage.write_small(_URL, b"0123456789")
    assert store.data == b"0123456789"
    assert store.requests["PUT"] == 3


def test_another_version_between_two_reads_is_noticed(store: FaultyStore) -> None:
    with storage.open_reader(storage.stat(_URL)) as reader:
        reader.read(0, 10)
        store.etag = '"v2"'
        with pytest.raises(ReshardError) as caught:
            reader.read(10, 10)
    assert problem(caught) == (ErrorKind.SOURCE, "source-changed")


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.LOST, Fault.UNAVAILABLE])
def test_a_creator_knows_its_own_object_after_a_lost_answer(store: FaultyStore, fault: Fault) -> None:
    store.data = b""
    store.plan("PUT", fault, Fault.NONE)
    assert storage.create_only(_URL, b"mine")
    assert store.data == b"mine"
    assert not storage.create_only(_URL, b"yours")
    assert store.data == b"mine"


def test_a_store_that_cannot_be_reached_is_a_transient_error(store: FaultyStore) -> None:
    with environment(AWS_ENDPOINT_URL="http://127.0.0.1:1"):
        s3_client.forget()
        with pytest.raises(storage.TransientStorageError, match="EndpointConnectionError"):
            storage.stat(_URL)
