"""Where functions are left, in code that compilers make and in code that nobody could follow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.code.function_exits import CallFrames, ExitKind, Exits, function_exits
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from unit.target.conftest import Toolbox

SOURCE = """
extern void abort(void);
#define OPAQUE __attribute__((noipa, used))
OPAQUE int leaf(int n) { return n + 1; }
OPAQUE int tail(int n) { return leaf(n * 2); }
static int (*volatile chosen)(int) = leaf;
OPAQUE int tail_indirect(int n) { return chosen(n); }
OPAQUE int tail_maybe(int n) { return n & 4 ? 1 : leaf(n); }
OPAQUE int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }
OPAQUE int choose(int n) {
    char t[80]; for (int k = 0; k < 80; k++) t[k] = leaf(n);
    switch (n) {
        case 0: return leaf(3) + t[n]; case 1: return t[4]; case 2: return leaf(t[5]) - 1; case 3: return t[6] * 3;
        case 4: return t[9] << 1; case 5: return 5 + t[1]; case 6: return t[7] ^ t[8]; default: return -1;
    }
}
extern void note(int) __attribute__((cold));
OPAQUE void note(int n) { chosen = n ? leaf : 0; }
OPAQUE int partly(int n) {
    volatile int kept = n;
    if (__builtin_expect(n == 77, 0)) { note(n); note(kept); return kept + leaf(n); }
    return leaf(n) + kept;
}
OPAQUE __attribute__((noreturn)) void die(void) { note(1); abort(); }
"""

ASSEMBLY = """
.text
.macro function name
.globl \\name
.type \\name, @function
\\name:
.cfi_startproc
.endm
.macro finish name
.cfi_endproc
.size \\name, . - \\name
.endm
function data_inside
  jmp 1f
  .byte 0x06, 0x07
1: ret
finish data_inside
function runs_on
  nop
  mov %rdi, %rax
finish runs_on
function returns_far
  lret
finish returns_far
function cut_off
  .cfi_endproc
  .size cut_off, 2
  mov $1, %eax
  ret
function inside_another
  jmp . + 3
  mov $0xc3c3c3c3, %eax
  ret
finish inside_another
function passes_over_a_prefix
  test %edi, %edi
  jz 1f
  lock
1: decl (%rsi)
  rep ret
finish passes_over_a_prefix
function drops_arguments
  ret $8
finish drops_arguments
function shares
  push %rbx
  .cfi_adjust_cfa_offset 8
  jmp shared + 1
finish shares
function shared
  push %rbx
  .cfi_adjust_cfa_offset 8
  pop %rbx
  .cfi_adjust_cfa_offset -8
  ret
finish shared
.globl no_table
.type no_table, @function
no_table:
  jmp *%rdi
.size no_table, . - no_table
.globl no_size
.type no_size, @function
no_size:
  ret
.globl measured
.type measured, @function
measured:
  .cfi_startproc
  ret
  .cfi_endproc
