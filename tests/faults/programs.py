"""Starts the commands and the programs of these tests as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ray = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**clean, **ray, "PYTHONPATH": str(ROOT), **more}


def start(*words: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(
    *words: object, text: str = "", timeout_seconds: float = 200, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT,
        env=environment(**more),
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def told_by(*words: object, text: str = "", **more: str) -> dict[str, Any]:
    """Run a program that prints JSON in its last line."""
    done = command(*words, text=text, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
