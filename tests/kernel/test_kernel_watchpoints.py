"""Watchpoints on the kernel, and samplers, on all CPUs: exact counts, who accessed, and what four registers allow."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
KERNEL_CODE, USER_CODE = 0x10, 0x33
ACCESSES_PER_CPU = 20
ACCESSES = f"""
import os
def write(path, value):
    with open(path, "w") as file:
        file.write(str(value))
for cpu in sorted(os.sched_getaffinity(0)):
    os.sched_setaffinity(0, {{cpu}})
    for number in range({ACCESSES_PER_CPU}):
        write("/proc/sys/kernel/panic", number)
        write("/proc/sys/vm/dirty_bytes", 100_000_000 + number)
        write("/proc/sys/kernel/panic_on_warn", 0)
        write("/proc/sys/kernel/panic_on_oops", 1)
        open("/proc/sys/kernel/panic_on_oops").read()
        os.getppid()
"""
"""
What is written is an ``int``, or an ``unsigned long``; each write of a number to a file is one instruction.

The emulator reports one watchpoint for an access, though a processor reports all: so no two are on the same data.
"""


def watchpoint(minor: int, address: str, access: str, body: str = "log 0\nexit\n") -> str:
    return f"address = {address}\nwatchpoint = {access}\nminor = {minor}\n{body}"


def run(guest: Guest, program: str, *options: str) -> tuple[str, str]:
    """Run a program on the accesses; return its output and what it says."""
    guest.put("/tmp/program.rpn", HEADER + program)
    guest.put("/tmp/accesses.py", ACCESSES)
    done = guest.dprobes(
        "run", "/tmp/program.rpn", "--overhead", "off", *options, "--", str(PYTHON), "/tmp/accesses.py"
    )
    return done.stdout, done.stderr


def as_records(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def symbol_before(guest: Guest, address: int) -> tuple[str, int]:
    """Return the last function before an address, and the distance to it, from the kernel's own list."""
    lines = (line.split()[:3] for line in guest.get("/proc/kallsyms").decode().splitlines())
    functions = ((int(start, 16), name) for start, kind, name in lines if kind in "tT")
    place, name = max(each for each in functions if each[0] <= address)
    return name, address - place


def test_each_size_and_access_is_counted_on_all_cpus(guest: Guest) -> None:
    """The fifth watchpoint finds no debug register, which is said, and the others are there."""
    program = watchpoint(1, "panic_timeout : panic_timeout", "w")
    program += watchpoint(2, "panic_on_warn : panic_on_warn + 1", "w")
    program += watchpoint(4, "panic_on_oops : panic_on_oops + 3", "rw")
    program += watchpoint(8, "vm_dirty_bytes : vm_dirty_bytes + 7", "w")
    program += watchpoint(5, "__x64_sys_getppid", "x")
    output, said = run(guest, program, "--format", "json")
    assert "warning: DEBUGREG_UNAVAIL: the processor has 4 debug registers, and 4 watchpoints come before this" in said
    assert re.search(r"^7,5 .* 0 +0 +0 ", said, re.MULTILINE)
    counts = Counter((record["minor"], record["cpu"]) for record in as_records(output))
    cpus, once = range(guest.machine.cpus), ACCESSES_PER_CPU
    assert counts == {(minor, cpu): once * (2 if minor == 4 else 1) for minor in (1, 2, 4, 8) for cpu in cpus}


WHO = "push u, cs\npush r, cs\npush r, eip\nlog 3\nexit\n"
TEMPLATE = 'major = 7\n\nminor = {minor}\nfmt = "by %a in %x from %x"\n'


def test_the_instruction_that_accessed_is_named(guest: Guest) -> None:
    program = watchpoint(1, "panic_timeout : panic_timeout + 3", "w", WHO)
    program += watchpoint(2, "__x64_sys_getppid", "x", WHO)
    guest.put("/tmp/templates/templates.lst", "7 who.fmt\n")
    guest.put("/tmp/templates/who.fmt", TEMPLATE.format(minor=1) + 'minor = 2\nfmt = "at %a in %x from %x"\n')
    output, _ = run(guest, program, "--templates", "/tmp/templates")
    codes = f"in {KERNEL_CODE:x} from {USER_CODE:x}"
    accessed = set(re.findall(rf"by (\S+) \[vmlinux\] {codes}", output))
    executed = set(re.findall(rf"at (\S+) \[vmlinux\] {codes}", output))
    assert executed == {"__x64_sys_getppid"}
    (written,) = accessed
    count = ACCESSES_PER_CPU * guest.machine.cpus
    assert output.count(f"by {written} ") == output.count("at __x64_sys_getppid ") == count
    # It is the instruction after the write, wherever the watched data is.
    output, _ = run(guest, program, "--format", "json")
    (address,) = {
        int.from_bytes(bytes.fromhex(record["data"])[:8], "little")
        for record in as_records(output)
        if record["minor"] == 1
    }
    name, distance = symbol_before(guest, address)
    assert written == f"{name}+{distance:#x}"


SAMPLER = """
name = {name}
{kind}
major = 7
cvars = 1
sampler = 199hz
minor = 1
inc cv, 0
push cv, 0
push u, eip
push u, cs
push r, eip
push r, cs
log 5
exit
"""
WORK = "import os\nfor _ in range(300): os.urandom(200_000), sum(range(10_000))\n"


def samples(guest: Guest, name: str, kind: str = "") -> list[tuple[int, ...]]:
    """Return the registers of samples of a program that works in the kernel and outside; each CPU counts its own."""
    guest.put("/tmp/program.rpn", SAMPLER.format(name=name, kind=kind))
    guest.put("/tmp/work.py", WORK)
    done = guest.dprobes("run", "/tmp/program.rpn", "--format", "json", "--", str(PYTHON), "/tmp/work.py")
    found: list[tuple[int, ...]] = []
    numbers: dict[int, list[int]] = {}
    for record in as_records(done.stdout):
        data = bytes.fromhex(record["data"])
        *registers, number = (int.from_bytes(data[at : at + 8], "little") for at in range(0, 40, 8))
        found.append(tuple(registers))
        numbers.setdefault(record["cpu"], []).append(number)
    assert {cpu: sorted(each) for cpu, each in numbers.items()} == {
        cpu: list(range(1, len(each) + 1)) for cpu, each in numbers.items()
    }
    return found


def test_samples_in_the_kernel_have_its_registers_and_those_of_the_program(guest: Guest) -> None:
    found = samples(guest, "vmlinux", "modtype = kernel")
    assert len(found) > 20
    assert {(cs, ip >> 63, user_cs, user_ip >> 63) for cs, ip, user_cs, user_ip in found} == {
        (KERNEL_CODE, 1, USER_CODE, 0)
    }


def test_samples_of_everything_are_of_the_kernel_and_of_programs(guest: Guest) -> None:
    found = samples(guest, '"*"')
    assert {(cs, ip >> 63, user_cs, user_ip >> 63) for cs, ip, user_cs, user_ip in found} == {
        (KERNEL_CODE, 1, USER_CODE, 0),
        (USER_CODE, 0, USER_CODE, 0),
    }
