"""What a process takes after buffers of many sizes came and went beside small objects, in many threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import numpy as np
from tasks.memory import _status_bytes, give_memory_back

if sys.argv[1] == "give back" and not give_memory_back():
    sys.exit("not possible")
kept = []

def work(number):
    np.ones(8 << 20, np.uint8)
    for size in (200, 300, 500, 700, 900):
        buffer = np.ones(size << 10, np.uint8)
        kept.append([bytes(400) for _ in range(20)])
        del buffer

before = _status_bytes("VmRSS")
for number in range(64):
    thread = threading.Thread(target=work, args=(number,))
    thread.start()
    thread.join()
print(_status_bytes("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_buffers_that_were_freed_take_no_memory() -> None:
    taken = {
        how: int(
            subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True).stdout
        )
        for how in ("keep", "give back")
    }
    assert taken["give back"] < 8 << 20
    assert taken["give back"] <= taken["keep"]
