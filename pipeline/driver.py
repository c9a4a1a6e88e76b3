"""Runs a request: finds the source, plans, lets the cluster do the work, and commits."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from cluster.dag import Node
from cluster.failures import RetryPolicy
from cluster.loop import Execution
from cluster.resources import TaskResources, check_capacity, default_resources, parse_resource_options
from cluster.session import Session, Unreachable, ray_prints_plainly, ray_session
from pipeline import nodes
from pipeline.discovery import discover
from pipeline.messages import Progress, say, size
from pipeline.options import Request, check_request
from pipeline.planning import Plan, index_here, make_plan
from pipeline.target_folder import TargetFolder
from tasks.checkpoint import ShardIndex
from tasks.checksums import check_records
from tasks.errors import ErrorKind, Problem, error, raise_if
from tasks.faults import reach
from tasks.formats.metaseq_files import Found
from tasks.plan import source_copies
from tasks.reader_pool import ReaderPool
from tasks.regroup_mp_slice import SliceSummary, regroup_mp_slice
from tasks.storage import TransientStorageError, basename, limited
from tasks.write_target_shard import ShardResult

_PACKAGES = tuple(str(Path(__file__).resolve().parent.parent / name) for name in ("pipeline", "tasks", "cluster"))

# A worker leased for one task takes the next at once only if it is submitted already.
_IN_FLIGHT_PER_WORKER = 3

# Writing files side by side leaves less room for each: for a few bytes it does not pay.
_WORTH_SHARING = 1.05


class Executor(Protocol):
    """What the driver needs of an execution: Ray's, or the one in this process."""

    def run(self, nodes: Sequence[Node]) -> dict[str, object]: ...

    def share(self, value: object) -> Any: ...

    def release(self, node_ids: Sequence[str]) -> None: ...


def run(request: Request) -> Mapping[str, Any]:
    """Carry out a request; return the result for people's and machines' eyes."""
    check_request(request)
    began = time.monotonic()
    found = limited(discover)(request.source, request.checkpoint)
    if request.dry_run:
        return _dry_run(request, found, began)
    if any(url.startswith("memory:") for url in (request.source, request.target)):
        hint = "use a folder or an object store"
        raise error(ErrorKind.USAGE, "memory-url", "memory:// is of one process, and workers are others", hint=hint)
    resources = _resources(request)
    progress = Progress()
    stop = threading.Event()
    with _stopping(stop), _session(request.address) as session:
        _listen(stop)  # again: Ray has replaced the handler
        # All kinds ask the same, so one message says it.
        raise_if(nodes.capacity_problems(check_capacity(resources, session.nodes())[:1]))
        workers = sum(session.num_workers(each) for each in set(resources.values()))
        with Execution(
            nodes.FUNCTIONS,
            resources,
            max_in_flight=max(workers, 1) * _IN_FLIGHT_PER_WORKER,
            retry=RetryPolicy((TransientStorageError,)),
            observe=progress.observe,
            stop=stop,
        ) as execution:
            started = time.monotonic()
            result = execute(request, found, execution, progress)
            return {**result, "workers": workers, "retries": progress.retries, "start_seconds": started - began}


@contextmanager
def _session(address: str | None) -> Iterator[Session]:
    """Start or join Ray; the code goes to the workers of a cluster that is joined from outside of a Ray job."""
    try:
        with ray_prints_plainly(), ray_session(address, packages=_PACKAGES) as session:
            yield session
    except Unreachable as fault:
        raise error(
            ErrorKind.PLAN,
            "no-cluster",
            f"the Ray cluster cannot be joined: {fault}",
            hint="check --address and RAY_ADDRESS; without both a local Ray is started",
        ) from fault


