"""Probepoints on every function of a file system and of the network at work: nothing breaks, no hit is lost unsaid."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

PROGRAM = "name = vmlinux\nmodtype = kernel\nmajor = 7\nlogmax = 64\n"

FILES = """
import hashlib, os, random, sys, time
os.chdir("/tmp/disk")
chance, rounds, until = random.Random(13), 0, time.monotonic() + float(sys.argv[1])
contents = {}
while time.monotonic() < until or rounds < 3:
    name, data = f"file{chance.randrange(20)}", chance.randbytes(chance.randrange(60_000))
    with open("new", "wb") as file:
        file.write(data[:1000])
        file.truncate(len(data))
        os.pwrite(file.fileno(), data, 0)
        os.fsync(file.fileno())
    os.rename("new", name)
    contents[name] = hashlib.sha256(data).digest()
    os.makedirs("a/b/c", exist_ok=True)
    os.symlink(f"../{name}", "a/link"), os.setxattr(name, "user.round", str(rounds).encode())
    assert hashlib.sha256(open("a/link", "rb").read()).digest() == contents[name]
    assert os.getxattr(name, "user.round") == str(rounds).encode()
    os.remove("a/link"), os.removedirs("a/b/c")
    if chance.random() < 0.2:
        gone = chance.choice(list(contents))
        os.remove(gone), contents.pop(gone)
    rounds += 1
for name, digest in contents.items():
    assert hashlib.sha256(open(name, "rb").read()).digest() == digest, name
print(rounds)
"""
CONNECTIONS = """
import hashlib, random, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
here, there = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
there.bind(("127.0.0.1", 0)), there.settimeout(30)
chance, rounds, until = random.Random(13), 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < until or rounds < 3:
    data = chance.randbytes(chance.randrange(1, 60_000))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    client.sendall(data), client.shutdown(socket.SHUT_WR)
    received = bytearray()
    while part := server.recv(100_000):
        received += part
    assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
    client.close(), server.close()
    here.sendto(data[:9000], there.getsockname())
    assert there.recv(100_000) == data[:9000]
    rounds += 1
print(rounds)
"""
CROWDS = {
    "ext4": (FILES, ("ext4_*", "jbd2_*"), ("ext4_da_*", "ext4_mb_*", "ext4_ext_*")),
    "network": (
        CONNECTIONS,
        ("tcp_*", "udp_*", "ip_*", "inet_*", "skb_*", "sk_*", "sock_*", "dev_*", "__skb*", "netif_*", "napi_*"),
        ("tcp_rcv_*", "udp_send*", "ip_local_*", "skb_release_*"),
    ),
}
"""What works; patterns of all functions, for a kernel with links to many; patterns of some, for one without."""

SECONDS = [2, pytest.param(60, marks=[pytest.mark.torture, pytest.mark.machine(memory=4000)])]


def make_file_system(guest: Guest) -> None:
    guest.load_module("brd", "rd_nr=1 rd_size=40960")
    guest.run("mkfs.ext4 -q /dev/ram0 && mkdir /tmp/disk && mount -t ext4 /dev/ram0 /tmp/disk")


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_every_hit_is_accounted_for(guest: Guest, crowd: str, seconds: int) -> None:
    work, all_functions, some_functions = CROWDS[crowd]
    if crowd == "ext4":
        make_file_system(guest)
    patterns = some_functions if guest.machine.kernel == "6.1" else all_functions
    handler = "push r, arg0\nlog 1\nexit\n"
    program = "".join(f'offset = "{pattern}"\nminor = {n}\n{handler}' for n, pattern in enumerate(patterns, 1))
    guest.put("/tmp/work.py", work)
    guest.put("/tmp/program.rpn", PROGRAM + program)
    # Those of a minute are too many for the guest's memory, but in a trace file.
    output = "/tmp/records.csv" if seconds < 10 else "/tmp/records.dpt"
    options = ("--format", "csv") if seconds < 10 else ()
    options = (*options, "--rows", "100000", "--log", "tsc", "--overhead", "off", "-o", output)
    process = guest.start_dprobes("run", "/tmp/program.rpn", *options)
    process.await_output("Ctrl-C ends the run", 120)
    assert int(guest.run([str(PYTHON), "/tmp/work.py", str(seconds)], timeout=120 + 5 * seconds).stdout) >= 3
    process.signal(signal.SIGINT)
    assert process.wait(120 + 30 * seconds) == 0, process.stderr
    counts = totals(process.stderr)
    assert counts["hits"] > 500
    assert counts["hits"] == counts["records"] + counts["lost"] + counts["missed"]
    if seconds < 10:
        assert int(guest.run(f"grep -c '^7,' {output}", timeout=240).stdout) == counts["records"]
    else:
        counted = guest.dprobes("log", "--count", "major", output, timeout=600).stdout
        assert re.findall(r"^ *7 +(\d+) ", counted, re.MULTILINE) == [str(counts["records"])], counted[:500]
    assert guest.get("/sys/kernel/debug/kprobes/list") == b""
    assert guest.get("/sys/kernel/tracing/enabled_functions") == b""
    if crowd == "ext4":
        guest.run("umount /tmp/disk")
        assert "error" not in guest.run("dmesg").stdout.lower().partition("ext4-fs")[2]


def totals(summary: str) -> dict[str, int]:
    """Return the sums of some columns of a summary, and of the hits that ran no handler."""
    rows = re.findall(r"^7,\d+ +\S+ +(\d+) +(\d+) +(\d+) ", summary, re.MULTILINE)
    sums = [sum(int(number) for number in column) for column in zip(*rows, strict=True)]
    missed = re.findall(r"^7,\d+  (\d+) hits? of \S+ ran no handler: ", summary, re.MULTILINE)
    return dict(zip(("hits", "records", "lost"), sums, strict=True)) | {"missed": sum(map(int, missed))}
