"""A probepoint on a lock that the kernel takes all the time leaves the machine usable, and the run says what it did."""

from __future__ import annotations

import contextlib
import re
from signal import SIGINT
from typing import TYPE_CHECKING

from guests.guest import GuestError

if TYPE_CHECKING:
    from guests.guest import Guest

LOCK = """name = vmlinux
modtype = kernel
vars = 1
jmpmax = 5000
offset = _raw_spin_lock
minor = 1
push 5000
again:
push 7
push 9
mul
pop lv, 0
loop again
push r, arg0
push pid
push time
push task
log 4
exit
"""
"""A handler that takes much more than its trap, so that it helps to run it less often, however fast the machine is."""

FILES = 20
LOAD = f"""
    mkdir /tmp/load
    for n in $(seq {FILES}); do
        head -c 20000 /dev/zero | cat > /tmp/load/$n
    done
    cat /tmp/load/* | wc -c
    rm -r /tmp/load
"""
"""Processes, pipes and files take locks all the time; it prints how many bytes there were."""

RESULT = f"{20000 * FILES}\n"
PRESSURE = "until [ -e /tmp/enough ]; do (:) & (:) & (:) & wait; done"
"""Processes that do nothing else take five times as many locks in a second: much more than is allowed."""


def test_a_probepoint_on_a_spin_lock_leaves_the_machine_usable(guest: Guest) -> None:
    guest.put("/tmp/lock.rpn", LOCK)
    run = guest.start_dprobes("run", "/tmp/lock.rpn", "--overhead", "5%", "-o", "/dev/null")
    run.await_output("Ctrl-C ends the run")
    pressure = guest.start(PRESSURE)
    load = guest.start(f"while {LOAD} [ ! -e /tmp/enough ]; do :; done")
    run.await_output("5% are allowed")
    guest.put("/tmp/enough", "")
    pressure.completed()
    results = load.completed().stdout
    assert results == RESULT * (len(results) // len(RESULT)) != ""
    assert guest.run(LOAD).stdout == RESULT
    with contextlib.suppress(GuestError):  # if its only probepoint has been disabled, it has ended
        run.signal(SIGINT)
    said = run.completed().stderr
    thinned = (
        r": \d+ hits a second took [\d.]+% of a CPU, where 5% are allowed: its handler runs at one hit of \d+ from"
    )
    disabled = r" is disabled: \d+ hits a second took [\d.]+% of a CPU, where 5% are allowed$"
    assert re.search(rf"^dprobes: warning: 0,1 at _raw_spin_lock({thinned}|{disabled})", said, re.MULTILINE), said
    row = re.search(r"^0,1 +_raw_spin_lock +(\d+) +(\d+) +(\d+) ", said, re.MULTILINE)
    assert row is not None, said
    hits, records, lost = map(int, row.groups())
    unhandled = re.findall(r"^0,1  (\d+) hits? of _raw_spin_lock ran no handler: ", said, re.MULTILINE)
    assert hits == records + lost + sum(map(int, unhandled))
    assert records > 0
