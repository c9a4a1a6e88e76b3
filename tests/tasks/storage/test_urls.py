"""Names."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tests.tasks.storage.contract import problem

_NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name not in (".", "..")
)


@given(root=st.sampled_from(["/data", "s3://bucket", "s3://bucket/run", "memory://x"]), name=_NAMES)
def test_parent_and_basename_undo_join(root: str, name: str) -> None:
    url = storage.join(root, name)
    assert (storage.parent(url), storage.basename(url)) == (root, name)


@given(
    root=st.sampled_from(["/data", "file:///data", "s3a://bucket", "memory://x"]), names=st.lists(_NAMES, max_size=3)
)
def test_normalising_twice_changes_nothing(root: str, names: list[str]) -> None:
    once = storage.normalise(storage.join(root, *names))
    assert storage.normalise(once) == once


def test_relative_paths_become_absolute() -> None:
    assert storage.normalise("a/../b/") == os.path.join(os.getcwd(), "b")
    assert storage.parent("/a") == "/"
    assert storage.join("memory://", "a") == "memory://a"


@pytest.mark.parametrize(
    "url", ["ftp://me:hunter2@host/a", "https://host/a?X-Amz-Signature=hunter2", "https://host/a?sig=hunter2"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ReshardError) as caught:
        storage.normalise(url)
    assert problem(caught) == (ErrorKind.USAGE, "credentials-in-url")
    assert "hunter2" not in str(caught.value)


def test_an_empty_name_and_a_missing_bucket_are_refused() -> None:
    for url in ("", "s3://", "file://"):
        with pytest.raises(ReshardError):
            storage.normalise(url)
