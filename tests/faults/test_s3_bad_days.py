"""Whole runs from and into a real store, through a proxy that breaks one request in ten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import storage
from tests.conftest import STORE
from tests.fault_proxy import BadDays, Fault, fault_proxy
from tests.faults.children import Job
from tests.faults.targets import IN_PIECES, OPTIONS, SOURCE, published
from tests.servers import S3Server


def upload(bucket: str) -> str:
    for file in storage.list_files(str(SOURCE)):
        if "model_part" in file.name:
            storage.write_small(f"{bucket}/source/{file.name}", storage.read_small(file.identity.url))
    return f"{bucket}/source"


def files(target: str) -> dict[str, bytes]:
    return {name: content for name, content in published(target).items() if name.endswith(".pt")}


@pytest.mark.parametrize("seed", [1 if STORE == "ceph" else 2])
def test_a_run_gets_through_and_its_bytes_are_right(
    seed: int, tmp_path: Path, s3_bucket: str, s3_server: S3Server, undisturbed: dict[str, bytes]
) -> None:
    source = upload(s3_bucket)
    days = BadDays(seed, rate=0.1)
    with fault_proxy(s3_server.endpoint, days) as endpoint:
        environment = {**s3_server.environment(), "AWS_ENDPOINT_URL": endpoint}
        code, said = Job(source, f"{s3_bucket}/out", tmp_path, OPTIONS, environment).run()
    assert code == 0, said
    assert files(f"{s3_bucket}/out") == {name: undisturbed[name] for name in undisturbed if name.endswith(".pt")}
    assert storage.leftovers(f"{s3_bucket}/out") == ()
    assert days.counts.total() - days.counts[Fault.NONE] >= 5, days.counts


def test_so_does_one_in_pieces(
    large_source: Path, whole: dict[str, bytes], tmp_path: Path, s3_bucket: str, s3_server: S3Server
) -> None:
    days = BadDays(seed=3, rate=0.15)
    with fault_proxy(s3_server.endpoint, days) as endpoint:
        environment = {**s3_server.environment(), "AWS_ENDPOINT_URL": endpoint}
        code, said = Job(large_source, f"{s3_bucket}/out", tmp_path, IN_PIECES, environment).run()
    assert code == 0, said
    assert published(f"{s3_bucket}/out") == whole
    assert storage.leftovers(f"{s3_bucket}/out") == ()
    assert days.counts.total() - days.counts[Fault.NONE] >= 5, days.counts


def test_credentials_that_expire_end_the_run_and_say_so(
    tmp_path: Path, s3_bucket: str, s3_server: S3Server, undisturbed: dict[str, bytes]
) -> None:
    source = upload(s3_bucket)
    days = BadDays(seed=0, rate=0, expired_after=80)
    with fault_proxy(s3_server.endpoint, days) as endpoint:
        environment = {**s3_server.environment(), "AWS_ENDPOINT_URL": endpoint}
        code, said = Job(source, f"{s3_bucket}/out", tmp_path, OPTIONS, environment).run()
    assert code in (3, 5, 7), said
    assert "error[expired-credentials]" in said
    assert "renew" in said
    assert "retrying" not in said
    code, said = Job(source, f"{s3_bucket}/out", tmp_path, OPTIONS, s3_server.environment()).run()
    assert code == 0, said
    assert files(f"{s3_bucket}/out") == {name: undisturbed[name] for name in undisturbed if name.endswith(".pt")}
