"""Where a breakpoint at a function's beginning may move, and the ways into the function that forbid it."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest

from dprobes.target.code.machine_code import decode_at, first_instructions
from dprobes.target.code.uprobe_sites import _has_near_branch, _near_branch_targets, cheap_sites
from dprobes.target.matching_functions import matching_functions
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from dprobes.target.code.machine_code import DecodedInstruction
    from unit.target.conftest import Toolbox

ASSEMBLY = """
.text
.macro function name
.globl \\name
.type \\name, @function
\\name:
.cfi_startproc
.endm
.macro finish name
ret
.cfi_endproc
.size \\name, . - \\name
.p2align 4
.endm
.macro pushed
push %rbp
.cfi_def_cfa_offset 16
.endm
.macro popped
pop %rbp
.cfi_def_cfa_offset 8
.endm

function marked                 # 4
  endbr64
  pushed
  popped
finish marked
function two_bytes              # 4
  endbr64
  push %r12
  pop %r12
finish two_bytes
function patchable              # 5
  .byte 0x0f, 0x1f, 0x44, 0, 0
  pushed
  popped
finish patchable
function marked_and_patchable   # 9
  endbr64
  .byte 0x0f, 0x1f, 0x44, 0, 0
  pushed
  popped
finish marked_and_patchable
function jumping                # 4
  endbr64
  jmp 1f
1: inc %eax
finish jumping
function emulated               # 0
  pushed
  popped
finish emulated
function nop_is_emulated        # 0
  nop
  pushed
  popped
finish nop_is_emulated
function moving                 # 0
  endbr64
  mov %rdi, %rax
finish moving
function with_effect            # 0
  sub $8, %rsp
  push %rax
  add $16, %rsp
finish with_effect
function calling                # 0
  endbr64
  call marked
finish calling
function loop                   # 0
  endbr64
1: push %rax
  pop %rax
  dec %edi
  jnz 1b
finish loop
function long_loop              # 0
  endbr64
1: push %rax
  pop %rax
  .fill 200, 1, 0x90
  dec %edi
  jnz 1b
finish long_loop
function count_loop             # 0
  endbr64
1: push %rax
  pop %rax
  loop 1b
finish count_loop
function between                # 0
  endbr64
1: .byte 0x0f, 0x1f, 0x44, 0, 0
  pushed
  popped
  dec %edi
  jnz 1b
finish between
function entered_from_afar      # 0
  endbr64
.Lafar:
  pushed
  popped
finish entered_from_afar
function entered_by_call        # 0
  endbr64
.Lcalled:
  pushed
  popped
finish entered_by_call
function entered_from_before    # 4
  inc %eax
  jmp .Lbehind
finish entered_from_before
function behind                 # 0
  endbr64
.Lbehind:
  push %rax
  pop %rax
finish behind
function far                    # 0
  .fill 70000, 1, 0x90
  jz .Lafar
  call .Lcalled
finish far
function named                  # 0
  endbr64
.globl inner
.type inner, @function
inner:
  pushed
  popped
.size inner, . - inner
finish named
function table                  # 4
  endbr64
  pushed
  lea 1f(%rip), %rax
  notrack jmp *%rax
1: popped
finish table
function table_at_entry         # 0
  endbr64
  pushed
  popped
  lea 1f(%rip), %rax
  notrack jmp *%rax
1: inc %eax
finish table_at_entry
function tail_call              # 4
  endbr64
  pushed
  popped
  jmp *%rax
finish tail_call
function tail_call_unmarked     # 0
  .byte 0x0f, 0x1f, 0x44, 0, 0
  pushed
  popped
  jmp *%rax
finish tail_call_unmarked
function table_with_frame       # 5
  .byte 0x0f, 0x1f, 0x44, 0, 0
  pushed
  lea 1f(%rip), %rax
  jmp *%rax
1: popped
finish table_with_frame
function distance_looks_like_jump  # 4
  endbr64
  pushed
  lea -0x1f0001(%rip), %rax
  popped
finish distance_looks_like_jump
function data_and_jump          # 0
  endbr64
  pushed
  popped
  jmp 1f
  .byte 0x06, 0x07, 0x06
1: jmp *%rax
finish data_and_jump

.globl cut                      # 0
.type cut, @function
cut: endbr64
.size cut, . - cut
.cfi_startproc
  push %rax
  pop %rax
  ret
.cfi_endproc
.p2align 4
.globl no_frames                # 0
.type no_frames, @function
no_frames:
  endbr64
  push %rax
  pop %rax
  notrack jmp *%rax
