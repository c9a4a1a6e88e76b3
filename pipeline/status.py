"""`python -m pipeline.status TARGET`: how far a run is, what ended it, and what a rerun would do again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipeline.lease import describe, is_alive, latest_lease
from pipeline.manifest import MANIFEST, named_files
from pipeline.messages import CommandParser, run_command
from pipeline.nodes import RUN
from pipeline.records import piece_of
from pipeline.target_folder import FAILURE
from pipeline.work_folder import RECORDS, WORK, files_in
from tasks import storage
from tasks.errors import ErrorKind, ReshardError, error

# A run gives a sign of life every five seconds.
_WATCHED_SECONDS = 8.0


def status(target: str) -> dict[str, Any]:
    """Describe what is in a target: 'done', 'damaged', 'running' or 'stopped'. Raises where it is no target."""
    url = storage.normalise(target)
    manifest = _read(storage.join(url, MANIFEST))
    run = _read(storage.join(url, WORK, RUN))
    if manifest is None and run is None:
        raise error(
            ErrorKind.TARGET,
            "no-run",
            f"{target} holds no run of this tool",
            hint="pass the TARGET of python -m pipeline.reshard",
        )
    files = list(named_files(manifest)) if manifest else list((run or {}).get("files", ()))
    finished = _recorded(url, files, run) if manifest is None else _whole(url, named_files(manifest))
    lease = latest_lease(storage.join(url, WORK, "lease"))
    alive = manifest is None and lease is not None
    alive = alive and is_alive(storage.join(url, WORK, "lease"), lease or {}, _WATCHED_SECONDS)
    failure = None if manifest or alive else _read(storage.join(url, WORK, FAILURE))
    return {
        "exit_code": 0,
        "target": url,
        "state": _state(manifest is not None, alive, len(finished) == len(files)),
        "plan_id": (manifest or run or {}).get("plan_id"),
        "files": len(files),
        "finished": len(finished),
        "to_do": [name for name in files if name not in finished],
        "pieces": _pieces(url, set(files) - set(finished)),
        "holder": describe(lease["holder"]) if alive and lease else "",
        "failure": (failure or {}).get("error", ""),
    }


def _state(committed: bool, alive: bool, whole: bool) -> str:
    if committed:
        return "done" if whole else "damaged"
    return "running" if alive else "stopped"


def _whole(url: str, sizes: Mapping[str, int]) -> list[str]:
    """Name the files that are there in the size that the manifest states."""
    there = {file.name: file.size_bytes for file in storage.list_files(url)}
    return [name for name, size_bytes in sizes.items() if there.get(name) == size_bytes]


def _recorded(url: str, files: Sequence[str], run: Mapping[str, Any] | None) -> list[str]:
    """Name the files that have a record of this plan and are there in the recorded size."""
    sizes = {file.name: file.size_bytes for file in storage.list_files(url)}
    finished = []
    for name in files:
        record = _read(storage.join(url, WORK, RECORDS, f"{name}.json")) or {}
        if run and record.get("plan_id") == run.get("plan_id") and sizes.get(name) == record.get("size_bytes"):
            finished.append(name)
    return finished


def _pieces(url: str, unfinished: Collection[str]) -> dict[str, str]:
    """Say of files that are written in pieces how many of these are there: '3 of 8'."""
    records = files_in(storage.join(url, WORK, RECORDS)) if unfinished else []
    found = Counter((piece[0], piece[2]) for name in records if (piece := piece_of(name)))
    return {name: f"{number} of {count}" for (name, count), number in sorted(found.items()) if name in unfinished}


def _read(url: str) -> dict[str, Any] | None:
    try:
        content = json.loads(storage.read_small(url))
    except ValueError:
        return None
    except ReshardError as fault:
        if fault.problems[0].reference == "no-such-file":
            return None
        raise
    return content if isinstance(content, dict) else None


def in_words(what: Mapping[str, Any]) -> str:
    """Say it for a person."""
    lines = [f"{what['target']}: {what['state']}, {what['finished']} of {what['files']} files are finished"]
    if what["holder"]:
        lines.append(f"  in work by {what['holder']}")
    if what["failure"]:
        lines += ["  what ended it:", *(f"    {line}" for line in what["failure"].splitlines())]
    pieces = {name: f" ({told} pieces are there)" for name, told in what["pieces"].items()}
    unfinished = [f"    {name}{pieces.get(name, '')}" for name in what["to_do"]]
    if what["state"] == "running":
        lines += [line for line in unfinished if line.endswith(")")][:10]
    if what["state"] in ("stopped", "damaged"):
        again = "the same command with --overwrite" if what["state"] == "damaged" else "the same command again"
        if unfinished:
            lines.append(f"  {again} would write {len(unfinished)} of the files, and check what is there:")
        else:
            lines.append(f"  {again} would check the files and write the manifest")
        lines += unfinished[:10]
        if len(unfinished) > 10:
            lines.append(f"    and {len(unfinished) - 10} more")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = CommandParser(
        prog="python -m pipeline.status",
        description="Tell how far a run into TARGET is, what ended it, and what a rerun would do again.",
        epilog="exit codes: 0 told; 2 wrong use; 7 no run of this tool is there",
    )
    parser.add_argument("target", metavar="TARGET", help="the TARGET of python -m pipeline.reshard")
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    words = parser.parse(arguments)

    def command() -> tuple[Mapping[str, Any], str]:
        what = status(words.target)
        return what, in_words(what)

    return run_command(command, as_json=words.json)


if __name__ == "__main__":
    sys.exit(main())
