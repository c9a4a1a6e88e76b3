"""Ceph's S3 gateway with all that it needs, on the loopback address: an older store that differs from SeaweedFS.

It ignores conditional completions and checksums other than MD5, and gives no ETag when an upload is completed. The
programs are Debian's (radosgw, ceph-mon, ceph-osd); they run as root only, with their data in memory.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.servers import S3Server, free_ports, stop_process

_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "monmaptool", "radosgw-admin")
_START_SECONDS = 90.0

# Without the first group, the gateway waits for a secure connection that nobody offers; without the second, each pool
# that it makes costs a second.
_SETTINGS = """[global]
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms client mode = crc
ms cluster mode = crc
ms service mode = crc
ms mon cluster mode = crc
ms mon service mode = crc

paxos propose interval = 0.02
paxos min wait = 0.01
mon tick interval = 1

fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0,v1:127.0.0.1:{old_mon_port}/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
crash dir =
mon data avail crit = 1
mon data avail warn = 2
mon allow pool size one = true
mon max pg per osd = 1000
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush update on start = false
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd mclock skip benchmark = true
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dynamic resharding = false
rgw override bucket index max shards = 1
"""


def missing_programs() -> list[str]:
    """Name what is not installed of what the gateway needs."""
    return [program for program in _PROGRAMS if shutil.which(program) is None]


@contextlib.contextmanager
def ceph_gateway(folder: Path) -> Iterator[S3Server]:
    """Run monitor, storage and gateway; yield the address and keys."""
    port, mon_port, old_mon_port = free_ports(3)
    settings = folder / "ceph.conf"
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    numbers = {"port": port, "mon_port": mon_port, "old_mon_port": old_mon_port}
    settings.write_text(_SETTINGS.format(fsid=uuid.uuid4(), folder=folder, **numbers))
    server = S3Server(f"http://127.0.0.1:{port}")
    with contextlib.ExitStack() as running:

        def start(*words: str) -> None:
            log = running.enter_context((folder / f"{words[0]}.out").open("wb"))
            process = subprocess.Popen(
                [*words, "-c", str(settings), "-f"], stdout=log, stderr=log, start_new_session=True
            )
            running.callback(stop_process, process)

        def do(*words: str) -> str:
            # `ceph` opens a file of its own in the working directory when it fails.
            done = subprocess.run(
                [*words, "-c", str(settings)], check=False, capture_output=True, text=True, cwd=folder, timeout=60
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(words)} failed: {done.stdout}{done.stderr}")
            return done.stdout

        def wait_for(*words: str, told: str = "") -> None:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                try:
                    if told in do(*words):
                        return
                except RuntimeError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.1)

        fsid = settings.read_text().partition("fsid = ")[2].split()[0]
        addresses = f"[v2:127.0.0.1:{mon_port},v1:127.0.0.1:{old_mon_port}]"
        do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, str(folder / "monmap"))
        do("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(folder / "monmap"))
        start("ceph-mon", "-i", "a")
        wait_for("ceph", "--connect-timeout", "2", "mon", "stat")
        disk = str(uuid.uuid4())
        do("ceph", "osd", "new", disk)
        do("ceph", "osd", "crush", "add-bucket", "here", "host")
        do("ceph", "osd", "crush", "move", "here", "root=default")
        do("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=here")
        do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        wait_for("ceph", "osd", "stat", told="1 up")
        start("radosgw", "-n", "client.rgw.a")
        user = (
            "--uid=test",
            "--display-name=test",
            f"--access-key={server.access_key}",
            f"--secret-key={server.secret_key}",
        )
        wait_for("radosgw-admin", "-n", "client.rgw.a", "user", "create", *user)
        _wait_until_it_answers(port)
        yield server


def _wait_until_it_answers(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
            return
        if time.monotonic() > deadline:
            raise RuntimeError("the gateway does not listen")
        time.sleep(0.1)
