"""Of several runs into one target one works; a dead one's lease is taken over; status tells what a rerun would do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.lease import Lease, latest_lease
from pipeline.status import in_words, status
from tasks.errors import ReshardError
from tests.running import FIXTURES, reshard_here

ROOT = Path(__file__).parent.parent.parent
SOURCE = FIXTURES / "mp2dp2-fp16-fused"


def lease(folder: Path | str, **options: float) -> Lease:
    return Lease(str(folder), "plan", **{"beat_seconds": 0.05, "silence_seconds": 0.5, **options})  # type: ignore[arg-type]


def pretend_elsewhere(folder: Path, **facts: object) -> None:
    """Make the newest lease look as if another host held it."""
    path = max(folder.glob("*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", **facts}))


def test_a_second_run_is_refused_while_the_first_lives_and_free_afterwards(tmp_path: Path) -> None:
    with lease(tmp_path) as first:
        first.check()
        with pytest.raises(ReshardError, match=f"process {os.getpid()}") as caught, lease(tmp_path):
            pass
        assert caught.value.exit_code == 7
        first.check()
    with lease(tmp_path) as second:
        second.check()


def test_a_living_run_elsewhere_is_told_by_its_signs(tmp_path: Path) -> None:
    with lease(tmp_path):
        pretend_elsewhere(tmp_path)
        with pytest.raises(ReshardError, match="elsewhere"), lease(tmp_path):
            pass


def test_a_silent_run_elsewhere_loses_its_lease_and_notices(tmp_path: Path) -> None:
    with lease(tmp_path, beat_seconds=1000) as first:
        time.sleep(0.05)
        pretend_elsewhere(tmp_path)
        with lease(tmp_path) as second:
            second.check()
            with pytest.raises(ReshardError, match="no sign of life") as caught:
                first.check()
            assert caught.value.exit_code == 7


def test_of_many_that_try_at_once_one_has_the_lease(tmp_path: Path) -> None:
    held, refused = [], []
    barrier, done = threading.Barrier(8), threading.Event()

    def run() -> None:
        barrier.wait()
        try:
            with lease(tmp_path):
                held.append(1)
                done.wait(20)
        except ReshardError as fault:
            refused.append(fault.exit_code)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(refused) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert (len(held), refused) == (1, [7] * 7)


def test_a_killed_process_of_this_host_is_dead_at_once(tmp_path: Path) -> None:
    code = f"from pipeline.lease import Lease; Lease({str(tmp_path)!r}, 'plan').__enter__()"
    code += "; print('in', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        with pytest.raises(ReshardError), lease(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        with lease(tmp_path, silence_seconds=60):
            assert time.monotonic() - began < 10
    found = latest_lease(str(tmp_path))
    assert found is not None
    assert found["generation"] == 2


def test_a_lease_on_s3_behaves_alike(s3_bucket: str) -> None:
    folder = f"{s3_bucket}/out/.reshard/lease"
    with lease(folder) as first:
        with pytest.raises(ReshardError, match="in use"), lease(folder):
            pass
        first.check()
    with lease(folder) as second:
        second.check()


def test_a_rerun_trusts_a_file_only_by_its_bytes(tmp_path: Path) -> None:
    reshard_here(SOURCE, tmp_path, mp=2, dp=3, flat=True)
    whole = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}
    (tmp_path / "manifest.json").unlink()
    touched, torn, lost = sorted(tmp_path.glob("*.pt"))[:3]
    times = touched.stat()
    content = bytearray(touched.read_bytes())
    content[-3000] ^= 1
    touched.write_bytes(content)
    os.utime(touched, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time, another byte
    torn.write_bytes(torn.read_bytes()[:-100])
    lost.unlink()
    (tmp_path / ".reshard" / "records" / f"{sorted(whole)[3]}.json").write_text("{")
    told = status(str(tmp_path))
    assert (told["state"], told["files"], told["finished"]) == ("stopped", 6, 3)
    assert {torn.name, lost.name} <= set(told["to_do"])
    again = reshard_here(SOURCE, tmp_path, mp=2, dp=3, flat=True)
    assert again["kept"] == 2
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")} == whole
    assert status(str(tmp_path))["state"] == "done"


def test_damage_found_in_the_source_is_found_again_by_a_rerun(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    victim = source / "checkpoint_last-model_part-1-shard0.pt"
    content = bytearray(victim.read_bytes())
    where = victim.read_bytes().find(b"checkpoint_last-model_part-1-shard0/data/2") + 150
    content[where] ^= 1
    victim.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ReshardError, match="not those that were saved"):
            reshard_here(source, tmp_path / "out", mp=1, dp=2, flat=True)
        assert not (tmp_path / "out" / "manifest.json").exists()
    told = status(str(tmp_path / "out"))
    assert "source-damaged" in told["failure"]
    assert "what ended it" in in_words(told)


def test_status_of_no_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        status(str(tmp_path))
    assert caught.value.exit_code == 7


def test_overwrite_removes_what_an_unfinished_run_left_and_mends_what_is_damaged(tmp_path: Path) -> None:
    reshard_here(SOURCE, tmp_path, mp=2, dp=4, flat=True)
    (tmp_path / "manifest.json").unlink()  # as if it had been killed before the end
    reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True, overwrite=True)
    assert len(list(tmp_path.glob("*.pt"))) == 4
    assert len(list((tmp_path / ".reshard" / "records").iterdir())) == 4
    victim = sorted(tmp_path.glob("*.pt"))[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:5000] + b"x" + whole[5001:])
    again = reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True, overwrite=True)
    assert again["kept"] == 3
    assert victim.read_bytes() == whole


def test_a_folder_of_links_protects_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "farm").mkdir()
    for path in SOURCE.glob("check*.pt"):
        shutil.copy(path, tmp_path / "real" / path.name)
        (tmp_path / "farm" / path.name).symlink_to(tmp_path / "real" / path.name)
    before = {path.name: path.read_bytes() for path in (tmp_path / "real").iterdir()}
    for target in ("real", "farm"):
        with pytest.raises(ReshardError, match="folder of the source"):
            reshard_here(tmp_path / "farm", tmp_path / target, mp=2, dp=3, flat=True, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "real").iterdir()} == before


@pytest.mark.parametrize("content", ["{}", "[]", "junk", '{"plan_id": 3, "files": [1]}'])
def test_manifests_that_are_not_ours_are_in_the_way_and_no_crash(content: str, tmp_path: Path) -> None:
    reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True)
    own = json.loads((tmp_path / "manifest.json").read_text())["plan_id"]
    for text in (content, json.dumps({"plan_id": own})):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ReshardError) as caught:
            reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True)
        assert caught.value.exit_code == 7
    reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True, overwrite=True)


@pytest.mark.parametrize("prefix", ["x-shard3", "_x", ".x", "a_part1", "x-rank-0", "x-model_part-1", "x\ny", ".."])
def test_prefixes_that_would_not_be_found_again_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        reshard_here(SOURCE, tmp_path / "out", mp=1, dp=1, flat=False, prefix=prefix)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_strange_shards_in_the_folder_are_named_and_never_replaced(tmp_path: Path) -> None:
    stranger = tmp_path / "checkpoint_last-model_part-0-shard7.pt"
    stranger.write_bytes(b"precious")
    with pytest.raises(ReshardError, match="shard7") as caught:
        reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True, overwrite=True)
    assert caught.value.exit_code == 7
    assert stranger.read_bytes() == b"precious"
    reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True, overwrite=True, prefix="another")


def test_a_refusal_says_what_is_different(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    reshard_here(source, tmp_path / "out", mp=2, dp=2, flat=True)
    with pytest.raises(ReshardError, match=r"there: .*dp 2.*asked for: .*dp 3"):
        reshard_here(source, tmp_path / "out", mp=2, dp=3, flat=True)
    victim = source / "checkpoint_last-model_part-1-shard0.pt"
    os.utime(victim, ns=(1, 1))
    with pytest.raises(ReshardError, match=r"have changed since: .*model_part-1-shard0"):
        reshard_here(source, tmp_path / "out", mp=2, dp=2, flat=True)


def test_a_target_that_lost_a_file_is_damaged(tmp_path: Path) -> None:
    reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True)
    sorted(tmp_path.glob("*.pt"))[0].unlink()
    told = status(str(tmp_path))
    assert (told["state"], told["finished"], len(told["to_do"])) == ("damaged", 3, 1)
    assert "--overwrite" in in_words(told)
    with pytest.raises(ReshardError, match="actual: missing"):
        reshard_here(SOURCE, tmp_path, mp=2, dp=2, flat=True)
