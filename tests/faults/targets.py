"""What must be in a target after all went well in the end, and a reader who trusts manifest.json alone."""

from __future__ import annotations

import json
import threading
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasks import storage
from tests.benchmarks.model_shape import ModelShape

# tests/running.py has this path as well, and torch: a child would import it before each run.
SOURCE = Path(__file__).parent.parent / "data" / "fixtures" / "mp2dp2-fp16-fused"
OPTIONS = {"mp": 2, "dp": 3}
"with the training state: six files"
WORDS = (str(SOURCE), "--mp", "2", "--dp", "3")
NUM_FILES = 6
# Large enough for pieces: 28 MiB, eight units, four pieces.
LARGE_SHAPE = ModelShape(layers=4, embed=512, inner=2048, heads=8, vocabulary=2048)
IN_PIECES = {"mp": 1, "dp": 1, "flat": False, "keep_state": False, "piece_bytes": 8 << 20}
_FOLDERS = ((), (".reshard",), *((".reshard", name) for name in ("temporary", "records", "plan.parquet", "lease")))


def published(target: Path | str) -> dict[str, bytes]:
    """Return all files that stand directly in the target, half written and hidden ones included."""
    url = str(target)
    return {file.name: storage.read_small(storage.join(url, file.name)) for file in storage.list_files(url)}


def leftovers(target: Path) -> list[str]:
    """Name all that killed writers left in a local target, wherever it is."""
    parts = {path for path in target.rglob("*") if path.name.endswith(".part")}
    temporary = target / ".reshard" / "temporary"
    return sorted(str(path) for path in parts | set(temporary.iterdir() if temporary.exists() else ()))


def records(target: Path | str) -> list[str]:
    """Name the records of finished files and pieces."""
    folder = storage.join(str(target), ".reshard", "records")
    there = storage.list_files(folder) if storage.exists(folder) else ()
    return [file.name for file in there if file.name.endswith(".json")]


def num_records(target: Path | str) -> int:
    return len(records(target))


def result_of(said: str) -> dict[str, Any]:
    """Find the result in what a run said, behind its messages."""
    found: dict[str, Any] = json.loads(said[said.index("\n{\n") if not said.startswith("{") else 0 :])
    return found


class Reader:
    """Looks for manifest.json in all folders below a root, all the time; what one names must be there and right."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="reader")
        self._known: dict[Path, bytes] = {}
        self.num_looks = 0
        self.num_seen = 0
        self.faults: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.003):
            self.num_looks += 1
            for manifest in self._root.glob("*/manifest.json"):
                self.look(manifest)

    def look(self, manifest: Path) -> None:
        try:
            text = manifest.read_bytes()
        except FileNotFoundError:
            return
        if self._known.get(manifest) == text:
            return
        wrong = _wrong_files(manifest.parent, text)
        # Whoever replaces a target removes the manifest first: then what was read goes with no manifest.
        if not manifest.exists() or manifest.read_bytes() != text:
            return
        self.num_seen += 1
        self._known[manifest] = text
        self.faults += wrong


def _wrong_files(folder: Path, manifest: bytes) -> list[str]:
    try:
        files = json.loads(manifest)["files"]
    except ValueError:
        return [f"{folder}: a torn manifest of {len(manifest)} bytes"]
    wrong = []
    for file in files:
        path = folder / file["name"]
        data = path.read_bytes() if path.exists() else b""
        if (len(data), f"{zlib.crc32(data):08x}") != (file["size_bytes"], file["crc32"]):
            wrong.append(f"{path}: {len(data)} bytes, CRC32 {zlib.crc32(data):08x}; the manifest says {file}")
    return wrong
