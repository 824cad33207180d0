"""The manual's examples for the kernel run on kernels of today, with opcodes and offsets that these have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest
    from integration.support import Builder

pytestmark = pytest.mark.shared_guest

EXAMPLES = Path(__file__).parents[1] / "fixtures" / "seeds"
FORKS = 20
WORK = f"""
import os
for _ in range({FORKS}):
    if os.fork() == 0: os._exit(0)
    os.wait()
with open("/tmp/file", "wb") as file:
    for _ in range({FORKS}): file.write(bytes(100)), file.flush()
"""
PRESENT = {"do_fork": "kernel_clone", "ext2_file_write": "vfs_write", "do_page_fault": "handle_mm_fault"}
"""The functions of 2003 and those in which the same happens today, where there is another choice than a table's."""


def example(name: str) -> str:
    return (EXAMPLES / f"man-example-{name}.rpn").read_text()


def places_of(name: str) -> tuple[int, list[tuple[int, int]]]:
    """Return the first byte of a function's code, and the offset and the first byte of each of its returns."""
    from dprobes.target.code.machine_code import decode
    from dprobes.target.kernel.running_kernel import RunningKernel

    kernel = RunningKernel()
    (symbol,) = kernel.symbols.find(name, "")
    decoded = list(decode(kernel.text.read(symbol.address, 1 << 14), 64, symbol.address, 0))
    own = [each for each in decoded if kernel.symbols.covering(each.address) == symbol]
    returns = [(each.address - symbol.address, each.opcode_byte) for each in own if each.mnemonic == "ret"]
    return decoded[0].opcode_byte, returns


def run(guest: Guest, program: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    guest.put("/tmp/program.rpn", program)
    guest.put("/tmp/work.py", WORK)
    done = guest.dprobes("run", "/tmp/program.rpn", "--format", "json", *options, "--", str(PYTHON), "/tmp/work.py")
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def words(record: dict[str, Any]) -> list[int]:
    data = bytes.fromhex(record["data"])
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]


def with_opcode(guest: Guest, program: str) -> str:
    """Put the opcode that ``locate`` shows where the original has that of 2003."""
    (opcode,) = re.findall("^opcode = (0x..)$", guest.dprobes("locate", "kernel:do_fork").stdout, re.MULTILINE)
    return re.sub("opcode = 0x55", f"opcode = {opcode}", program)


def test_example_2_logs_the_process_and_its_task(guest: Guest) -> None:
    records, said = run(guest, with_opcode(guest, example("2")))
    assert "'do_fork' is called 'kernel_clone' in this kernel" in said
    assert len(records) == FORKS
    for record in records:
        task, pid = words(record)
        assert pid == record["pid"]
        assert task >> 63


def test_example_3_counts_calls(guest: Guest) -> None:
    records, _ = run(guest, with_opcode(guest, example("3")))
    assert len(records) == FORKS
    # The handler pushes the variable that it has incremented.
    assert [words(record) for record in records] == [[number] for number in range(1, FORKS + 1)]


def test_example_4_logs_registers_and_memory(guest: Guest) -> None:
    program = with_opcode(guest, example("4.fixed"))
    records, _ = run(guest, program)
    assert len(records) == FORKS
    for record in records:
        data = bytes.fromhex(record["data"])
        assert len(data) == 2 * 8 + (3 + 16) + 2 * 8
        # As a system call begins, its result is -ENOSYS (arch/x86/entry/entry_64.S).
        assert int.from_bytes(data[-16:-8], "little", signed=True) == -38


def test_example_5_is_refused_by_its_first_control_register(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", example("5"))
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert done.returncode == 2
    line = next(number for number, text in enumerate(example("5").splitlines(), 1) if text.startswith("push r, cr0"))
    assert f"program.rpn:{line}:" in done.stderr
    assert "'push r, cr0' needs control, debug and model-specific registers" in done.stderr


def test_example_6_takes_the_group_and_type_that_are_asked_for(guest: Guest) -> None:
    """A function of today may have several returns: there is a definition for each."""
    allocating = {"6.1": "__kmalloc", "6.12": "__kmalloc_noprof"}[guest.machine.kernel]
    program = example("6.fixed")
    for former, present in (PRESENT | {"kmalloc": allocating}).items():
        program = program.replace(former, present)
    header, *definitions = re.split(r"(?m)^(?=offset = )", program)
    adapted = [header]
    for definition in definitions:
        name, leaving = re.findall(r"^offset = (\w+)( \+)?", definition)[0]
        first, returns = guest.call(places_of, name)
        for place, opcode in returns if leaving else [(0, first)]:
            moved = re.sub(r"^offset = \w+( \+ \w+)?", f"offset = {name} + {place}", definition)
            adapted.append(re.sub(r"opcode = \w+", f"opcode = {opcode:#x}", moved))
    program = "".join(adapted)
    records, _ = run(guest, program, "--group", "process")
    assert [record["minor"] for record in records] == [0, 1] * FORKS
    records, said = run(guest, program)
    assert {record["minor"] for record in records} == {0, 1, 2, 4, 5, 6, 7, 8}
    assert re.search(r"^1,7 +handle_mm_fault +100 ", said, re.MULTILINE)


def test_example_7a_watches_a_number_of_the_kernel(guest: Guest) -> None:
    program = example("7a").replace("nr_free_pages:nr_free_pages + 3", "vm_zone_stat:vm_zone_stat + 7")
    records, said = run(guest, program.replace("nr_free_pages", "vm_zone_stat"))
    assert "'push dif' is written 'push mem, u32' since version 3.4.0" in said
    assert records
    assert {len(bytes.fromhex(record["data"])) for record in records} <= {4, 8}


def test_example_7b_watches_an_address_of_programs(guest: Guest, build: Builder) -> None:
    program = build("watched.c", "-no-pie")
    guest.put("/tmp/watched", program)
    (place,) = re.findall(r"^(\w+) . cell$", guest.run(["nm", "/tmp/watched"]).stdout, re.MULTILINE)
    address = int(place, 16)
    source = example("7b").replace("0x0804040c:0x0804040f", f"{address:#x}:{address + 7:#x}")
    guest.put("/tmp/program.rpn", source)
    options = ("--format", "json", "-o", "/tmp/records", "--engine", "ebpf")
    done = guest.dprobes("run", "/tmp/program.rpn", *options, "--", "/tmp/watched", "threads", "20", "2")
    accesses = sum(int(number) for number in done.stdout.split())
    assert len(guest.get("/tmp/records").splitlines()) == accesses
