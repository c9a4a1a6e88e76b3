"""What a command says when it fails: one exit code, the next step on stderr, valid JSON alone on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cluster.events import Event, EventKind
from cluster.failures import Interrupted, NodeFailed, OutOfMemory
from pipeline.messages import Progress, run_command
from tasks.errors import ErrorKind, Problem, ReshardError
from tasks.storage import TransientStorageError

SOURCE = ReshardError([Problem(ErrorKind.SOURCE, "empty-file", "a.pt is empty", hint="copy it again")])


def failing(fault: BaseException) -> Callable[[], tuple[Mapping[str, Any], str]]:
    def command() -> tuple[Mapping[str, Any], str]:
        raise fault

    return command


@pytest.mark.parametrize(
    ("fault", "code", "reference"),
    [
        (SOURCE, 3, "empty-file"),
        (NodeFailed("write 0 0", "write_target_shard", 1, SOURCE), 3, "empty-file"),
        (NodeFailed("write 0 0", "write_target_shard", 4, TransientStorageError("503")), 5, "storage-unavailable"),
        (NodeFailed("write 0 0", "write_target_shard", 4, ValueError("odd")), 5, "task-failed"),
        (NodeFailed("write 0 0", "write_target_shard", 2, OutOfMemory("killed")), 5, "out-of-memory"),
        (TransientStorageError("s3://b: no answer"), 5, "storage-unavailable"),
        (KeyError("unforeseen"), 5, "internal"),
        (Interrupted(3, 5), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_failure_has_a_code_a_name_and_a_next_step(
    fault: BaseException, code: int, reference: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(failing(fault), as_json=as_json) == code
    told = capsys.readouterr()
    assert f"error[{reference}]" in told.err
    assert "next:" in told.err
    if as_json:
        result = json.loads(told.out)
        assert result["exit_code"] == code
        assert result["problems"][0]["reference"] == reference
        assert result["problems"][0]["hint"]
    else:
        assert told.out == ""


def test_only_the_unforeseen_shows_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(failing(TransientStorageError("503")), as_json=False)
    assert "Traceback" not in capsys.readouterr().err
    run_command(failing(KeyError("unforeseen")), as_json=False)
    assert "Traceback" in capsys.readouterr().err


def test_retries_and_waiting_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.begin("writing", 2)
    progress.observe(Event(EventKind.RETRIED, "write 0 1", "write_target_shard", 1, message="worker crashed"))
    progress.observe(Event(EventKind.WAITING, message="no machine has memory"))
    progress.observe(Event(EventKind.FINISHED, "write 0 0", "write_target_shard", 1))
    told = capsys.readouterr().err
    assert "retrying write 0 1 after attempt 1: worker crashed" in told
    assert "waiting: no machine has memory" in told
    assert progress.retries == 1
