"""The contract on a real S3 server, and what only S3 has: parts, left-overs, buckets, credentials."""

from __future__ import annotations

import multiprocessing
import os
import traceback

import pytest

from tasks import storage
from tasks.errors import ErrorKind, ReshardError
from tasks.storage import s3_client
from tests.conftest import STORE
from tests.servers import S3Server, environment
from tests.tasks.storage.contract import StorageContract, problem

_MIB = 1 << 20


class TestS3(StorageContract):
    @pytest.fixture
    def root(self, s3_bucket: str) -> str:
        return storage.join(s3_bucket, "root")

    @pytest.fixture(autouse=True)
    def no_uploads_are_left(self, s3_server: S3Server, s3_bucket: str) -> object:
        yield
        with s3_server.client() as client:
            left = client.list_multipart_uploads(Bucket=storage.basename(s3_bucket))
        assert not left.get("Uploads")

    def test_a_bucket_is_a_directory(self, s3_bucket: str) -> None:
        assert storage.list_files(s3_bucket) == ()
        identity = self.put(storage.join(s3_bucket, "a.pt"), b"1")
        assert [file.identity for file in storage.list_files(s3_bucket + "/")] == [identity]

    def test_parts_are_even(self, s3_server: S3Server, s3_bucket: str) -> None:
        url = storage.join(s3_bucket, "a.pt")
        with storage.open_writer(url, 30 * _MIB, temporary_directory=s3_bucket) as writer:
            for size in (3, 3, 17, 1, 6):
                writer.write(bytes(size * _MIB))
            identity = writer.commit()
        assert identity.version.strip('"').endswith("-4")
        with s3_server.client() as client:
            head = client.head_object(Bucket=storage.basename(s3_bucket), Key="a.pt", PartNumber=1)
        # Ceph's gateway knows no numbers of parts and tells of the whole object; the ETag has counted them.
        assert head["ContentLength"] == (30 if STORE == "ceph" else 8) * _MIB

    def test_an_upload_under_way_is_aborted_with_its_parts(self, s3_server: S3Server, s3_bucket: str) -> None:
        url = storage.join(s3_bucket, "a.pt")
        with storage.open_writer(url, 40 * _MIB, temporary_directory=s3_bucket) as writer:
            writer.write(bytes(33 * _MIB))
            with s3_server.client() as client:
                assert len(client.list_multipart_uploads(Bucket=storage.basename(s3_bucket))["Uploads"]) == 1
        assert not storage.exists(url)

    def test_a_missing_bucket_is_named(self, s3_bucket: str) -> None:
        missing = f"{s3_bucket}-missing"
        with pytest.raises(ReshardError) as caught:
            storage.list_files(missing)
        assert problem(caught) == (ErrorKind.SOURCE, "no-such-bucket")

    def test_a_forked_child_makes_its_own_connections(self, s3_bucket: str) -> None:
        url = storage.join(s3_bucket, "a.pt")
        self.put(url, b"parent")
        context = multiprocessing.get_context("fork")
        child = context.Process(target=storage.write_small, args=(url, b"child"))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert storage.read_small(url) == b"child"

    def test_wrong_credentials_are_explained_and_not_shown(self, s3_bucket: str) -> None:
        with environment(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="hunter2hunter2"):
            s3_client.forget()
            with pytest.raises(ReshardError) as caught:
                storage.list_files(s3_bucket)
            assert problem(caught) == (ErrorKind.SOURCE, "access-denied")
            with pytest.raises(ReshardError) as refused:
                storage.write_small(storage.join(s3_bucket, "a"), b"1")
            assert problem(refused) == (ErrorKind.TARGET, "access-denied")
            shown = "".join(traceback.format_exception(refused.value)) + repr(refused.value) + str(caught.value)
            assert "AWS_SECRET_ACCESS_KEY" in shown
            assert "hunter2" not in shown

    def test_missing_credentials_are_explained(self, s3_bucket: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        nowhere = str(tmp_path_factory.mktemp("empty") / "none")
        with environment(AWS_SHARED_CREDENTIALS_FILE=nowhere, AWS_CONFIG_FILE=nowhere):
            kept = {name: os.environ.pop(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
            try:
                s3_client.forget()
                with pytest.raises(ReshardError) as caught:
                    storage.list_files(s3_bucket)
            finally:
                os.environ.update(kept)
        assert problem(caught) == (ErrorKind.SOURCE, "no-credentials")
        assert "set AWS_ACCESS_KEY_ID" in str(caught.value)

    def test_no_handle_shows_credentials(self, s3_server: S3Server, s3_bucket: str) -> None:
        identity = self.put(storage.join(s3_bucket, "a"), b"1")
        with (
            storage.open_reader(identity) as reader,
            storage.open_writer(identity.url, 1, temporary_directory="") as writer,
        ):
            assert s3_server.secret_key not in repr((identity, reader, writer, vars(reader), vars(writer)))
