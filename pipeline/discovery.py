"""Finds the source's files: what SOURCE names, what is a link to what, and which checkpoint is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks import storage
from tasks.errors import ErrorKind, error
from tasks.formats.metaseq_files import Found, find_checkpoint
from tasks.formats.metaseq_names import parse
from tasks.storage import ListedFile

# Where links cannot be kept (archives, object stores), they become small files that hold the name they led to.
_LONGEST_LINK_BYTES = 512


def discover(source: str, checkpoint: str = "") -> Found:
    """Find the checkpoint that SOURCE names: a directory or prefix, one file, or a glob."""
    url = storage.normalise(source)
    if any(character in source for character in "*?["):
        files = storage.glob_files(url)
        if not files:
            raise error(
                ErrorKind.SOURCE, "no-checkpoint", f"no file matches {source}", hint="quote the pattern, and check it"
            )
        return find_checkpoint(files, where=source, wanted=checkpoint, aliases=_aliases(files))
    if source.endswith(".pt") and storage.exists(url):
        identity = storage.stat(url)
        single = ListedFile(storage.basename(url), identity.size_bytes, identity)
        return find_checkpoint([single], where=source)
    listed = _list(url)
    if listed is not None:
        return find_checkpoint(listed, where=source, wanted=checkpoint, aliases=_aliases(listed))
    if storage.exists(url):
        hint = "pass a *.pt file, or the folder of a checkpoint"
        raise error(
            ErrorKind.SOURCE, "no-checkpoint", f"{source} is no checkpoint: its name does not end in .pt", hint=hint
        )
    # metaseq names checkpoints by a file that is not there: x.pt for x-model_part-0.pt (`constants.py`).
    siblings = _list(storage.parent(url))
    names = {parsed.prefix for file in siblings or () if (parsed := parse(file.name))}
    wanted = storage.basename(url)
    prefix = next((name for name in (wanted.removesuffix(".pt"), wanted, f"{wanted}.pt") if name in names), None)
    if siblings is None or prefix is None:
        raise error(
            ErrorKind.SOURCE,
            "no-checkpoint",
            f"{source} is neither a directory, a file, nor the start of files' names",
            hint="check the path; credentials and endpoint, where it is remote",
        )
    return find_checkpoint(siblings, where=source, wanted=prefix, aliases=_aliases(siblings))


def _list(url: str) -> Sequence[ListedFile] | None:
    try:
        return storage.list_files(url)
    except Exception as fault:
        if getattr(fault, "problems", ())[:1] and fault.problems[0].reference == "no-such-directory":  # type: ignore[attr-defined]
            return None
        raise


def _aliases(files: Sequence[ListedFile]) -> dict[str, str]:
    """Find the files that only lead to another file of the same listing."""
    names = {file.name for file in files}
    aliases = {}
    for file in files:
        target = file.link_target
        if target is None and 0 < file.size_bytes <= _LONGEST_LINK_BYTES and file.name.endswith(".pt"):
            text = storage.read_small(file.identity.url)
            target = text.decode() if re.fullmatch(rb"[\x20-\x7e]+\.pt", text) else None
        if target is not None:
            to = target.rpartition("/")[2]
            if to in names and to != file.name:
                aliases[file.name] = to
    return aliases
