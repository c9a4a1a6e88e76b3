"""What manifest.json says: which files a target has, of which plan and which source; and how two plans differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pipeline.planning import Plan
from tasks import storage
from tasks.family import some
from tasks.write_target_shard import ShardResult

MANIFEST = "manifest.json"
TOOL = "reshard 0.1.0"


def manifest_of(plan: Plan, results: Sequence[ShardResult]) -> dict[str, Any]:
    """Make the manifest of a target whose files are all there."""
    return {
        "plan_id": plan.plan_id,
        "tool": TOOL,
        "versions": {name: version(name) for name in ("torch", "ray", "pyarrow", "numpy")},
        "source": {
            "prefix": plan.found.prefix,
            "mp": plan.source.mesh.mp,
            "dp": plan.source.mesh.dp,
            "layout": "flat" if plan.source.flat else "unflat",
            "files": [asdict(identity) for identity in plan.source.files],
        },
        "target": described(plan),
        "files": [
            {"name": storage.basename(result.url), "size_bytes": result.size_bytes, "crc32": f"{result.crc32:08x}"}
            for result in results
        ],
        "tensors": [
            {"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in plan.target_tensors()
        ],
        "dropped": list(plan.dropped),
        "notes": list(plan.notes),
    }


def described(plan: Plan) -> dict[str, Any]:
    """Say what a plan makes."""
    options = plan.target.options
    return {
        "format": "metaseq",
        "prefix": options.prefix,
        "mp": options.mesh.mp,
        "dp": options.mesh.dp,
        "layout": "flat" if options.flat else "unflat",
        "dtype": options.dtype or "keep",
        "qkv": str(options.projection),
        "state": "keep" if options.keep_state else "drop",
    }


def differences(plan: Plan, other: Mapping[str, Any]) -> list[str]:
    """Say what another plan wanted otherwise, as far as its manifest or its run tells."""
    facts = []
    if (there := other.get("target")) and there != described(plan):
        facts.append(f"there: {_in_words(there)}; asked for: {_in_words(described(plan))}")
    source = other.get("source")
    files = source.get("files") if isinstance(source, dict) else None
    before = {file.get("url"): file for file in files or () if isinstance(file, dict)}
    now = {identity.url: asdict(identity) for identity in plan.source.files}
    if before and before.keys() != now.keys():
        facts.append("the source is of other files")
    elif changed := [url for url, identity in now.items() if before and before[url] != identity]:
        facts.append(f"source files have changed since: {some(changed, 3)}")
    return facts or ["options differ that change the bytes"]


def _in_words(described: object) -> str:
    if not isinstance(described, dict):
        return "nothing known"
    return ", ".join(f"{key} {value}" for key, value in described.items() if key != "format")


def named_files(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return the files that a manifest names with their sizes; a manifest that is not ours names none."""
    files = manifest.get("files")
    return {
        file["name"]: file["size_bytes"]
        for file in (files if isinstance(files, list) else ())
        if isinstance(file, dict) and isinstance(file.get("name"), str) and isinstance(file.get("size_bytes"), int)
    }
