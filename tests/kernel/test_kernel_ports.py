"""Watchpoints on I/O ports in the kernel of a guest: each access is a hit, and no other instruction."""

from __future__ import annotations

import json
import re
import signal
import struct
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

READS = 20
BRIDGE = "/sys/bus/pci/devices/0000:00:00.0/config"
ACCESSES = f"""
import os
bridge = os.open("{BRIDGE}", os.O_RDONLY)
for _ in range({READS}):
    for size, place in ((4, 0), (2, 2), (1, 0)):
        os.pread(bridge, size, place)
"""
"""
A read of the configuration of a PCI device selects a register by port 0xcf8, and reads 4, 2 or 1 bytes at 0xcfc or
after it (pci_conf1_read in arch/x86/pci/direct.c).
"""


def watchpoint(minor: int, address: str, access: str) -> str:
    return f"address = {address}\nwatchpoint = {access}\nminor = {minor}\npush r, edx\nlog 1\nexit\n"


def test_each_access_to_a_watched_port_is_a_hit(guest: Guest) -> None:
    """An access of 4 bytes at 0xcfc, and one of 2 at 0xcfe, touch the port 0xcfe; one of 1 at 0xcfc does not."""
    guest.put("/tmp/accesses.py", ACCESSES)
    program = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
    program += watchpoint(1, "0xcfe", "in") + watchpoint(2, "0xcf8:0xcfb", "out")
    guest.put("/tmp/program.rpn", program)
    options = ("--format", "json", "--overhead", "off", "-o", "/tmp/records.json")
    process = guest.start_dprobes("run", "/tmp/program.rpn", *options)
    process.await_output("active", 400)
    guest.run([str(PYTHON), "/tmp/accesses.py"])
    process.signal(signal.SIGINT)
    assert process.wait(400) == 0, process.stderr
    records = [json.loads(line) for line in guest.get("/tmp/records.json").decode().splitlines()]
    logged: dict[int, list[int]] = {1: [], 2: []}
    for record in records:
        (port,) = struct.unpack("<Q", bytes.fromhex(record["data"]))
        logged[record["minor"]].append(port & 0xFFFF)
    assert logged[1] == [0xCFC, 0xCFE] * READS
    assert logged[2] == [0xCF8] * 3 * READS
    rows = re.findall(r"^7,(\d)  .*?  (\d+)  +(\d+) ", process.stderr, re.MULTILINE)
    for minor, values in logged.items():
        assert sum(int(hits) for number, hits, _ in rows if int(number) == minor) == len(values)
    # The serial line of the early console is in code that cannot be traced.
    assert re.search(r"^7,2  left out .*\(notrace, .*io_serial_out,\d\+0x9", process.stderr, re.MULTILINE), (
        process.stderr
    )


WRITTEN = 100
SERIAL = f"""
import os, re, time
def sent():
    return int(re.search(r"^0: .* tx:([0-9]+)", open("/proc/tty/driver/serial").read(), re.MULTILINE)[1])
line, before = os.open("/dev/ttyS0", os.O_WRONLY | os.O_NOCTTY), sent()
for _ in range({WRITTEN}):
    os.write(line, b".")
import termios
termios.tcdrain(line)
print(sent() - before)
"""


@pytest.mark.each_kernel
def test_writes_to_the_serial_line_are_hits_in_a_wide_range(guest: Guest) -> None:
    """The driver counts the bytes that it has sent; each is one access of port 0x3f8."""
    guest.put("/tmp/serial.py", SERIAL)
    program = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
    program += watchpoint(1, "0xcfe", "in") + watchpoint(2, "0x3f8:0xcf8", "out")
    guest.put("/tmp/program.rpn", program)
    options = ("--format", "json", "--overhead", "off", "-o", "/tmp/records.json")
    process = guest.start_dprobes("run", "/tmp/program.rpn", *options)
    process.await_output("active", 400)
    sent = int(guest.run([str(PYTHON), "/tmp/serial.py"]).stdout)
    process.signal(signal.SIGINT)
    assert process.wait(400) == 0, process.stderr
    records = [json.loads(line) for line in guest.get("/tmp/records.json").decode().splitlines()]
    ports = [struct.unpack("<Q", bytes.fromhex(record["data"]))[0] & 0xFFFF for record in records]
    assert sent == WRITTEN
    assert ports.count(0x3F8) == sent, process.stderr