"""

REFUSED = {
    "data_inside": "it holds data between its instructions",
    "runs_on": "it continues into the code after it",
    "returns_far": "it does not return as functions do, but far or from an interrupt",
    "cut_off": "its size ends inside an instruction",
    "inside_another": "it has a jump into the middle of an instruction",
    "shares": "it shares code with 'shared'",
    "no_table": "it has a jump, and no unwind table shows whether that leaves it",
    "no_size": "its size is not known",
}


@pytest.fixture(scope="module", params=["shared", "static"])
def compiled(tools: Toolbox, request: pytest.FixtureRequest) -> Module:
    if request.param == "shared":
        return Module.load(tools.build("libexits.so", {"exits.c": SOURCE}, "-shared", "-fPIC", "-O2"))
    # A static program has no table of its unwind information.
    main = SOURCE + "int main(void) { return 0; }"
    return Module.load(tools.build("exits", {"exits_main.c": main}, "-static", "-O2"))


@pytest.fixture(scope="module")
def assembled(tools: Toolbox) -> Module:
    (tools.directory / "exits.s").write_text(ASSEMBLY)
    tools.run("gcc", "-shared", "-nostdlib", "-o", "libasm.so", "exits.s")
    return Module.load(tools.directory / "libasm.so")


def exits_of(module: Module, name: str) -> Exits:
    (symbol,) = module.symbols.lookup(name)
    return function_exits(module, CallFrames(module.elf), symbol.address, symbol.size)


def disassembled(tools: Toolbox, path: Path, *names: str) -> dict[int, str]:
    """Return the instructions of functions by address, as objdump sees them."""
    found = {}
    for name in names:
        text = tools.run("objdump", "-d", "--no-show-raw-insn", f"--disassemble={name}", path)
        found.update({int(a, 16): i for a, i in re.findall(r"^ +([0-9a-f]+):\t(.*)$", text, re.MULTILINE)})
    return found


def test_the_return_instructions_are_those_that_objdump_shows(tools: Toolbox, compiled: Module) -> None:
    for name in ("leaf", "factorial", "choose", "tail_maybe"):
        code = disassembled(tools, compiled.path, name)
        returns = {e.address for e in exits_of(compiled, name).exits if e.kind is ExitKind.RETURN}
        assert returns == {address for address, text in code.items() if text.startswith("ret")}, name


@pytest.mark.parametrize("name", ["tail", "tail_indirect", "tail_maybe"])
def test_tail_calls_are_jumps_out(tools: Toolbox, compiled: Module, name: str) -> None:
    code = disassembled(tools, compiled.path, name)
    jumps = [e for e in exits_of(compiled, name).exits if e.kind is ExitKind.JUMP]
    assert len(jumps) == 1
    assert code[jumps[0].address].startswith("j")


def test_a_switch_is_no_way_out(compiled: Module) -> None:
    assert {e.kind for e in exits_of(compiled, "choose").exits} == {ExitKind.RETURN}


def test_a_cold_part_belongs_to_its_function(tools: Toolbox, compiled: Module) -> None:
    found = exits_of(compiled, "partly")
    code = disassembled(tools, compiled.path, "partly", "partly.cold")
    assert len(found.ranges) == 2
    assert [e.address for e in found.exits] == sorted(a for a, text in code.items() if text.startswith("ret"))


def test_the_cold_part_is_found_without_its_name(tools: Toolbox, compiled: Module) -> None:
    found = exits_of(compiled, "partly")
    path = tools.directory / f"{compiled.path.name}.nocold"
    tools.run("objcopy", "--strip-symbol=partly.cold", compiled.path, path)
    assert exits_of(Module.load(path), "partly") == found


def test_a_jump_to_the_first_instruction_is_noted(tools: Toolbox, assembled: Module, compiled: Module) -> None:
    assert not exits_of(compiled, "choose").goes_back
    (tools.directory / "back.s").write_text(
        ".text\n.globl again\n.type again, @function\nagain:\n.cfi_startproc\n dec %edi\n jnz again\n ret\n"
        ".cfi_endproc\n.size again, . - again\n"
    )
    tools.run("gcc", "-shared", "-nostdlib", "-o", "libback.so", "back.s")
    assert exits_of(Module.load(tools.directory / "libback.so"), "again").goes_back


def test_a_function_that_never_returns_has_no_exit(compiled: Module) -> None:
    assert exits_of(compiled, "die").exits == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused(assembled: Module, name: str) -> None:
    with pytest.raises(TargetError) as caught:
        exits_of(assembled, name)
    assert caught.value.message == REFUSED[name]


def test_special_returns(assembled: Module) -> None:
    assert [e.raw for e in exits_of(assembled, "passes_over_a_prefix").exits] == [b"\xf3\xc3"]
    assert [e.raw for e in exits_of(assembled, "drops_arguments").exits] == [b"\xc2\x08\x00"]


def test_the_frame_description_gives_the_size_that_a_symbol_lacks(assembled: Module) -> None:
    assert [e.raw for e in exits_of(assembled, "measured").exits] == [b"\xc3"]
