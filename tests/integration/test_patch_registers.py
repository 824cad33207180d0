"""Patches of functions whose callers rely on registers that they preserve (gcc -fipa-ra) are refused."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.kept_registers import RegisterUse, expectation_of
from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch
from dprobes.engines.ptrace.patching.patch_records import patches_of
from dprobes.errors import TargetError
from dprobes.target.probed_module import Module
from integration.support import await_line, running

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
static volatile long sink;
#define FUNCTION __attribute__((noinline, noclone))
FUNCTION void leaf(long a) { sink = a; __asm__ volatile("" ::: "memory"); }
FUNCTION void middle(long a) { leaf(a); sink = a; leaf(a + 1); }
FUNCTION long sum(long limit) { long n = 0; for (long i = 0; i < limit; i++) { CALLED(i); n += i; } return n; }
FUNCTION long free_of_them(long limit) { long n = atol("3"); leaf(n); return random() + limit; }
int main(void) { char line[9]; do { printf("%ld\n", sum(1000)); fflush(stdout); } while (fgets(line, 9, stdin)); }
"""
OBJECT = r"""
long calls[4];
void orig_leaf(long a);
void counts(long a) { calls[0]++; }
void computes(long a) { calls[a & 3] += a * calls[1] + calls[2]; calls[3] ^= calls[a & 1]; }
void calls_others(long a) { orig_leaf(a); calls[0]++; orig_leaf(calls[0]); }
"""


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    (tmp_path / "program.c").write_text(PROGRAM)
    (tmp_path / "object.c").write_text(OBJECT)
    for name, flags in (
        ("leaf", "-DCALLED=leaf"), ("middle", "-DCALLED=middle"), ("strict", "-DCALLED=leaf -fno-ipa-ra"),
    ):  # fmt: skip
        subprocess.run(["gcc", "-O2", *flags.split(), "program.c", "-o", name], cwd=tmp_path, check=True)
    command = ["gcc", "-O2", "-shared", "-fPIC", "-nostartfiles", "object.c", "-o", "object.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_a_caller_that_relies_on_registers_is_found(compiled: Path) -> None:
    """According to gdb, there is a call at the place, in a function with a loop or a second call."""
    with running(compiled / "leaf", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "499500\n"
        with pytest.raises(TargetError) as caught:
            plan_patch(process.pid, compiled / "object.so", "calls_others", "leaf", None)
        assert patches_of(process.pid) == []
    found = re.search(r"changes (\w+): its caller expects at (\w+)\+(0x[0-9a-f]+) that", caught.value.message)
    assert found is not None, caught.value.message
    register, caller, place = found.groups()
    gdb = ["gdb", "-batch", "-ex", f"disassemble {caller}", str(compiled / "leaf")]
    code = subprocess.run(gdb, capture_output=True, text=True, check=True).stdout
    (call,) = [line for line in code.splitlines() if f"<+{int(place, 16)}>" in line]
    assert "<leaf>" in call
    assert register in ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")
    assert caught.value.message == (
        f"'leaf' cannot be replaced by 'calls_others', which changes {register}: its caller expects at "
        f"{caller}+{place} that it does not"
    )
    assert caught.value.hint == (
        "gcc -O2 makes such callers (-fipa-ra): compile the program -fno-ipa-ra, or replace the caller"
    )


def test_a_caller_of_the_caller_is_found(compiled: Path) -> None:
    program, replacement = Module.load(compiled / "middle"), Module.load(compiled / "object.so")
    found = expectation_of(program, program.address_of("leaf"), replacement, "calls_others")
    assert found is not None
    assert found.is_certain
    assert found.place.startswith(("sum+", "middle+"))


def test_callers_of_functions_that_call_unknown_code_expect_nothing(compiled: Path) -> None:
    program, replacement = Module.load(compiled / "leaf"), Module.load(compiled / "object.so")
    for function in ("free_of_them", "main"):
        assert expectation_of(program, program.address_of(function), replacement, "calls_others") is None


def test_a_program_without_such_callers_is_patched(compiled: Path) -> None:
    with running(compiled / "strict", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "499500\n"
        insert_patch(plan_patch(process.pid, compiled / "object.so", "computes", "leaf", None))
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert await_line(process) == "499500\n"


def test_registers_of_single_functions_are_known(compiled: Path) -> None:
    from iced_x86 import Register

    use = RegisterUse(Module.load(compiled / "object.so"))
    counts, others = (use.changed_by(use._module.address_of(name)) for name in ("counts", "calls_others"))
    assert Register.R11 not in counts
    assert {Register.R11, Register.ZMM0 + 9} <= others


ODD_CALLERS = r"""
	.text
	.globl leaf, split, broken, _start
	.type leaf, @function
leaf:	mov $1, %eax
	ret
	.size leaf, . - leaf

	.type split, @function
split:	mov $5, %ecx
	test %edi, %edi
	je split.cold
kept:	mov %rcx, %rax
	ret
	.size split, . - split
	.type split.cold, @function
split.cold:
	CALL_SPLIT
	jmp kept
	.size split.cold, . - split.cold

	.type broken, @function
broken:	mov $5, %ecx
	CALL_BROKEN
	mov %rcx, %rax
	jmp 1f
	.byte 0x06
1:	ret
	.size broken, . - broken

	CALL_UNNAMED
	ret
	.type _start, @function
_start:	hlt
	.size _start, . - _start
"""


@pytest.mark.parametrize(
    ("caller", "place", "is_certain"),
    [("SPLIT", "split.cold+0x0", True), ("BROKEN", "broken+0x5", True), ("UNNAMED", "0x", False)],
)
def test_callers_of_unusual_forms_are_not_skipped(caller: str, place: str, is_certain: bool, compiled: Path) -> None:
    """A cold part that jumps back, a function with data between its instructions, and code without a symbol."""
    calls = [f"-DCALL_{each}={'call leaf' if each == caller else 'nop'}" for each in ("SPLIT", "BROKEN", "UNNAMED")]
    (compiled / "odd.S").write_text(ODD_CALLERS)
    subprocess.run(["gcc", "-nostdlib", "-static", *calls, "odd.S", "-o", "odd"], cwd=compiled, check=True)
    program, replacement = Module.load(compiled / "odd"), Module.load(compiled / "object.so")
    found = expectation_of(program, program.address_of("leaf"), replacement, "calls_others")
    assert found is not None
    assert found.place.startswith(place)
    assert (found.register, found.is_certain) == ("rcx", is_certain)
