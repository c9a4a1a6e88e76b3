"""Runs the tests of test_nfs.py in a guest, User-Mode Linux: `python -m tests.nfs.guest 4.2`. Needs root.

Most kernels of test machines have no NFS, and cannot load it. The guest sees this machine's files, read-only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_MEMORY = "2500m"
_TIMEOUT_SECONDS = 420.0
_NOISE = re.compile(r"mmapper_init|ubd device|udp6|tcp6|SELinux|^reboot:|^sysrq|^random:")
_PACKAGES = "user-mode-linux nfs-kernel-server kmod iproute2"


def why_not() -> str:
    """Say why no guest can run here; empty if one can."""
    if os.getuid() != 0:
        return "it needs root"
    missing = [name for name in ("linux.uml", "rpc.nfsd", "modprobe", "ip") if shutil.which(name) is None]
    return f"{', '.join(missing)} missing: apt-get install --no-install-recommends {_PACKAGES}" if missing else ""


def run(version: str, words: Sequence[str]) -> int:
    """Run pytest in a guest whose NFS has this version; return its exit code."""
    # Where the guest, which has another /mnt, finds it as well.
    with tempfile.TemporaryDirectory(prefix="nfs-", dir="/var/tmp") as folder:
        command = Path(folder, "command.sh")
        command.write_text(
            f"cd {shlex.quote(str(ROOT))}\nexport RESHARD_NFS_VERSION={version}\n"
            f"exec {shlex.join([sys.executable, *words])}\n"
        )
        kernel = ["linux.uml", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"mem={_MEMORY}", "quiet"]
        kernel += [f"init={Path(__file__).with_name('init.sh')}", f"nfs_version={version}", f"nfs_command={command}"]
        kernel += ["con=null", "con0=null,fd:1", "ssl=null"]
        with subprocess.Popen(
            kernel,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": "/dev/shm"},
            start_new_session=True,
        ) as guest:
            try:
                said, _ = guest.communicate(timeout=_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(guest.pid, 9)
                said, _ = guest.communicate()
    lines = [line for line in said.splitlines() if not _NOISE.search(line)]
    sys.stdout.write("\n".join(lines) + "\n")
    ended = re.search(r"^ended with (\d+)", said, re.MULTILINE)
    return int(ended[1]) if ended else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nfs.guest", description=__doc__)
    parser.add_argument("version", choices=("4.2", "4.1", "4.0", "3"))
    words, more = parser.parse_known_args()
    if reason := why_not():
        sys.stdout.write(f"SKIPPED: NFS {words.version} was not tested: {reason}\n")
        return 0
    pytest = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "tests/nfs/test_nfs.py", *more]
    return run(words.version, pytest)


if __name__ == "__main__":
    sys.exit(main())