.size no_frames, . - no_frames
.p2align 4
.globl no_size                  # 0
.type no_size, @function
no_size:
  endbr64
  push %rax
  pop %rax
  ret
"""


@pytest.fixture(scope="module")
def assembled(tools: Toolbox) -> Module:
    (tools.directory / "cheap.s").write_text(ASSEMBLY)
    tools.run("gcc", "-nostdlib", "-shared", "cheap.s", "-o", "cheap.so")
    return Module.load(tools.directory / "cheap.so")


EXPECTED = {
    name: int(distance)
    for name, distance in re.findall(r"^(?:function|\.globl) (\w+) +# (\d+)$", ASSEMBLY, re.MULTILINE)
    if name != "entered_from_before"  # which has no mark
}


def cheap_site(module: Module, instruction: DecodedInstruction) -> int:
    return cheap_sites(module, [instruction])[0]


def site_of(module: Module, name: str) -> int:
    return cheap_site(module, decode_at(module, module.file_offset(module.address_of(name))))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_site_moves_only_if_nothing_enters_behind_it(assembled: Module, name: str) -> None:
    assert site_of(assembled, name) == EXPECTED[name]


def test_many_sites_get_the_answers_that_single_ones_get(assembled: Module) -> None:
    offsets = [assembled.file_offset(assembled.address_of(name)) for name in EXPECTED]
    assert cheap_sites(assembled, list(first_instructions(assembled, offsets))) == list(EXPECTED.values())


def test_an_instruction_that_begins_no_function_stays(assembled: Module) -> None:
    start = assembled.file_offset(assembled.address_of("marked_and_patchable"))
    assert cheap_site(assembled, decode_at(assembled, start + 4)) == 0


@pytest.mark.parametrize("bits", [64, 32])
def test_no_branch_that_objdump_shows_leads_to_a_new_site(tools: Toolbox, bits: int) -> None:
    source = """
    extern int other(int); extern int (*chosen)(int);
    int repeat(int n) { while (n) n = other(n); return n; }
    int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }
    int tail(int n) { int k = other(n); return chosen(k + other(k)); }
    int choose(int n) { int k = other(n); switch (n) {
        case 0: return other(k); case 1: return other(k) + 3; case 2: k = other(9); break; case 3: return k * 7;
        case 4: return other(k - n); case 5: return k ^ 5; case 6: return other(n) << 2; default: return -1; }
        return other(k + n); }
    """
    (tools.directory / "marked.c").write_text(source)
    compiler = "gcc" if bits == 64 else "i686-linux-gnu-gcc"
    path = tools.directory / f"marked{bits}.so"
    tools.run(compiler, "-O2", "-fcf-protection=full", "-fPIC", "-shared", "-nostdlib", "marked.c", "-o", path)
    module = Module.load(path)
    functions, _ = matching_functions(module, "*")
    distances = cheap_sites(module, list(first_instructions(module, (function.offset for function in functions))))
    moved = {function.name: distance for function, distance in zip(functions, distances, strict=True) if distance}
    assert "choose" in moved
    assert len(moved) > 1
    assert set(moved.values()) == {4}
    targets = re.findall(r"\b(?:j\w+|loop\w*|call) +(?:0x)?([0-9a-f]+) <", tools.run("objdump", "-d", path))
    sites = {module.address_of(name) + distance for name, distance in moved.items()}
    assert len(targets) > 10
    assert sites.isdisjoint(int(target, 16) for target in targets)


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_to_look_for_branches_find_the_same(seed: int) -> None:
    choose = random.Random(seed)
    size = choose.choice((300, 70_000, 200_000))
    code = bytearray(choose.choices((0, 0xFF, 0xE8, 0xE9, 0x0F, 0x84, 0x90, 1, 2), k=size))
    targets = set(choose.sample(range(size), 20))
    for target in choose.sample(sorted(targets), 10):
        place = choose.randrange(2, size - 4)
        code[place - 1] = choose.choice((0xE8, 0x84))
        code[place - 2] = 0x0F
        code[place : place + 4] = (target - place - 4).to_bytes(4, "little", signed=True)
    data = bytes(code)
    found = set(_near_branch_targets(data, 0x1000, {0x1000 + target for target in targets}))
    assert found
    assert {0x1000 + target for target in targets if _has_near_branch(data, target)} == found


def test_other_processors_have_no_cheap_sites(assembled: Module) -> None:
    instruction = decode_at(assembled, assembled.file_offset(assembled.address_of("marked")))
    assembled.elf.machine = "aarch64"
    try:
        assert cheap_site(assembled, instruction) == 0
    finally:
        assembled.elf.machine = "x86_64"
