"""Probepoints on what handlers themselves call: nothing breaks, and hits during a handler are missed ones."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

KERNEL = "name = vmlinux\nmodtype = kernel\nmajor = 7\nvars = 1\ncvars = 1\nlogmax = 200\n"

HANDLER = """
inc lv, 0
inc cv, 0
push r, esp
push mem, u64
push pid
push time
push task
log 4
push 16
push linux_banner
log str
exit
"""
"""It reads memory of the kernel, asks for what helpers give, and writes to the ring."""

PATTERNS = (
    "copy_from_kernel_*", "bpf_ringbuf_*", "__bpf_ringbuf_*", "bpf_get_*", "*ktime_get*", "array_map_lookup*",
    "*htab_map_lookup*", "perf_output_*", "bpf_map_lookup*", "vfs_rea*",
)  # fmt: skip
FORBIDDEN_PATTERNS = ("bpf_probe_read_*", "trace_call_*", "kprobe_perf_*")

SINGLE = (
    "bpf_probe_read_kernel", "trace_call_bpf", "irq_work_queue", "kprobe_dispatcher",
    "copy_from_kernel_nofault", "bpf_ringbuf_reserve", "bpf_ringbuf_submit", "bpf_ringbuf_output",
    "bpf_get_current_pid_tgid", "array_map_lookup_elem", "__htab_map_lookup_elem", "bpf_ktime_get_ns",
    "perf_output_begin", "_raw_spin_lock_irqsave", "vfs_read",
)  # fmt: skip
FORBIDDEN = 4
"""So many of them, the first ones, the kernel lets nobody probe; the last one is hit by others alone."""

UNCOUNTED = "this kernel does not count the hits that come while a handler runs on the same CPU"

WORK = """
import os
null = os.open("/dev/zero", os.O_RDONLY)
for _ in range(300):
    os.read(null, 8), os.getppid(), open("/proc/self/comm").read()
"""


def run(guest: Guest, program: str) -> str:
    """Run a program while something reads files; return what the run has said."""
    guest.put("/tmp/self.rpn", KERNEL + program)
    guest.put("/tmp/work.py", WORK)
    options = ("--format", "csv", "--log", "tsc", "--overhead", "off", "-o", "/tmp/records.csv")
    process = guest.start_dprobes("run", "/tmp/self.rpn", *options)
    process.await_output("Ctrl-C ends the run")
    guest.run([str(PYTHON), "/tmp/work.py"])
    process.signal(signal.SIGINT)
    said = process.completed().stderr
    rows = [tuple(map(int, row)) for row in re.findall(r"^7,\d+ +\S+ +(\d+) +(\d+) +(\d+) ", said, re.MULTILINE)]
    missed = sum(map(int, re.findall(r"^7,\d+  (\d+) hits? of \S+ ran no handler: ", said, re.MULTILINE)))
    hits, records, lost = map(sum, zip(*rows, strict=True))
    assert hits == records + lost + missed, said
    assert records > 0
    assert int(guest.run("grep -c '^7,' /tmp/records.csv").stdout) == records
    assert guest.get("/sys/kernel/debug/kprobes/list") == b""
    assert guest.get("/sys/kernel/tracing/enabled_functions") == b""
    return said


@pytest.mark.each_kernel
def test_patterns_of_what_handlers_call(guest: Guest) -> None:
    said = run(guest, "".join(f'offset = "{p}"\nminor = {n}\n{HANDLER}' for n, p in enumerate(PATTERNS)))
    if guest.machine.kernel == "6.1":
        assert UNCOUNTED in said
    else:
        assert re.search(r"warning: \d+ hits of .* ran no handler: ", said), said
    assert "left out" in said


def test_patterns_of_what_the_kernel_does_not_let_anybody_probe(guest: Guest) -> None:
    program = "".join(f'offset = "{p}"\nminor = {n}\nexit\n' for n, p in enumerate(FORBIDDEN_PATTERNS))
    guest.put("/tmp/self.rpn", KERNEL + program)
    said = guest.dprobes("run", "/tmp/self.rpn", check=False)
    assert said.returncode == 2
    for pattern in FORBIDDEN_PATTERNS:
        assert f"error: '{pattern}' matches no function of 'vmlinux' that can carry a probe: " in said.stderr


@pytest.mark.each_kernel
def test_single_functions_that_handlers_call(guest: Guest) -> None:
    """What the kernel does not let anybody probe is EXCLUDED; all others are there, and tell what they missed."""
    said = run(guest, "".join(f"offset = {name}\nminor = {n}\n{HANDLER}" for n, name in enumerate(SINGLE)))
    assert f"{len(SINGLE) - FORBIDDEN} probepoints are active" in said
    by_kernel = re.findall(r"^7,\d+  left out 1, because .*: (\w+)$", said, re.MULTILINE)
    by_list = re.findall(r"EXCLUDED: (\w+): the kernel allows no probe there: .* \(kprobe blacklist\)", said)
    assert sorted({*by_kernel, *by_list}) == sorted(SINGLE[:FORBIDDEN]), said
    if guest.machine.kernel == "6.1":
        assert UNCOUNTED in said
    else:
        assert re.search(r"^7,\d+  \d+ hits of bpf_ringbuf_\w+ ran no handler: ", said, re.MULTILINE), said
