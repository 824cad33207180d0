"""Where control may come to in compiled code, against the labels that are put there, and which bytes are dead."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.platform.x86.patches.branch_targets import ControlFlow, Spans, code_ranges, control_flow
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

ASSEMBLY = """
.text
.globl start
.type start, @function
start:
  test %edi, %edi
  je skipped
  lock
after_prefix:
  incl (%rsi)
  jmp after_prefix
.p2align 4
skipped:
  call other
  .byte 0x0f, 0x1f, 0x00
  loop near
  jmp far
near:
  ret
.p2align 4
far:
  lea named(%rip), %rax
  jmp *(%rax)
named:
  ud2
padding:
  .fill 3, 1, 0x90
  int3
.size start, . - start
.type other, @function
other:
  ret
  .fill 6, 1, 0x90
inner:
  ret
  .quad 0x1122334455667788
.size other, . - other
"""
SWITCH = """
#define CASE(n) case n: __asm__ volatile(".globl case_" #n "\\ncase_" #n ":"); return m * n + p[n];
int choose(int n, int m, int *p) {
    switch (n) { CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) default: return m; }
}
int twice(int n, int m, int *p) {
    switch (n) { case 0: return choose(m, n, p); case 1: return m - 1; case 2: return m ^ 7; case 3: return p[m];
                 case 4: return m << 3; case 5: return n * m; default: return 0; }
}
int tail(int (**f)(int), int n) { return f[n](n + 1); }
int main(int n, char **a) { return choose(n, 1, (int *)a) + twice(n, 2, (int *)a); }
"""
DIFFERENCES = """
int computed(int n, int m) {
    static const int steps[] = {&&one - &&base, &&two - &&base, &&base - &&base};
    goto *(&&base + steps[n]);
base: __asm__ volatile("" ::: "memory"); return m;
one: __asm__ volatile("" ::: "memory"); return m + 1;
two: __asm__ volatile("" ::: "memory"); return m * 2;
}
int plain(int n) { return n + 1; }
"""


def flow_of(tmp_path: Path, name: str, source: str, *flags: str) -> tuple[ControlFlow, dict[str, int]]:
    (tmp_path / name).write_text(source)
    subprocess.run(["gcc", "-o", tmp_path / "x", tmp_path / name, *flags], check=True)
    names = subprocess.run(["nm", tmp_path / "x"], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in names.splitlines()]
    module = Module.load(tmp_path / "x")
    return control_flow(module, code_ranges(module)), {row[2]: int(row[0], 16) for row in rows if len(row) == 3}


def test_targets_of_branches_and_what_code_names(tmp_path: Path) -> None:
    flow, at = flow_of(tmp_path, "x.s", ASSEMBLY, "-shared")
    start, end = at["start"], at["other"]
    names = {"start", "after_prefix", "skipped", "near", "far", "named"}
    assert {target for target in flow.targets if start <= target < end} == {at[name] for name in names}
    assert {at["start"], at["other"]} <= set(flow.starts)


def test_padding_is_dead_behind_what_does_not_come_back_up_to_a_target(tmp_path: Path) -> None:
    flow, at = flow_of(tmp_path, "x.s", ASSEMBLY, "-shared")
    dead = [span for span in flow.dead if at["start"] <= span[0] <= at["inner"]]
    after_jump = at["after_prefix"] + 4
    assert dead == [
        (after_jump, at["skipped"]),
        (at["near"] + 1, at["far"]),
        (at["padding"], at["other"]),
        (at["other"] + 1, at["inner"]),
    ]
    assert flow.dead.end_at(at["inner"] + 1) == at["inner"] + 1  # a number is no padding


def test_padding_that_a_branch_leads_to_is_not_dead(tmp_path: Path) -> None:
    source = ".text\n.globl f\n.type f, @function\nf:\nret\nled_to: nop\nnop\njmp led_to\n"
    flow, at = flow_of(tmp_path, "x.s", source, "-shared")
    assert [span for span in flow.dead if at["f"] <= span[0] <= at["led_to"] + 1] == []


@pytest.mark.parametrize("flags", [("-pie", "-fPIE", "-O2"), ("-no-pie", "-fno-pie", "-O2"), ("-pie", "-fPIE", "-O0")])
def test_jump_tables_lead_to_their_cases(tmp_path: Path, flags: tuple[str, ...]) -> None:
    flow, at = flow_of(tmp_path, "x.c", SWITCH, *flags)
    cases = {address for name, address in at.items() if re.fullmatch(r"case_\d", name)}
    assert len(cases) == 8
    assert cases <= flow.targets
    assert list(flow.vague) == []
    inside = [target for target in flow.targets if at["tail"] < target < at["tail"] + 8]
    assert inside == []


@pytest.mark.parametrize("flags", [("-O2", "-shared", "-fPIC"), ("-O0", "-shared", "-fPIC")])
def test_code_that_computes_where_it_jumps_to_is_vague(tmp_path: Path, flags: tuple[str, ...]) -> None:
    flow, at = flow_of(tmp_path, "x.c", DIFFERENCES, *flags)
    assert at["computed"] in flow.vague
    assert at["computed"] + 8 in flow.vague
    assert at["plain"] not in flow.vague


def test_numbers_in_a_program_for_fixed_addresses_may_be_addresses(tmp_path: Path) -> None:
    source = (
        ".text\n.globl _start\n.type _start, @function\n_start:\n.fill 9, 1, 0x90\nmovl $by_number, %eax\n"
        "movl by_address(,%rax,8), %ecx\nby_number: nop\nby_address: nop\nnot_named: nop\nret\n"
        ".globl in_data\nin_data: nop\nret\n.data\ntable: .quad in_data\n"
    )
    flow, at = flow_of(tmp_path, "x.s", source, "-static", "-nostdlib", "-no-pie")
    assert {at["by_number"], at["by_address"], at["in_data"]} <= flow.targets
    assert at["not_named"] not in flow.targets
    flow, at = flow_of(tmp_path, "x.s", source.replace("$by_number", "$1"), "-static", "-nostdlib", "-no-pie")
    assert at["by_number"] not in flow.targets


def test_a_table_goes_on_behind_what_is_named_in_it_in_its_own_function(tmp_path: Path) -> None:
    source = """