def _resources(request: Request) -> dict[str, TaskResources]:
    try:
        asked = parse_resource_options(request.resources)
    except ValueError as fault:
        raise error(ErrorKind.USAGE, "bad-resources", f"--resources: {fault}") from fault
    return default_resources(
        request.memory_bytes, num_cpus=asked.num_cpus, num_gpus=asked.num_gpus, custom=asked.custom
    )


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM (as `ray job stop` sends) end the run in order, from here until what was started has been ended."""
    before = signal.getsignal(signal.SIGTERM)
    _listen(stop)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _listen(stop: threading.Event) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())


def execute(request: Request, found: Found, execution: Executor, progress: Progress) -> dict[str, Any]:
    """Run the three kinds of nodes in turn; between them, everything found wrong is raised at once."""
    times: dict[str, float] = {}
    with _timed(times, "unflatten_seconds"):
        first = nodes.unflatten_nodes(found.files)
        progress.begin("indexing source files", len(first))
        indexes = [index for index in execution.run(first).values() if isinstance(index, ShardIndex)]
        plan = make_plan(request, found, indexes)
    folder = TargetFolder(request.target, plan)
    if folder.committed(overwrite=request.overwrite) is not None:
        folder.clean_up_if_free(say)
        say(f"{folder.url} holds the result of this very plan already: nothing to do")
        return _result(plan, folder.url, [], [], times, already_done=True)
    with _timed(times, "regroup_seconds"):
        source, target = execution.share(plan.source), execution.share(plan.target)
        second = nodes.regroup_nodes(plan, source, target, request.replica_part)
        progress.begin("planning model-parallel parts", len(second))
        summaries = [item for item in execution.run(second).values() if isinstance(item, SliceSummary)]
        raise_if(problem for summary in summaries for problem in summary.problems)
    reach("planned", folder.url)
    with folder.lease(say) as lease:
        reach("lease-taken", folder.url)
        # Whoever held the lease until now may have finished this very plan.
        if folder.committed(overwrite=request.overwrite) is not None:
            return _result(plan, folder.url, summaries, [], times, already_done=True)
        folder.open(overwrite=request.overwrite)
        reach("folder-opened", folder.url)
        with _timed(times, "write_seconds"), folder.noting_failure():
            third = nodes.write_nodes(
                plan, source, target, folder.url, request, share_rows=_shares_rows(plan, request, summaries)
            )
            progress.begin("writing target files", len(third))
            results = [item for item in execution.run(third).values() if isinstance(item, ShardResult)]
            proven = _check_source(plan, summaries, results, folder)
        kept = sum(result.kept for result in results)
        if kept:
            say(f"{kept} of {len(results)} files were finished already and are still whole")
        if pieces_bytes := sum(result.kept_bytes for result in results if not result.kept):
            say(f"{size(pieces_bytes)} of unfinished files were written already and are still whole")
        lease.check()
        with folder.noting_failure():
            folder.clean_up(finished=True)
            reach("files-finished", folder.url)
            folder.commit(sorted(results, key=lambda result: (result.mp, result.dp)))
        reach("manifest-written", folder.url)
    told = _result(plan, folder.url, summaries, [result for result in results if not result.kept], times)
    return {**told, "source_records_proven": proven, "kept": kept}


def _check_source(
    plan: Plan, summaries: Sequence[SliceSummary], results: Sequence[ShardResult], folder: TargetFolder
) -> int:
    """Hold what was read against the checksums in the source's files; return how many storages are proven whole."""
    read: list[SliceSummary | ShardResult] = [*summaries, *results]
    ranges = (item for each in read for item in each.read_ranges)
    with ReaderPool(plan.source.files) as readers:
        proven, damaged = limited(check_records)(plan.records, ranges, readers.read)
    if damaged:
        files = {record.file for record in damaged}
        # A file that is mended may look as before, its time of change included: then records must not stand in the way.
        folder.forget([basename(each.url) for each in results if any(item[0] in files for item in each.read_ranges)])
    raise_if(
        Problem(
            ErrorKind.SOURCE,
            "source-damaged",
            f"{plan.source.files[record.file].url}: the bytes of {record.tensor} are not those that were saved",
            (
                f"declared: CRC32 {record.crc32:08x} of {record.size_bytes} bytes at offset {record.offset_bytes}",
                "actual: another",
            ),
            "copy the file again from where it was saved, then run the command again with --overwrite",
        )
        for record in damaged
    )
    return proven


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    times[name] = round(time.monotonic() - began, 4)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause Python's search for garbage: of a thousand files, millions of objects stay (8 s, not 10)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_garbage()
def _dry_run(request: Request, found: Found, began: float) -> Mapping[str, Any]:
    """Plan in this process what a run would plan on workers; no tensor bytes are read, nothing is written."""
    plan = make_plan(request, found, index_here(found.files))
    copies = source_copies(plan.source)
    summaries = [
        regroup_mp_slice(plan.source, plan.target, mp, request.replica_part, copies=copies, compare=False)[0]
        for mp in range(plan.target.options.mesh.mp)
    ]
    raise_if(problem for summary in summaries for problem in summary.problems)
    folder = TargetFolder(request.target, plan)
    done = folder.committed(overwrite=request.overwrite) is not None
    times = {"plan_seconds": round(time.monotonic() - began, 3)}
    result = _result(plan, folder.url, summaries, [], times, already_done=done)
    if _shares_rows(plan, request, summaries):
        spans, needed = result["span_bytes"], result["bytes_needed"]
        once = needed + round((spans - needed) * plan.still_repeated(request.target, request.memory_bytes))
        requests = -(-result["planned_requests"] * once // spans)
        result |= {"span_bytes": once, "planned_requests": requests}
    return {**result, "dry_run": True, "bytes_to_write": plan.bytes_to_write()}


def _shares_rows(plan: Plan, request: Request, summaries: Sequence[SliceSummary]) -> bool:
    """Tell whether files are to be written side by side, because each alone would read what others need."""
    spans, needed = (sum(each) for each in zip(*((s.span_bytes, s.bytes_needed) for s in summaries), strict=True))
    return spans > _WORTH_SHARING * needed and plan.still_repeated(request.target, request.memory_bytes) < 1


def _result(
    plan: Plan,
    url: str,
    summaries: Sequence[SliceSummary],
    written: Sequence[ShardResult],
    times: Mapping[str, float],
    *,
    already_done: bool = False,
) -> dict[str, Any]:
    mesh, options = plan.source.mesh, plan.target.options
    return {
        "exit_code": 0,
        "target": url,
        "plan_id": plan.plan_id,
        "already_done": already_done,
        "source": {
            "mp": mesh.mp,
            "dp": mesh.dp,
            "layout": "flat" if plan.source.flat else "unflat",
            "files": len(plan.source.files),
            "bytes": sum(identity.size_bytes for identity in plan.source.files),
            "tensors": len(plan.target_tensors()),
        },
        "layout": {"mp": options.mesh.mp, "dp": options.mesh.dp, "layout": "flat" if options.flat else "unflat"},
        "files": [plan.file_name(mp, dp) for mp, dp in plan.ranks()],
        "segments": sum(summary.num_segments for summary in summaries),
        "bytes_needed": sum(summary.bytes_needed for summary in summaries),
        "span_bytes": sum(summary.span_bytes for summary in summaries),
        "planned_requests": sum(summary.num_requests for summary in summaries),
        "bytes_read": sum(result.bytes_read for result in written),
        "bytes_written": sum(result.size_bytes - result.kept_bytes for result in written),
        "requests": sum(result.num_requests for result in written),
        "peak_memory_bytes": max((result.peak_memory_bytes for result in written), default=0),
        **times,
        "dropped": list(plan.dropped),
        "notes": list(plan.notes),
    }
