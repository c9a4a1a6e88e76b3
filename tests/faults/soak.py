"""Random kills, over and over: `python -m tests.faults.soak --runs 300 --seed 1`.

Each run reshards into a random layout and is killed (-9) at a random moment, then started again by the same command,
killed again, until one attempt ends by itself. Then the target must be that of an undisturbed run, byte for byte, with
nothing left over; and a reader who trusts manifest.json must never have been deceived. Some runs use a real Ray, whose
workers are killed instead of the driver. The same seed gives the same layouts and moments, not the same interleaving.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from cluster.session import ray_session
from pipeline import nodes
from pipeline.driver import run
from pipeline.options import Request
from tasks import storage
from tests.benchmarks.make_checkpoint import make_checkpoint
from tests.faults.children import Job
from tests.faults.targets import IN_PIECES, LARGE_SHAPE, SOURCE, Reader, leftovers, published
from tests.servers import S3Server, environment, seaweedfs

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"mp": 2, "dp": 3},
    {"mp": 1, "dp": 5},
    {"mp": 2, "dp": 16},
    {"mp": 1, "dp": 1, "flat": False},
    IN_PIECES,
)
# The source of the last one is made large enough for four pieces.
LARGE = len(LAYOUTS) - 1
# Some attempts go undisturbed, or the last files of a large target would take for ever.
_KILLED = 0.85
BUCKET = "soak"
_S3_SECONDS = 1.5  # more than a local run takes, most of it to import the client
_MOST_WORKER_KILLS = 3  # as often as one node is tried again


class Soak:
    """The counts, and what is needed to add to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._sources = {**dict.fromkeys(range(len(LAYOUTS)), SOURCE), LARGE: folder / "large"}
        self._random = random.Random(seed)
        self._expected: dict[int, dict[str, bytes]] = {}
        self._seconds: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def prepare(self) -> None:
        """Run each layout once without kills, after a first run that loads what is loaded once."""
        make_checkpoint(self._sources[LARGE], LARGE_SHAPE, 2, 4)
        for number, options in ((0, LAYOUTS[0]), *enumerate(LAYOUTS)):
            target = self._folder / "undisturbed"
            began = time.monotonic()
            code, said = Job(self._sources[number], target, self._folder / "scratch", options).run()
            if code != 0:
                raise RuntimeError(f"not even an undisturbed run ends well:\n{said}")
            self._seconds[number] = time.monotonic() - began
            self._expected[number] = published(target)
            remove(target)

    def kill_drivers(self, number: int, server: S3Server | None = None) -> None:
        """Do one run to its end, killing most of its attempts; into the store of a server, or into a folder."""
        layout = self._random.randrange(len(LAYOUTS))
        target, scratch = self._folder / "targets" / f"{number}", self._folder / "scratch"
        url = f"s3://{BUCKET}/{number}" if server else str(target)
        job = Job(self._sources[layout], url, scratch, LAYOUTS[layout], server.environment() if server else {})
        seconds = self._seconds[layout] + (_S3_SECONDS if server else 0)
        while True:
            moment = self._random.uniform(0, seconds) if self._random.random() < _KILLED else None
            child = job.start()
            child.process.join(moment)
            if child.process.exitcode is None:
                child.process.kill()
            code = child.wait()
            self.counts["attempts"] += 1
            if code == 0:
                break
            if code != -9:
                self.faults.append(f"run {number} ended with {code}: {child.said}")
                break
            self.counts["kills of drivers, into S3" if server else "kills of drivers"] += 1
            self._count_lost(target)
        self._judge(url, layout, number)
        shutil.rmtree(scratch)

    def kill_workers(self, number: int) -> None:
        """Do one run on the Ray of this process, killing workers; it has to end well by itself."""
        layout = self._random.choice([0, 1, 2, LARGE])
        target = self._folder / "targets" / f"{number}"
        moments = sorted(self._random.uniform(0, 0.4) for _ in range(_MOST_WORKER_KILLS))
        ended = threading.Event()
        killer = threading.Thread(target=self._kill_at, args=(moments, ended, random.Random(self._random.random())))
        killer.start()
        try:
            result = run(Request(str(self._sources[layout]), str(target), **LAYOUTS[layout]))
            self.counts["retries"] += result["retries"]
        except Exception as fault:  # noqa: BLE001  whatever it is, it is what we are here to count
            self.faults.append(f"run {number} failed: {fault}")
        finally:
            ended.set()
            killer.join()
        self._judge(str(target), layout, number)

    def _kill_at(self, moments: list[float], ended: threading.Event, choice: random.Random) -> None:
        began = time.monotonic()
        for moment in moments:
            if ended.wait(max(moment - (time.monotonic() - began), 0)):
                return
            family = psutil.Process().children(recursive=True)
            workers = [each for each in family if each.is_running() and is_worker(each)]
            if workers:
                choice.choice(workers).kill()
                self.counts["kills of workers"] += 1

    def _count_lost(self, target: Path) -> None:
        """Count what the kill made worthless: what stands in files without a record."""
        if not target.exists():
            return
        recorded = {path.name.removesuffix(".json") for path in (target / ".reshard" / "records").glob("*.pt.json")}
        lost = [Path(name).stat().st_size for name in leftovers(target) if Path(name).exists()]
        lost += [path.stat().st_size for path in target.glob("*.pt") if path.name not in recorded]
        pieces = [path.stat().st_blocks * 512 for path in (target / ".reshard" / "pieces").glob("*")]
        kept = [json.loads(path.read_text())["written"] for path in (target / ".reshard" / "records").glob("*.piece-*")]
        lost.append(max(sum(pieces) - sum(length for units in kept for _, _, length, _ in units), 0))
        self.counts["bytes redone"] += sum(lost)
        self.counts["kills with a file half written"] += any(lost)

    def _judge(self, target: str, layout: int, number: int) -> None:
        self.counts["runs"] += 1
        there, expected = published(target) if storage.exists(target) else {}, self._expected[layout]
        self.counts["bytes of the targets"] += sum(map(len, there.values()))
        damaged = [name for name in there.keys() | expected.keys() if there.get(name) != expected.get(name)]
        work = storage.join(target, ".reshard")
        left = [*map(str, storage.leftovers(target)), *(file for file in everything(work) if is_left_over(file))]
        self.counts["files damaged"] += len(damaged)
        self.counts["files left over"] += len(left)
        if damaged or left:
            self.faults.append(f"run {number} into {LAYOUTS[layout]}: damaged {damaged}, left over {left}")
        if storage.is_local(target):
            remove(Path(target))


