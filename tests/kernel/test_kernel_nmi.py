"""Probepoints in code that runs in a non-maskable interrupt: handlers run there, and each hit is accounted for."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from integration.support import await_true

if TYPE_CHECKING:
    from guests.guest import Guest

PROGRAM = """
name = vmlinux
modtype = kernel
major = 7
offset = vprintk_store
minor = 1
push r, arg1
log 1
exit
offset = vprintk_store
return = yes
minor = 2
exit
"""
"""The kernel says of each such interrupt that it does not know what it is for."""

COUNT = 10
UNKNOWN = "Uhhuh. NMI received for unknown reason"


def test_each_hit_in_an_nmi_is_accounted_for(guest: Guest) -> None:
    guest.put("/tmp/nmi.rpn", PROGRAM)
    options = ("--format", "csv", "--log", "tsc", "--overhead", "off", "-o", "/tmp/records.csv")
    process = guest.start_dprobes("run", "/tmp/nmi.rpn", *options)
    process.await_output("Ctrl-C ends the run")
    for number in range(1, COUNT + 1):
        guest.interrupt()
        await_true(lambda: guest.kernel_log.count(UNKNOWN) == number, f"interrupt {number}")  # noqa: B023
    process.signal(signal.SIGINT)
    said = process.completed().stderr
    row = r"^7,{n} +vprintk_store(?: \(return\))? +(\d+) +(\d+) +(\d+) "
    for minor in (1, 2):
        found = re.search(row.format(n=minor), said, re.MULTILINE)
        assert found is not None, said
        hits, records, lost = map(int, found.groups())
        missed = sum(map(int, re.findall(rf"^7,{minor}  (\d+) hits? of .* ran no handler: ", said, re.MULTILINE)))
        assert hits >= COUNT
        assert hits == records + lost + missed
        assert int(guest.run(f"grep -c '^7,{minor},' /tmp/records.csv").stdout) == records
    assert guest.get("/sys/kernel/debug/kprobes/list") == b""
    assert guest.get("/sys/kernel/tracing/enabled_functions") == b""
