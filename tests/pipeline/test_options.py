"""The command line as design.md fixes it: scripts rely on these words."""

from __future__ import annotations

import json

import pytest

from pipeline.options import Request, check_request, parse_request, parse_size
from tasks.errors import ReshardError
from tasks.target import Projection


def test_what_is_not_asked_for_is_left_to_the_source() -> None:
    request = parse_request(["a", "b"])
    assert request == Request("a", "b")
    assert (request.mp, request.dp, request.flat, request.dtype, request.keep_state) == (None, None, None, "", True)
    assert request.durable


def test_every_option_arrives() -> None:
    words = "a b --mp 4 --dp 2 --layout flat --format metaseq --dtype bf16 --state drop --qkv split --prefix p"
    words += " --checkpoint c --memory 1GiB --address auto --dry-run --overwrite --json --replica-part 1 --heads 8"
    words += " --source-qkv fused --resources num_gpus=0.5 --resources label=1 --moments fp32 --fsync off"
    request = parse_request(words.split())
    assert (request.mp, request.dp, request.flat, request.dtype) == (4, 2, True, "bfloat16")
    assert (request.keep_state, request.projection, request.prefix) == (False, Projection.SPLIT, "p")
    assert (request.checkpoint, request.memory_bytes, request.address) == ("c", 1 << 30, "auto")
    assert (request.dry_run, request.overwrite, request.json) == (True, True, True)
    assert (request.replica_part, request.heads, request.source_fused) == (1, 8, True)
    assert request.resources == ("num_gpus=0.5", "label=1")
    assert (request.moments_dtype, request.durable) == ("float32", False)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a"],
        ["a", "b", "--mp", "0"],
        ["a", "b", "--mp", "two"],
        ["a", "b", "--layout", "round"],
        ["a", "b", "--dtype", "int8"],
        ["a", "b", "--memory", "lots"],
        ["a", "b", "--over"],
        ["a", "b", "--layout", "unflat", "--dp", "2"],
    ],
)
def test_wrong_words_end_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_request(words)
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert "error[usage]" in told.err
    assert "next: python -m pipeline.reshard --help" in told.err
    assert told.out == ""


def test_wrong_words_are_told_as_json_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_request(["a", "b", "--json", "--mp", "0"])
    assert json.loads(capsys.readouterr().out)["problems"][0]["reference"] == "usage"


@pytest.mark.parametrize("text", ["", "12 parsecs", "-1", "1.2.3MB", "MiB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_a_prefix_is_no_path() -> None:
    with pytest.raises(ReshardError) as caught:
        check_request(Request("a", "b", prefix="../c"))
    assert caught.value.exit_code == 2
