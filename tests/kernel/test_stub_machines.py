"""The kernel of a machine behind QEMU's stub: probed from outside, with all of the machine standing still at a hit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import drgn
import pytest

from dprobes.target.btf import Btf, Kind
from guests.initramfs import PYTHON
from integration.conftest import run
from integration.manager.sandbox import Sandbox
from integration.support import DPROBES
from kernel.observed_machine import observed, words_of

if TYPE_CHECKING:
    from guests.guest import Guest
    from integration.support import Runner

__all__ = ["run"]

EXAMPLES = Path(__file__).parents[1] / "fixtures" / "seeds"
CALLS = 40
WORK = f"""
import ctypes, os
with open("/proc/self/comm", "w") as file: file.write("counted")
os.setuid(12)
for number in range({CALLS}): ctypes.CDLL(None).syscall(110)
print(os.getpid())
"""
FAULT = "import ctypes; ctypes.c_uint.from_address(1 << 63 | 8).value"
STORES = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
assert libc.mmap(0x10000000, 4096, 3, 0x32, -1, 0) == 0x10000000
for number in range(5):
    ctypes.c_uint.from_address(0x10000000).value = number
print(os.getpid())
"""
"""Stores and loads at an address that the program has asked for."""
STORED_BY_KERNEL = """
import ctypes
call, place = ctypes.CDLL(None).syscall, ctypes.c_uint()
good, bad = set(), set()
with open("/proc/self/comm", "w") as file: file.write("stored")
for number in range(10):
    good.add(call(309, ctypes.byref(place), None, None))
    bad.add(call(309, ctypes.c_void_p(8), None, None))
with open("/proc/self/comm", "w") as file: file.write("done")
print(list(good), list(bad))
"""
"""getcpu(2), which stores a number."""


def program(offset: str, handler: str, *keywords: str) -> str:
    lines = "".join(f"{each}\n" for each in keywords)
    return f"name = vmlinux\nmodtype = kernel\noffset = {offset}\nminor = 1\n{lines}{handler}\n"


