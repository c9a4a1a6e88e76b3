"""`python -m pipeline.reshard SOURCE TARGET`: reshard a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.driver import run
from pipeline.messages import run_command, say, size
from pipeline.options import parse_request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    request = parse_request(arguments)

    def command() -> tuple[Mapping[str, Any], str]:
        result = run(request)
        return result, describe(result)

    return run_command(command, as_json=request.json)


def describe(result: Mapping[str, Any]) -> str:
    """Say in words what was done, or would be."""
    source, layout = result["source"], result["layout"]
    lines = [
        f"source: {source['files']} files, {size(source['bytes'])}, {source['tensors']} tensors, "
        f"mp{source['mp']} x dp{source['dp']}, {source['layout']}",
        f"target: {result['target']}: {len(result['files'])} files, "
        f"mp{layout['mp']} x dp{layout['dp']}, {layout['layout']}",
    ]
    if result.get("dry_run"):
        waste = result["span_bytes"] / max(result["bytes_needed"], 1)
        lines += [
            f"would read {size(result['span_bytes'])} for {size(result['bytes_needed'])} of tensors ({waste:.2f} x) "
            f"in about {result['planned_requests']} requests, and write about {size(result['bytes_to_write'])}; "
            f"planned in {result['plan_seconds']:.1f} s",
            "this very target is there already" if result["already_done"] else "nothing was written",
        ]
    elif result["already_done"]:
        lines.append("this very target was there already: nothing was written")
    else:
        seconds = result["write_seconds"]
        rate = result["bytes_written"] / max(seconds, 1e-9)
        lines += [
            f"read {size(result['bytes_read'])}, wrote {size(result['bytes_written'])} in {seconds:.2f} s "
            f"({size(rate)}/s) with {result['workers']} workers; worker peak {size(result['peak_memory_bytes'])}",
            f"done: manifest.json names {len(result['files'])} files",
        ]
    lines += [f"dropped: {name}" for name in result["dropped"]]
    for note in result["notes"]:
        say(f"note: {note}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
