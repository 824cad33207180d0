# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.target.elf.elf_file import ElfFile
from unit.dpc.modules.debugprograms import compiled, errors_of, rpn_of

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include <string.h>
struct pair { int a; long b; };
union word { long whole; char bytes[8]; };
enum color { RED, GREEN = 5 };
static int hidden = 3;
_Thread_local int own_each;
volatile int sink;
__attribute__((noipa)) void other(long x) { sink = x; }
__attribute__((noipa)) int gone(int number, int second) { other(1); other(2); return hidden++ + (int)own_each; }
__attribute__((noipa)) int real(double weight, int count, float *table) { return weight > count + table[0]; }
__attribute__((noipa)) int whole(struct pair pair, enum color color) { return pair.a + pair.b + color; }
__attribute__((noipa)) int wide(struct pair a, struct pair b, struct pair c, struct pair d) {
    return a.a + d.b + b.a + c.a;
}
__attribute__((noipa)) int pushed(int pid, int comm) { return pid + comm; }
int main(int argc, char **argv) {
    struct pair pair = { argc, 2 };
    return gone(argc, 2) + real(1.5, argc, (float *)argv) + whole(pair, GREEN) + wide(pair, pair, pair, pair)
        + pushed(1, 2);
}
"""


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> ElfFile:
    return ElfFile.open(compiled(tmp_path_factory.mktemp("optimized"), SOURCE, "-O2"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ElfFile:
    return ElfFile.open(compiled(tmp_path_factory.mktemp("plain"), SOURCE, "-O0"))


def pushes(elf: ElfFile, text: str) -> list[str]:
    """Return what a handler pushes and computes, without its frame."""
    lines = [line.strip() for line in rpn_of(elf, text).splitlines()]
    start = lines.index("vars = 1") if "vars = 1" in lines else 0
    body = lines[start:]
    return [line for line in body if re.match(r"(push|pbl|pzl|add|shl|shr|and|or)\b", line)]


def test_parameters_are_registers_at_the_entry(optimized: ElfFile, plain: ElfFile) -> None:
    for elf in (optimized, plain):
        text = "static long kept; gone { kept = second; }"
        assert ["push r, arg1", "pbl 32"] == pushes(elf, text)


def test_floating_point_parameters_take_no_place_of_others(optimized: ElfFile, plain: ElfFile) -> None:
    for elf in (optimized, plain):
        assert ["push r, arg0", "pbl 32"] == pushes(elf, "static long kept; real(w, n) { kept = n; }")
        assert ["push r, arg1"] == pushes(elf, "static long kept; real { kept = (long)table; }")


def test_structures_in_registers_have_members(plain: ElfFile) -> None:
    assert ["push r, arg1"] == pushes(plain, "static long kept; whole { kept = pair.b; }")
    assert ["push r, arg0", "pbl 32"] == pushes(plain, "static long kept; whole { kept = pair.a; }")
    assert ["push r, arg2", "pzl 32"] == pushes(plain, "static long kept; whole { kept = color; }")


def test_a_parameter_that_is_nowhere_is_not_taken_from_where_the_abi_has_it(optimized: ElfFile) -> None:
    assert "'pair' is not known here: optimized out | None" == errors_of(optimized, "whole { pair.b; }")
    assert "'p' is not known here: optimized out | None" == errors_of(optimized, "whole(p) { p.b; }")
    assert "'p' is not known here: optimized out | None" == errors_of(optimized, "whole(long p) { p; }")


def test_a_function_has_no_more_parameters_than_its_own(optimized: ElfFile) -> None:
    found = errors_of(optimized, "gone(a, b, c) { c; }")
    assert "'c' is not known here: the function has 2 parameters | None" == found


def test_arguments_on_the_stack_are_read_there(optimized: ElfFile, plain: ElfFile) -> None:
    for elf in (optimized, plain):
        assert "push mem, u64" in pushes(elf, "static long kept; wide { kept = d.b; }")


def test_parameters_of_returns_are_those_of_the_entry(optimized: ElfFile) -> None:
    text = "static long kept; return gone { kept = second; }"
    assert ["push entry, arg1", "pbl 32"] == pushes(optimized, text)[:2]
    assert ["push r, retval", "pbl 32"] == pushes(optimized, "static long kept; return gone { kept = retval; }")


def test_what_every_probe_has_comes_before_unlisted_parameters(optimized: ElfFile) -> None:
    assert ["push pid", "pbl 32"] == pushes(optimized, "static long kept; pushed { kept = pid; }")
    assert ["push r, arg0", "pbl 32"] == pushes(optimized, "static long kept; pushed(pid) { kept = pid; }")


def test_what_the_program_declares_comes_first(optimized: ElfFile) -> None:
    assert ["push r, arg1", "pzl 8"] == pushes(
        optimized, "static long kept; gone(int a, unsigned char b) { kept = b; }"
    )
    assert ["push 7"] == pushes(optimized, "enum { GREEN = 7 }; static long kept; gone { kept = GREEN; }")
    assert ["push 5"] == pushes(optimized, "static long kept; gone { kept = GREEN; }")


def test_variables_of_the_module_are_symbols(optimized: ElfFile) -> None:
    expected = ["push hidden", "push mem, u32", "pbl 32"]
    assert expected == pushes(optimized, "static long kept; gone { kept = hidden; }")[:3]
    assert expected == pushes(optimized, "static long hidden; gone { hidden = ::hidden; }")[:3]
    assert expected == pushes(optimized, "static long hidden; gone { hidden = own:hidden; }")[:3]
    assert expected == pushes(optimized, 'static long hidden; gone { hidden = "own":hidden; }')[:3]


def test_a_colon_may_be_that_of_a_choice_or_a_label(optimized: ElfFile) -> None:
    text = "enum { own = 1 }; static long kept; gone { kept = number ? own:hidden; }"
    assert "push hidden" in pushes(optimized, text)
    text = "enum { own = 1 }; static long kept; gone { switch (number) { case own:kept = 9; } }"
    assert "push 9" in pushes(optimized, text)


ELSEWHERE = "'hidden' is in 'other', and this handler in 'own' | a handler reads the variables of its own module"
NO_ARITHMETIC = "there is no floating-point arithmetic: this is 'double'"
UNNAMED = "'none' is not defined | known at this place: number, second; no symbol of the module has it, either"
AT_RETURN = (
    "'weight' is not known here: not known at the return: at the entry it is not in a register"
    " | keep it at the entry, in a thread variable"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone { own_each; }", "'own_each' is not known here: thread-local: each thread has its own | None"),
        ("real { weight; }", f"{NO_ARITHMETIC} | its bits are reg(\"xmm0\")"),
        ("gone { none; }", UNNAMED),
        ("gone { other:hidden; }", ELSEWHERE),
        ("return real { weight; }", AT_RETURN),
    ],
)  # fmt: skip
def test_names_that_mean_nothing_here_are_errors(optimized: ElfFile, text: str, message: str) -> None:
    assert message == errors_of(optimized, text)


def test_structures_in_registers_are_no_values(plain: ElfFile) -> None:
    found = [errors_of(plain, text) for text in ("whole { pair; }", "whole { pair.c; }")]
    assert [
        "a whole 'struct pair' is not a value: use its members | None",
        "'struct pair' has no member 'c' | None",
    ] == found


def test_an_error_says_where_a_variable_is_known(optimized: ElfFile) -> None:
    # Behind both calls nothing has the parameter any more.
    import subprocess

    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "--disassemble=gone", optimized.path], capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    calls = [int(line.split(":")[0], 16) for line in listing.splitlines() if "call" in line and ":" in line]
    start = int(re.search(r"^([0-9a-f]+) <gone>", listing, re.MULTILINE)[1], 16)  # type: ignore[index]
    found = errors_of(optimized, f"gone+{calls[1] - start} {{ number; }}")
    reason, hint = found.split(" | ")
    assert "'number' is not known here: known only at the entry of the function" == reason
    assert re.fullmatch(r"it is known from gone\+0x0 to \+0x[0-9a-f]+", hint)


def test_a_block_is_compiled_for_each_point_whose_variables_differ(optimized: ElfFile) -> None:
    source = rpn_of(optimized, "static long kept; gone(a), other { kept = a; }")
    assert source.count("pbl 32") == 1
    source = rpn_of(optimized, "static long kept; gone(a), pushed { kept = a; }")
    assert source.count("push r, arg0") == 2


def test_a_module_without_debug_information_has_words(optimized: ElfFile, tmp_path: Path) -> None:
    import subprocess

    bare = tmp_path / "bare"
    subprocess.run(["strip", "-g", "-R", ".note.gnu.build-id", "-o", bare, optimized.path], check=True)
    assert ["push r, arg1"] == pushes(ElfFile.open(bare), "static long kept; gone(a, b) { kept = b; }")
    assert errors_of(ElfFile.open(bare), "gone { number; }").startswith("'number' is not defined | ")


def test_a_warning_about_several_points_is_reported_once(optimized: ElfFile) -> None:
    from dprobes.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    rpn_of(optimized, "static long kept; gone(a), other { a + 1; kept = a; }", diagnostics)
    assert ["this has no effect"] == [each.message for each in diagnostics]


def test_a_source_file_has_its_own_variables_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text(
        "int level = 7;\nstatic int depth = 8;\nint second(int n) { return level + depth * n; }\n"
    )
    source = (
        "static int level = 1;\nstatic int depth = 2;\nint second(int n);\nextern int apart;\n"
        "int first(int n) { level += n; depth += level; return second(level) + depth; }\n"
        "int main(void) { return first(3); }\n"
    )
    elf = ElfFile.open(compiled(tmp_path, source, "-O0", "-no-pie", "other.c"))

    def rpn(function: str, name: str) -> str:
        return rpn_of(elf, f'own:{function} {{ printf("%d", {name}); }}').partition("printf")[2]

    seen = {rpn(function, name) for function in ("first", "second") for name in ("level", "depth")}
    assert len(seen) == 4


def test_a_variable_outside_of_its_block_is_none_of_another_source_file(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("static char inner[9];\nchar *second(int n) { return inner + n; }\n")
    source = (
        "char *second(int n);\nint first(int n) {\n"
        "    n += 2;\n    { int inner = n * 3; n += *second(inner); inner += n; n ^= inner; }\n    return n;\n}\n"
        "int main(void) { return first(3); }\n"
    )
    elf = ElfFile.open(compiled(tmp_path, source, "-O0", "-no-pie", "other.c"))
    message = errors_of(elf, 'own:first { printf("%d", inner); }')
    assert message.startswith("'inner' is not known here: outside of its block | ")
    assert "push inner" in rpn_of(elf, 'own:second { printf("%c", inner[0]); }')
