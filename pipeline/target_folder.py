"""What a run leaves in the target: lease, records, and last of all the manifest, whose presence is the commit."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from pipeline.lease import Lease
from pipeline.manifest import MANIFEST, described, differences, manifest_of, named_files
from pipeline.nodes import RUN
from pipeline.planning import Plan
from pipeline.work_folder import PLANS, WorkFolder, files_in
from tasks import storage
from tasks.errors import ErrorKind, Problem, ReshardError, error, raise_if
from tasks.family import some
from tasks.faults import reach
from tasks.formats.metaseq_names import parse
from tasks.write_target_shard import ShardResult

FAILURE = "failure.json"


class TargetFolder:
    """One target; knows its plan, so it can tell its own files from others'."""

    def __init__(self, url: str, plan: Plan) -> None:
        self.url = storage.normalise(url)
        self._plan = plan
        self._work = WorkFolder(self.url, plan.plan_id)

    def _check_folder(self) -> None:
        """Refuse a target that is a file."""
        if storage.is_local(self.url) and os.path.exists(self.url) and not os.path.isdir(self.url):
            hint = "TARGET is a folder: choose another name"
            raise error(ErrorKind.TARGET, "target-is-file", f"{self.url} is a file", hint=hint)

    @storage.limited
    def committed(self, *, overwrite: bool) -> Mapping[str, Any] | None:
        """Return the manifest where this very plan is done already; refuse a target that holds something else.

        With `overwrite` nothing is taken for done, and nothing but the source itself is in the way.
        """
        self._check_folder()
        self._check_apart()
        manifest = self._read(storage.join(self.url, MANIFEST))
        if overwrite:
            self._check_strangers(manifest)
            return None  # the bytes of what is there are held against their records, file by file
        if manifest is not None and manifest.get("plan_id") == self._plan.plan_id:
            raise_if(self._damaged_files(manifest))
            return manifest
        if manifest is not None:
            raise self._refusal("holds the result of another plan", *differences(self._plan, manifest))
        run = self._read(self._work.path(RUN))
        if run is not None and run.get("plan_id") != self._plan.plan_id:
            raise self._refusal("holds an unfinished run of another plan", *differences(self._plan, run))
        foreign = [] if run is not None else files_in(self.url)
        if foreign:
            raise self._refusal("is not empty", f"files: {some(foreign)}")
        return None

    def _check_apart(self) -> None:
        """Refuse to write where the source is: a target replaces files, and the source must stay whole."""
        own = _real(self.url)
        for identity in self._plan.source.files:
            # A link's folder and the folder of what it leads to: neither is written to.
            if own not in (_real(storage.parent(identity.url)), storage.parent(_real(identity.url))):
                continue
            raise error(
                ErrorKind.TARGET,
                "target-is-source",
                f"{self.url} is the folder of the source",
                context=("whatever else is asked for, the source's files are never replaced",),
                hint="choose another folder as target",
            )

    def _damaged_files(self, manifest: Mapping[str, Any]) -> list[Problem]:
        problems = []
        # A listing is never old, also on NFS, where a look for a single file may be.
        there = {file.name: file.size_bytes for file in storage.list_files(self.url)}
        for name, size_bytes in named_files(manifest).items():
            if there.get(name) != size_bytes:
                found = f"{there[name]} bytes" if name in there else "missing"
                url = storage.join(self.url, name)
                problems.append(_damaged(url, f"declared: {size_bytes} bytes; actual: {found}"))
        if len(named_files(manifest)) != len(self._plan.ranks()):
            problems.append(_damaged(storage.join(self.url, MANIFEST), "it does not name the files of its plan"))
        return problems

    def _check_strangers(self, manifest: Mapping[str, Any] | None) -> None:
        """Refuse a folder with files of others that would be taken for shards of the target."""
        run = self._read(self._work.path(RUN)) or {}
        known = {self._plan.file_name(mp, dp) for mp, dp in self._plan.ranks()}
        known |= {*named_files(manifest or {}), *(run["files"] if isinstance(run.get("files"), list) else ())}
        prefix = self._plan.target.options.prefix
        strangers = [
            name
            for name in files_in(self.url)
            if name not in known and (parsed := parse(name)) is not None and parsed.prefix == prefix
        ]
        if strangers:
            raise error(
                ErrorKind.TARGET,
                "strange-files",
                f"{self.url} holds files that no run of this tool wrote and that would be taken for shards of {prefix}",
                context=(f"files: {some(strangers)}",),
                hint="move them away, or choose another folder or --prefix; they are not replaced",
            )

    def _refusal(self, what: str, *facts: str) -> ReshardError:
        return error(
            ErrorKind.TARGET,
            "target-in-use",
            f"{self.url} {what}",
            context=facts,
            hint="choose another target, or pass --overwrite to replace what is there",
        )

    def _read(self, url: str) -> dict[str, Any] | None:
        if not storage.exists(url):
            return None
        try:
            content = json.loads(storage.read_small(url))
        except ValueError:
            content = None
        return content if isinstance(content, dict) else {"plan_id": "unreadable"}

    @storage.limited
    def open(self, *, overwrite: bool) -> None:
        """Make the folder ready to be written. From here on the old manifest no longer holds.

        Whoever held the lease before is dead, and what it left half written only takes room. Should a worker of it live
        on unseen, it publishes nothing of another plan: it looks into run.json first (`nodes.check_run`), and what it
        was about to publish at that moment is removed behind run.json.
        """
        self.clean_up(finished=False)
        self._work.make()
        fenced = self._is_fenced()
        if overwrite:
            self._forget_other_plans()
        run = {
            "plan_id": self._plan.plan_id,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "user": _user(),
            "started_seconds": time.time(),
            "source": {"files": [asdict(identity) for identity in self._plan.source.files]},
            "target": described(self._plan),
            "files": [self._plan.file_name(mp, dp) for mp, dp in self._plan.ranks()],
            "fenced": fenced,
        }
        self._write_run(run)
        storage.delete(self._work.path(FAILURE))
        reach("fence-begun", self.url)
        if fenced:
            self.clean_up(finished=False)
            return
        # A sleeping worker of the other plan could still publish: what cannot be removed is in the way, now or, where
        # this run is killed here, of the next one.
        for failure in self._work.remove_leftovers(finished=False):
            raise failure
        self._write_run({**run, "fenced": True})

    def _write_run(self, run: Mapping[str, Any]) -> None:
        storage.write_small(self._work.path(RUN), json.dumps(run, indent=1).encode())

    @storage.limited
    def clean_up(self, *, finished: bool) -> None:
        """Remove what killed attempts left half written. For the holder of the lease, while none of its nodes runs.

        `finished`: pieces of this plan's files are not needed any more. A failure is passed over: it costs room,
        nothing else.
        """
        with suppress(ReshardError, OSError):
            self._work.remove_leftovers(finished=finished)

    @storage.limited
    def clean_up_if_free(self, tell: Callable[[str], None]) -> None:
        """Do the same for a target that is done; where another run has the lease, it is that run's to do.

        What was left of the lease itself is removed by taking it: a kill may come while it was given back.
        """
        with suppress(ReshardError, OSError):
            if self._work.leftovers(finished=True) or storage.leftovers(self._work.path("lease")):
                with self.lease(tell):
                    self.clean_up(finished=True)

    def _is_fenced(self) -> bool:
        """Tell whether no worker of another plan can live: the last run was of this one, and had put an end to them."""
        run = self._read(self._work.path(RUN))
        return run is None or (run.get("plan_id") == self._plan.plan_id and bool(run.get("fenced", True)))

    def _forget_other_plans(self) -> None:
        """Remove what earlier runs wrote, by their own account, and this one does not replace; the manifest first.

        `run.json` names a run's files until the next run replaces it, so this may be interrupted and done again.
        """
        manifest = self._read(storage.join(self.url, MANIFEST)) or {}
        run = self._read(self._work.path(RUN)) or {}
        names = run.get("files")
        old = {*named_files(manifest), *(names if isinstance(names, list) else ())}
        storage.delete(storage.join(self.url, MANIFEST))
        reach("old-manifest-removed", self.url)
        mine = {self._plan.file_name(mp, dp) for mp, dp in self._plan.ranks()}
        for name in sorted(str(name) for name in old - mine):
            if name == storage.basename(name) and storage.exists(storage.join(self.url, name)):
                storage.delete(storage.join(self.url, name))
        self._work.forget_records(lambda name: name not in mine)
        plans = {f"model_part-{mp}.parquet" for mp in range(self._plan.target.options.mesh.mp)}
        for name in files_in(self._work.path(PLANS)):
            if name not in plans:
                storage.delete(self._work.path(PLANS, name))

    @storage.limited
    def forget(self, names: Collection[str]) -> None:
        """Forget that files, and pieces of them, were finished: what was read for them was wrong."""
        self._work.forget_records(lambda name: name in names)

    def lease(self, tell: Callable[[str], None]) -> Lease:
        """Return the claim to write here, to be entered before anything is written."""
        return Lease(self._work.path("lease"), self._plan.plan_id, tell=tell)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Leave a note of what ended the run, for whoever asks later."""
        try:
            yield
        except BaseException as fault:
            note = {"error": str(fault) or type(fault).__name__, "ended_seconds": time.time()}
            with suppress(ReshardError, OSError):
                storage.write_small(self._work.path(FAILURE), json.dumps(note, indent=1).encode(), durable=False)
            raise

    @storage.limited
    def commit(self, results: Sequence[ShardResult]) -> Mapping[str, Any]:
        """Check that every file is there, and write the manifest."""
        manifest = manifest_of(self._plan, results)
        raise_if(self._damaged_files(manifest))
        if not storage.create_only(storage.join(self.url, MANIFEST), json.dumps(manifest, indent=1).encode()):
            raise self._refusal("was finished by another run meanwhile", "a manifest")
        return manifest


def _damaged(url: str, fact: str) -> Problem:
    message, hint = f"{url} is not as its manifest says", "pass --overwrite to write the target again"
    return Problem(ErrorKind.TARGET, "target-damaged", message, (fact,), hint)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # containers run under ids that have no name


def _real(url: str) -> str:
    """Follow links, where there can be any."""
    return os.path.realpath(url) if storage.is_local(url) else url