def everything(work: str) -> list[str]:
    """List what the run keeps for itself, by the names of its folders."""
    folders = [storage.join(work, name) for name in ("temporary", "records", "pieces", "lease")]
    there = [folder for folder in folders if storage.exists(folder)]
    return [storage.join(folder, file.name) for folder in there for file in storage.list_files(folder)]


def is_left_over(url: str) -> bool:
    return "/temporary/" in url or "/pieces/" in url or ".piece-" in url or url.endswith(".part")


def is_worker(process: Any) -> bool:
    """Tell whether a process works on a node: Ray's agents have such names as well, and die with their machine."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(words.startswith(f"ray::{kind}") for kind in nodes.FUNCTIONS)


def remove(target: Path) -> None:
    """Remove a target, its manifest first: a reader may be looking."""
    (target / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)


@contextmanager
def store(folder: Path) -> Iterator[S3Server]:
    """Run a server with an empty bucket, for this process as well."""
    with seaweedfs(folder) as server, environment(**server.environment()):
        with server.client() as client:
            client.create_bucket(Bucket=BUCKET)
        yield server


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Kill runs at random moments.")
    parser.add_argument("--runs", type=int, default=100, help="with kills of the driver (default: %(default)s)")
    parser.add_argument("--ray-runs", type=int, default=5, help="with kills of Ray workers (default: %(default)s)")
    parser.add_argument("--s3-runs", type=int, default=0, help="into a real S3 server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of layouts and moments (default: %(default)s)")
    words = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), words.seed)
        soak.prepare()
        (Path(folder) / "targets").mkdir()
        with Reader(Path(folder) / "targets") as reader:
            for number in range(words.runs):
                soak.kill_drivers(number)
                if (number + 1) % 50 == 0:
                    kills = soak.counts["kills of drivers"]
                    print(f"{number + 1} of {words.runs} runs, {kills} kills, {len(soak.faults)} faults", flush=True)
            if words.s3_runs:
                with store(Path(folder) / "store") as server:
                    for number in range(words.s3_runs):
                        soak.kill_drivers(number, server)
            if words.ray_runs:
                with ray_session("local", num_cpus=2, object_store_memory_bytes=80 << 20):
                    for number in range(words.runs, words.runs + words.ray_runs):
                        soak.kill_workers(number)
    for fault in [*soak.faults, *reader.faults]:
        print(fault, file=sys.stderr)
    told = {**soak.counts, "manifests read": reader.num_seen, "readers deceived": len(reader.faults)}
    print(json.dumps({"seed": words.seed, **told, "seconds": round(time.monotonic() - began)}, indent=1))
    return 1 if soak.faults or reader.faults else 0


if __name__ == "__main__":
    sys.exit(main())