def check_calls(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """Count the calls of one process, and see who it was by the guest's own structures."""
    own = "push this_cpu_off; dup 1; push mem, u64; sub"
    handler = f"push task; push pid; push tid; push uid; {own}; push procid; log 6; exit"
    with observed(guest, run, program("__x64_sys_getppid", handler), tmp_path) as seen:
        seen.await_record()
        pid = int(guest.run([str(PYTHON), "-c", WORK]).stdout)
        result = seen.stop()
    assert result.status == 0, result.stderr
    counted = [record for record in result.records if record["name"] == "counted"]
    assert len(counted) == CALLS
    assert {(record["pid"], record["uid"]) for record in counted} == {(pid, 12)}
    for record in counted:
        words = words_of(record)
        assert words[0] < guest.machine.cpus
        assert -words[1] % (1 << 64) < 1 << 20  # what the processor's own copy of the variable holds, less its address
        assert words[2:5] == [12, pid, pid]
        assert words[5] >> 63
    assert guest.run("true").returncode == 0


def test_every_call_of_a_process_is_a_hit(guest: Guest, run: Runner, tmp_path: Path) -> None:
    check_calls(guest, run, tmp_path)


@pytest.mark.torture
@pytest.mark.machine(kaslr=True)
def test_a_kernel_is_found_wherever_it_is(guest: Guest, run: Runner, tmp_path: Path) -> None:
    (line,) = re.findall(r"^([0-9a-f]+) T _text$", guest.get("/proc/kallsyms").decode(), re.MULTILINE)
    assert int(line, 16) != 0xFFFFFFFF81000000
    check_calls(guest, run, tmp_path)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_what_only_the_system_sees(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """The kernel's own symbols say what must be in registers; a register that there is not reads as 0."""
    pushes = {
        "cr0": "push r, cr0",
        "cr3": "push r, cr3",
        "cr4": "push r, cr4",
        "dr7": "push r, dr7",
        "tr": "push r, tr",
        "lstar": "push 0xc0000082; push r, msr",
        "efer": "push 0xc0000080; push r, msr",
        "none": "push 0x12345; push r, msr",
        "unmapped": "push 8; vfyrw",
        "constant": "push linux_banner; vfyrw",
        "variable": "push jiffies; vfyrw",
        "stack": "push r, ss; push r, rsp; seg2lin; push r, rsp; sub",
    }
    text = "".join(f"{push}; log 1; " for push in pushes.values())
    text += "push r, idtr; log 2; push 0; push r, cpuid; log 4; push 0x21; push io, u8; log 1; exit"
    options = ["--allow-write"]
    with observed(guest, run, program("__x64_sys_getppid", text, "maxhits = 1"), tmp_path, *options) as seen:
        seen.await_record()
        result = seen.stop()
    words = words_of(result.records[0])
    found = dict(zip(pushes, words, strict=False))
    limit, base, *processor, port = words[len(pushes) :]
    assert f"{found['lstar']:016x} T entry_SYSCALL_64\n" in guest.get("/proc/kallsyms").decode()
    shown = guest.monitor("info registers")
    assert f"CR0={found['cr0']:08x}" in shown
    assert f"CR4={found['cr4']:08x}" in shown
    assert f"DR7={found['dr7']:016x}" in shown
    assert f"TR ={found['tr']:04x} " in shown
    assert f"IDT=     {base:016x} {limit:08x}" in shown
    assert found["cr3"] % 4096 == 0 != found["cr3"]
    assert found["efer"] & 0xD01 == 0xD01
    assert found["none"] == 0
    assert [found[name] for name in ("unmapped", "constant", "variable", "stack")] == [1, 1, 0, 0]
    vendor = b"".join(processor[number].to_bytes(4, "little") for number in (1, 3, 2))
    assert vendor.decode() in guest.get("/proc/cpuinfo").decode()
    assert port == int(guest.monitor("i /b 0x21").split("=")[1], 16)


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_the_first_instruction_of_the_timer_interrupt(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """No kprobe may be there. The kernel counts its interrupts one by one: none is missing between two hits."""
    types = Btf(guest.get("/sys/kernel/btf/vmlinux"))
    member = types.member(types.find(Kind.TYPEDEF, "irq_cpustat_t"), "apic_timer_irqs")
    assert member is not None
    handler = f"push irq_stat; push {member.bits // 8}; add; push mem, u32; push procid; log 2; exit"
    handler += "\n"
    before = local_timer_interrupts(guest)
    text = program("asm_sysvec_apic_timer_interrupt", handler, "maxhits = 60")
    with observed(guest, run, text, tmp_path) as seen:
        seen.await_record()
        guest.run("for i in 1 2 3 4 5 6 7 8; do cat /proc/self/stat; done")
        result = seen.stop()
    after = local_timer_interrupts(guest)
    assert result.status == 0, result.stderr
    assert len(result.records) == result.counts[1].hits > 3
    for cpu in range(guest.machine.cpus):
        counted = [count for number, count in map(words_of, result.records) if number == cpu]
        if counted:
            assert counted == list(range(counted[0], counted[0] + len(counted)))
            assert before[cpu] <= counted[0]
            assert counted[-1] < after[cpu]


def local_timer_interrupts(guest: Guest) -> list[int]:
    (line,) = re.findall(r"^ *LOC:((?: +[0-9]+)+)", guest.get("/proc/interrupts").decode(), re.MULTILINE)
    return [int(number) for number in line.split()]


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_examples_5_and_7_of_the_manual(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """Control registers at a general protection fault, a variable of the kernel that is written, a user address."""
    example = (EXAMPLES / "man-example-5.rpn").read_text().replace("do_general_protection", "exc_general_protection")
    with observed(guest, run, re.sub("opcode .*", "", example), tmp_path) as seen:
        while not seen.lines:
            assert seen.client.poll() is None, seen.client.communicate()[1]
            guest.run([str(PYTHON), "-S", "-c", FAULT], check=False)
        result = seen.stop()
    cr4, cr3, _, cr0 = words_of(result.records[0])
    assert cr0 & 0x80000001 == 0x80000001
    assert cr4 & 0x20
    assert cr3 % 4096 == 0 != cr3
    watched = (EXAMPLES / "man-example-7a.rpn").read_text().replace("nr_free_pages", "nr_threads")
    with observed(guest, run, watched.replace("push dif", "push mem, u32"), tmp_path) as seen:
        seen.await_record()
        result = seen.stop()
    warning = r"dprobes: warning: of simultaneous accesses by the 2 processors the stub \S+ reports one"
    assert re.search(warning, result.stderr)
    assert re.search(
        "^[0-9,]+ +nr_threads .* at least: of several processors at once one$", result.stderr, re.MULTILINE
    )
    values = [words_of(record)[0] for record in result.records]
    assert all(abs(later - earlier) == 1 for earlier, later in pairwise(values))
    user = (EXAMPLES / "man-example-7b.rpn").read_text().replace("0x0804040c:0x0804040f", "0x10000000:0x10000003")
    with observed(guest, run, user, tmp_path) as seen:
        while not seen.lines:
            assert seen.client.poll() is None, seen.client.communicate()[1]
            pid = int(guest.run([str(PYTHON), "-S", "-c", STORES]).stdout)
        result = seen.stop()
    of_last = [record for record in result.records if record["pid"] == pid]
    assert len(of_last) in (0, 2 * 5)
    assert len(result.records) >= 2 * 5
    for process in {record["pid"] for record in result.records}:
        places = {words_of(record)[0] for record in result.records if record["pid"] == process}
        assert len(places) == 2  # those of a load and a store


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_exit_1_and_exit_2(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """A dump of the machine is read by drgn; then the machine is left standing, and goes on when it is told to."""
    guest.load_module("qemu_fw_cfg")  # which tells QEMU where the kernel has its description (VMCOREINFO)
    text = program("__x64_sys_getppid", "push pid; log 1; exit 2")
    with observed(guest, run, text, tmp_path, "--allow-write", cwd=tmp_path) as seen:
        seen.await_record()
        result = seen.stop()
    dump = tmp_path / "vmcore"
    assert f"the machine's memory is in '{dump}', where its stub runs" in result.stderr
    assert result.counts[1].hits == len(result.records) == 1
    address = re.search(r"^([0-9a-f]+) . linux_banner$", guest.get("/proc/kallsyms").decode(), re.MULTILINE)
    assert address is not None
    memory = drgn.Program()
    memory.set_core_dump(dump)
    assert memory.read(int(address[1], 16) - 0xFFFFFFFF80000000, 13, physical=True) == b"Linux version"
    del memory  # which has the dump open
    dump.unlink()
    text = program("__x64_sys_getppid", "push pid; log 1; exit 1")
    waiting = guest.start(f"while :; do {PYTHON} -S -c 'import os; os.getppid()'; done")
    with observed(guest, run, text, tmp_path, "--allow-write") as seen:
        _, said = seen.client.communicate(timeout=100)
    assert "the machine is stopped at 0x" in said
    assert f"hint: gdb -ex 'target remote {tmp_path / 'stub'}'" in said
    assert "paused" in guest.monitor("info status")
    guest.monitor("cont")
    assert guest.run("true").returncode == 0
    waiting.kill()


@pytest.mark.torture
def test_the_kernel_goes_on_when_dprobes_is_killed(guest: Guest, run: Runner, tmp_path: Path) -> None:
    with observed(guest, run, program("__x64_sys_getppid", "exit"), tmp_path) as seen:
        waiting = guest.start(f"while :; do {PYTHON} -S -c 'import os; os.getppid()'; done")
        seen.await_record()
        seen.client.kill()
        seen.client.communicate(timeout=60)
    waiting.kill()
    assert guest.run("true").returncode == 0


@pytest.mark.torture
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_an_instruction_that_faults_makes_no_record(guest: Guest, run: Runner, tmp_path: Path) -> None:
    """The kernel stores for a program: ten times where that can be, and ten times where nothing is."""
    listed = re.search(r"^([0-9a-f]+) T __put_user_4$", guest.get("/proc/kallsyms").decode(), re.MULTILINE)
    assert listed is not None
    start = int(listed[1], 16)
    limits = [f"--start-address={start:#x}", f"--stop-address={start + 64:#x}"]
    shown = subprocess.run(["objdump", "-d", *limits, guest.image.vmlinux], capture_output=True, text=True, check=True)
    store = re.search(r"^([0-9a-f]+):.*mov +%eax,\(%rcx\)", shown.stdout, re.MULTILINE)
    assert store is not None
    text = program(f"__put_user_4 + {int(store[1], 16) - start}", "push r, rcx; log 1; exit")
    with observed(guest, run, text, tmp_path) as seen:
        guest.start("while :; do /bin/true; done")
        while not seen.lines:
            assert seen.client.poll() is None, seen.client.communicate()[1]
            guest.run("true")
        done = guest.run([str(PYTHON), "-S", "-c", STORED_BY_KERNEL])
        result = seen.stop()
    assert done.stdout == "[0] [-1]\n"
    assert len([record for record in result.records if record["name"] == "stored" and words_of(record)[0] != 8]) == 10
    assert not [record for record in result.records if words_of(record)[0] == 8]


def test_structures_are_those_of_the_kernel_in_the_machine(guest: Guest, tmp_path: Path) -> None:
    """The kernel of this machine, which is another one, has the members elsewhere."""
    socket, output = tmp_path / "stub", tmp_path / "out.json"
    guest.open_stub(socket)
    text = 'kernel:__x64_sys_getppid { printf("%d %s", curtask->tgid, curtask->comm); }'
    command = [*DPROBES, "run", "--engine", f"gdb={socket}", "--format", "json", "-o", str(output), "-e", text]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (output.exists() and output.read_text().count("\n") > 1):
        assert client.poll() is None, client.communicate()[1]
        assert time.monotonic() < deadline
        guest.run([str(PYTHON), "-S", "-c", "import os; os.getppid()"])
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=60)
    assert client.returncode == 0, said
    for record in map(json.loads, output.read_text().splitlines()):
        assert record["fields"] == {"tgid": record["pid"], "comm": record["name"]}


def test_the_manager_has_the_types_of_the_kernel_in_the_machine(guest: Guest, tmp_path: Path) -> None:
    """It is the client that compiles, and needs the types; the manager finds the places."""
    sandbox = Sandbox(tmp_path)
    guest.open_stub(tmp_path / "stub")
    text = 'kernel:__x64_sys_getppid { printf("%d %s", curtask->tgid, curtask->comm); @calls[comm] = count(); }'
    try:
        said = sandbox(f"dprobes insert -e '{text}' --as ppid --engine gdb=stub")
        assert said == "inserted 'ppid': 1 of 1 probepoints active\n"
        pid = int(guest.run([str(PYTHON), "-S", "-c", WORK]).stdout)
        assert sandbox.counts("ppid")[0] >= CALLS
        assert f"@calls[counted]: {CALLS}\n" in sandbox("dprobes getvars --name ppid")
        assert sandbox("dprobes remove --name ppid").startswith("removed ppid\n")
        lines = sandbox("dprobes log").splitlines()
        assert sum(line.endswith(f"]  {pid} counted") for line in lines) == CALLS
    finally:
        sandbox.close()
    assert guest.run("true").returncode == 0
