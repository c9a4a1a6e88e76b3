"""Ray's own monitor kills a worker that takes too much: the node is tried once more with less."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cluster.little_memory import GIBIBYTE, memory_bytes


@pytest.mark.skipif(memory_bytes("MemAvailable") < 8 * GIBIBYTE, reason="the node to be killed takes 4 GiB")
def test_a_node_that_takes_too_much_runs_once_more_with_less() -> None:
    words = [sys.executable, "-m", "tests.cluster.little_memory"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"enough": str(1 << 20), "too little": "OutOfMemory"}
