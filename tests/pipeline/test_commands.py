"""The commands as users run them: real processes, a real local Ray, exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.running import FIXTURES, load

ROOT = Path(__file__).parent.parent.parent
SOURCE = FIXTURES / "mp2dp2-fp16-fused"


def command(*words: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_reshard_writes_a_manifest_last_and_a_second_run_finds_it_done(tmp_path: Path) -> None:
    words = ["pipeline.reshard", SOURCE, tmp_path / "out", "--mp", "1", "--dp", "3", "--state", "drop", "--json"]
    first = command(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert result["files"] == [f"checkpoint_last-model_part-0-shard{shard}.pt" for shard in range(3)]
    assert result["dropped"] == ["last_optimizer_state", "extra_state.rng_tracker_states"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == result["files"]
    for file in manifest["files"]:
        assert (tmp_path / "out" / file["name"]).stat().st_size == file["size_bytes"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.is_file()}
    second = command(*words, cwd=tmp_path)
    assert second.returncode == 0
    assert json.loads(second.stdout)["already_done"] is True
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.is_file()}

    other = command(*words[:-1], "--qkv", "split", cwd=tmp_path)
    assert other.returncode == 7
    assert "--overwrite" in other.stderr
    assert other.stdout == ""
    replaced = command(*words[:-1], "--qkv", "split", "--overwrite", cwd=tmp_path)
    assert replaced.returncode == 0, replaced.stderr
    names = load(tmp_path / "out" / result["files"][0])["shard_metadata"]["param_metadata"][1]["params"]["flat_param_0"]
    assert "self_attn.k_proj.weight" in names["names"]


def test_source_may_be_a_file_a_prefix_or_a_glob(tmp_path: Path) -> None:
    for words in ([SOURCE / "checkpoint_last"], [f"{SOURCE}/checkpoint_last-model_part-*.pt"], [SOURCE]):
        result = command("pipeline.inspect", *words, "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["files"] == 4
    single = command(
        "pipeline.inspect", FIXTURES / "mp1dp1-fp32-fused" / "checkpoint_last-model_part-0-shard0.pt", "--json"
    )
    assert json.loads(single.stdout)["parameters"] > 0


def test_dry_run_writes_nothing_and_needs_no_ray(tmp_path: Path) -> None:
    began = time.monotonic()
    result = command(
        "pipeline.reshard", SOURCE, tmp_path / "out", "--mp", "1", "--state", "drop", "--dry-run", "--json"
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["dry_run"] is True
    parameters, copies_of_version = 2628, 2
    assert told["bytes_needed"] == 2 * (parameters + copies_of_version)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--layout", "unflat", "--dp", "2"], 2, "--layout flat"),
        (["--mp", "0"], 2, "positive"),
        (["--memory", "plenty"], 2, "not a size"),
        (["--resources", "num_gpus"], 2, "num_gpus"),
        (["--mp", "3", "--state", "drop"], 4, "--mp may be one of 1, 2"),
        (["--memory", "1MB", "--state", "drop"], 4, "pass --memory"),
        (["--resources", "no_such_label=1", "--state", "drop"], 4, "no_such_label"),
    ],
)
def test_exit_codes_of_wrong_requests(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    result = command("pipeline.reshard", SOURCE, tmp_path / "out", *words)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("bad-missing-shard", "(mp=1, dp=2)"), ("bad-truncated", "checkpoint_last-model_part-1-shard1.pt")],
)
def test_bad_sources_are_refused_by_name_with_code_3(name: str, said: str, tmp_path: Path) -> None:
    for words in (
        ["pipeline.inspect", FIXTURES / name],
        ["pipeline.reshard", FIXTURES / name, tmp_path / "out", "--mp", "1"],
    ):
        result = command(*words)
        assert result.returncode == 3
        assert said in result.stderr + result.stdout
        assert "next:" in result.stderr + result.stdout
    assert not (tmp_path / "out").exists()


def test_help_teaches_with_examples() -> None:
    told = command("pipeline.reshard", "--help")
    assert told.returncode == 0
    assert "python -m pipeline.reshard" in told.stdout
    assert "exit codes" in told.stdout


def test_an_interrupted_run_publishes_nothing_and_the_same_command_finishes_it(tmp_path: Path) -> None:
    words = [
        "pipeline.reshard",
        SOURCE,
        tmp_path / "out",
        "--mp",
        "2",
        "--dp",
        "40",
        "--layout",
        "flat",
        "--state",
        "drop",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    records = tmp_path / "out" / ".reshard" / "records"
    while not (records.exists() and any(records.iterdir())) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    if code == 0:
        pytest.skip("the run was faster than the signal")
    assert not (tmp_path / "out" / "manifest.json").exists()
    kept = {path.name for path in records.iterdir()}
    again = command(*words)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 80 files were finished already" in again.stderr
    for mp in range(2):
        total = sum(
            load(tmp_path / "out" / f"checkpoint_last-model_part-{mp}-shard{dp}.pt")["model"]["flat_param_0"].numel()
            for dp in range(40)
        )
        assert total == 40 * -(-390 // 40)


def test_casts_run_on_workers_and_leave_buffers_alone(tmp_path: Path) -> None:
    result = command(
        "pipeline.reshard", SOURCE, tmp_path, "--layout", "unflat", "--mp", "1", "--state", "drop", "--dtype", "fp32"
    )
    assert result.returncode == 0, result.stderr
    truth = load(SOURCE / "truth.pt")["model"]
    model = load(tmp_path / "checkpoint_last.pt")["model"]
    for name, tensor in truth.items():
        expected = tensor if name == "decoder.version" else tensor.float()
        assert model[name].dtype == expected.dtype
        assert torch.equal(model[name], expected), name