.text
.globl f
.type f, @function
f:
  lea table(%rip), %rax
  lea inner(%rip), %rcx
  movslq (%rax,%rdi,4), %rdx
  add %rax, %rdx
  jmp *%rdx
one: nop
two: nop
three: ret
.globl g
.type g, @function
g:
  nop
other: nop
  ret
.section .rodata
table: .long one - table
inner: .long two - table, three - table, other - table, 0x7fffffff
"""
    flow, at = flow_of(tmp_path, "x.s", source, "-shared")
    assert {at["one"], at["two"], at["three"]} <= flow.targets
    assert at["other"] not in flow.targets


def test_without_sections_code_is_in_segments(tmp_path: Path) -> None:
    flow, at = flow_of(tmp_path, "x.s", ASSEMBLY, "-shared")
    data = bytearray((tmp_path / "x").read_bytes())
    data[40:48] = bytes(8)  # e_shoff
    data[60:62] = bytes(2)  # e_shnum
    (tmp_path / "stripped").write_bytes(data)
    module = Module.load(tmp_path / "stripped")
    ranges = code_ranges(module)
    assert any(code.start <= at["start"] < code.end for code in ranges)
    stripped = control_flow(module, ranges)
    names = {"after_prefix", "skipped", "near", "far", "named"}
    assert {at[name] for name in names} <= stripped.targets
    assert at["skipped"] - 1 in flow.dead
    assert at["skipped"] - 1 in stripped.dead


def test_what_looks_like_a_near_branch_counts_wherever_it_stands(tmp_path: Path) -> None:
    source = (
        ".text\n.globl f\n.type f, @function\nf:\nnop\nleads: nop\nret\n.byte 0x05, 0x0f, 0x84\n.long leads - . - 4\n"
    )
    flow, at = flow_of(tmp_path, "x.s", source, "-shared")
    assert at["leads"] in flow.targets


def test_sequences_that_the_kernel_restarts_are_noted_with_where_it_leads(tmp_path: Path) -> None:
    source = (
        ".text\n.globl f\n.type f, @function\nf:\nincl (%rdi)\nb: incl (%rsi)\ne: ret\n.long 0x53053053\na: jmp f\n"
        '.section __rseq_cs, "aw"\n.balign 32\n.long 0, 0\n.quad b, e - b, a\n'
    )
    flow, at = flow_of(tmp_path, "x.s", source, "-shared")
    assert list(flow.restartable) == [(at["b"], at["e"])]
    assert at["a"] in flow.targets


def test_code_of_other_processors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.s").write_text(".text\nnop\n")
    subprocess.run(["as", "--32", "-o", tmp_path / "x.o", tmp_path / "x.s"], check=True)
    module = Module.load(tmp_path / "x.o")
    message = f"'{tmp_path}/x.o' is for i386, jumps to trampolines are made for x86_64"
    with pytest.raises(TargetError, match=f"^{re.escape(message)}$"):
        control_flow(module, code_ranges(module))


def test_spans() -> None:
    spans = Spans([(40, 50), (10, 20)])
    assert list(spans) == [(10, 20), (40, 50)]
    assert [n for n in range(60) if n in spans] == [*range(10, 20), *range(40, 50)]
    assert [spans.end_at(n) for n in (9, 10, 19, 20, 45)] == [9, 20, 20, 20, 50]
    assert list(spans.between(15, 45)) == [(15, 20), (40, 45)]
    assert list(spans.between(20, 40)) == []
    assert list(Spans().between(0, 100)) == []
