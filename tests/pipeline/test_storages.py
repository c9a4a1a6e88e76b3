"""The same job on every kind of storage gives the same bytes: local disk, memory, a real S3 server, in any pairing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import storage
from tests.running import FIXTURES, reshard_here

ROOT = Path(__file__).parent.parent.parent
SOURCE = FIXTURES / "mp2dp4-fp16-fused"


def put(folder: Path, url: str) -> None:
    for path in folder.glob("checkpoint*.pt"):
        storage.write_small(storage.join(url, path.name), path.read_bytes())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("local")
    reshard_here(SOURCE, folder, mp=1, dp=3, flat=True)
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


def assert_equal(url: str, expected: dict[str, bytes]) -> None:
    names = {file.name for file in storage.list_files(url)}
    assert names == {*expected, "manifest.json"}
    for name, content in expected.items():
        assert storage.read_small(storage.join(url, name)) == content, name


def test_memory_to_memory(expected: dict[str, bytes]) -> None:
    put(SOURCE, "memory://storages/source")
    reshard_here("memory://storages/source", "memory://storages/target", mp=1, dp=3, flat=True)
    assert_equal("memory://storages/target", expected)


def test_s3_to_s3_and_to_local(s3_bucket: str, tmp_path: Path, expected: dict[str, bytes]) -> None:
    put(SOURCE, f"{s3_bucket}/runs/a b+c")
    reshard_here(f"{s3_bucket}/runs/a b+c", f"{s3_bucket}/out", mp=1, dp=3, flat=True)
    assert_equal(f"{s3_bucket}/out", expected)
    again = reshard_here(f"{s3_bucket}/runs/a b+c", f"{s3_bucket}/out", mp=1, dp=3, flat=True)
    assert again["already_done"] is True
    reshard_here(f"{s3_bucket}/runs/a b+c/checkpoint_last", tmp_path, mp=1, dp=3, flat=True)
    assert_equal(str(tmp_path), expected)


def test_the_command_on_s3_with_real_workers(s3_bucket: str, tmp_path: Path, expected: dict[str, bytes]) -> None:
    put(SOURCE, f"{s3_bucket}/source")
    words = [f"{s3_bucket}/source", f"{s3_bucket}/target", "--mp", "1", "--dp", "3", "--state", "drop", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.reshard", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_equal(f"{s3_bucket}/target", expected)
    manifest = json.loads(storage.read_small(f"{s3_bucket}/target/manifest.json"))
    assert len(manifest["source"]["files"]) == 8
    everything = done.stdout + done.stderr + json.dumps(manifest)
    work = f"{s3_bucket}/target/.reshard"
    for name in ("run.json", "records/checkpoint_last-model_part-0-shard0.pt.json"):
        everything += storage.read_small(f"{work}/{name}").decode()
    assert "testtest" not in everything, "no credentials anywhere"
