"""One local Ray for all tests that need one: starting it costs two to four seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.session import Session, ray_session


@pytest.fixture(scope="session")
def local_ray() -> Iterator[Session]:
    with ray_session("local", num_cpus=2, object_store_memory_bytes=80 << 20) as session:
        yield session
