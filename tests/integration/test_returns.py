"""Probes at the returns of functions, in whatever way they are left; the program itself counts its returns as well."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

FUNCTIONS = (
    "factorial", "leaf", "branches", "jumper", "tail", "tail_indirect", "tail_maybe", "tail_jumper", "even", "odd",
    "partly", "structure_tail", "table_of", "forked",
)  # fmt: skip

KINDS = {"O1": ("-O1",), "O2": ("-O2",), "O3 pie": ("-O3", "-pie", "-fPIE"), "Os static": ("-Os", "-static")}


def program_of(module: str, functions: tuple[str, ...]) -> str:
    definitions = (
        f"offset = {f}\nreturn = yes\nminor = {n}\npush r, retval\nlog 1\nexit\n" for n, f in enumerate(functions)
    )
    return f"name = {module}\n" + "".join(definitions)


def own_counts(output: str) -> dict[str, tuple[int, int]]:
    """Return what a program printed: of each function how often it returned, and the sum of what it returned."""
    lines = re.findall(r"^(\w+) (\d+) (\d+)$", output, re.MULTILINE)
    return {name: (int(count), int(total)) for name, count, total in lines}


def seen(result: Result, functions: tuple[str, ...], size: int) -> dict[str, tuple[int, int]]:
    """Return the same from the records."""
    return {
        name: (result.counts[n].hits, sum(words[0] for words in result.words(n, size)) & 0xFFFFFFFF)
        for n, name in enumerate(functions)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_every_return_is_one_hit_with_its_value(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    program = build("returns.c", *KINDS[kind], i386=i386)
    result = run.command(program_of("returns", FUNCTIONS), program, 8, 12)
    expected = own_counts(result.stdout)
    expected["structure_tail"] = expected.pop("structure")
    found = seen(result, FUNCTIONS, 4 if i386 else 8)
    # A structure is returned in memory: only how often is compared.
    assert found["structure_tail"][0] == expected["structure_tail"][0]
    del found["structure_tail"], expected["structure_tail"]
    assert found == expected
    assert all(c.hits == c.records + c.lost for c in result.counts.values())
    assert {r["function"] for r in result.records} == set(FUNCTIONS)


def test_returns_are_counted_where_exceptions_leave_functions(build: Builder, run: Runner) -> None:
    program = build("throws.cpp", "-O2", "-lstdc++")
    functions = ("thrower", "hands_over", "cleans_up", "nested")
    result = run.command(program_of("throws", functions), program, 4, 60)
    assert seen(result, functions, 8) == own_counts(result.stdout)


def test_the_handler_sees_the_state_just_after_the_return(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    source = (
        "name = hotloop\noffset = tick\nminor = 1\npush r, sp\npush mem, u64\npush r, sp\nlog 2\nexit\n"
        "offset = tick\nreturn = yes\nminor = 2\npush r, pc\npush r, sp\nlog 2\nexit\n"
    )
    result = run.command(source, program, 20)
    entries = [(stack + 8, address) for stack, address in result.words(1)]
    assert entries == [tuple(words) for words in result.words(2)]
    assert [r["minor"] for r in result.records] == [1, 2] * 20
    assert {(r["symbol"], r["function"], r["minor"], r.get("at_return", False)) for r in result.records} == {
        ("tick", "tick", 1, False),
        ("tick", "tick", 2, True),
    }
    assert re.search(r"^0,2 +tick \(return\) +20 +20 +0 +0 +emulated$", result.stderr, re.MULTILINE)


def test_a_handler_may_change_what_a_function_returns(build: Builder, run: Runner) -> None:
    source = "name = many\noffset = many_[0-4]\nreturn = yes\npush 1000000\npop r, rax\nexit\n"
    result = run(source, ["--exit-status", "--", str(build("many.c")), "1"], ["--allow-write"])
    assert result.status == 0, result.stderr
    assert int(result.stdout) == sum(range(5, 10_000)) + 5 * 1_000_000


def test_passcount_and_maxhits_are_of_returns_and_leave_the_entry_alone(build: Builder, run: Runner) -> None:
    source = (
        "name = returns\noffset = tail\nminor = 1\nexit\n"
        "offset = tail\nreturn = yes\nminor = 2\npasscount = 3\nmaxhits = 4\npush r, retval\nlog 1\nexit\n"
    )
    result = run.command(source, build("returns.c", "-O2"), 1, 30)
    assert result.words(2) == [[2 * n + 3] for n in range(3, 7)]
    rows = re.findall(r"^0,(\d) +tail(?: \(return\))? +(\d+) +(\d+) +0 +(\d+) +\S", result.stderr, re.MULTILINE)
    assert rows == [("1", "30", "30", "0"), ("2", "7", "4", "3")]


def test_entry_and_return_of_ten_thousand_functions(build: Builder, run: Runner) -> None:
    source = "name = many\noffset = many_*\nminor = 1\nexit\noffset = many_*\nreturn = yes\nminor = 2\nexit\n"
    result = run.command(source, build("many.c"), 1)
    assert result.stdout == "49995000\n"
    assert [(r["minor"], r["function"]) for r in result.records] == [
        (minor, f"many_{n}") for n in range(10_000) for minor in (1, 2)
    ]


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_every_tail_call_returns_wherever_its_caller_stands_in_its_page(
    build: Builder, run: Runner, engine: str
) -> None:
    if engine == "ebpf":
        require_bpf()
    library = build("tailcalled.c", "-O2", "-fPIC", "-shared", name="libtailcalled.so")
    linked = ("-L" + str(library.parent), "-ltailcalled", f"-Wl,-rpath,{library.parent}")
    program = build("tailcalls.c", "-O2", *linked)
    plain = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    own = dict(re.findall(r"^(\w+) (\d+)$", plain, re.MULTILINE))
    definitions = (f"offset = {name}\nreturn = yes\nminor = {n}\nexit\n" for n, name in enumerate(own))
    result = run("name = tailcalls\n" + "".join(definitions), ["--", str(program)], ["--engine", engine])
    assert {name: result.counts[n].hits for n, name in enumerate(own)} == {name: int(n) for name, n in own.items()}
    assert all(c.hits == c.records for c in result.counts.values()), result.stderr


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_tail_call_returns_on_another_thread_or_is_missed_and_counted(
    build: Builder, run: Runner, engine: str
) -> None:
    program = build("tailcoroutines.c", "-O2")
    names = ("to_suspended", "starts")
    definitions = (f"offset = {name}\nreturn = yes\nminor = {n}\nexit\n" for n, name in enumerate(names))
    result = run("name = tailcoroutines\n" + "".join(definitions), ["--", str(program)], ["--engine", engine])
    assert (result.counts[0].hits, result.counts[0].records) == (3, 3), result.stderr
    assert (result.counts[1].hits, result.counts[1].records) == (3, 0), result.stderr
    assert (
        "0,1  3 hits of starts (return) ran no handler: too many were in progress, the CPU was running a handler, the "
        "process was changing its mappings, or a tail call returned to a place where no breakpoint can be"
    ) in result.stderr


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the system's python3: apt-get install python3")
def test_every_call_into_a_real_library_returns(run: Runner) -> None:
    command = ["/usr/bin/python3", "-c", "import hashlib, ssl\nprint(hashlib.sha3_256(b'x' * 5000).hexdigest())"]
    plain = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    source = 'name = "libcrypto.so.3"\noffset = *\nminor = 1\nexit\noffset = *\nreturn = yes\nminor = 2\nexit\n'
    result = run(source, ["--exit-status", "--", *command])
    assert (result.status, result.stdout) == (0, plain), result.stderr
    rows = re.findall(r"^0,(\d) +(\w+)(?: \(return\))? +(\d+) ", result.stderr, re.MULTILINE)
    entries, returns = ({name: int(hits) for minor, name, hits in rows if minor == which} for which in "12")
    assert len(entries) > 100
    assert entries == returns


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt-get install gdb")
def test_a_core_is_of_the_moment_after_the_return(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    source = "name = hotloop\noffset = tick\nreturn = yes\nminor = 1\npush r, pc\npush r, retval\nlog 2\nexit 3\n"
    result = run.command(source, program, 30, options=["--allow-write"], cwd=tmp_path)
    assert result.counts[1].hits == 1
    (core,) = tmp_path.glob("core.dprobes.*")
    command = ["gdb", "-nx", "-batch", "-ex", "p/d $pc", "-ex", "p/d $rax", str(program), str(core)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value, address = result.words(1)[0]
    assert re.findall(r"^\$\d = (\d+)$", shown, re.MULTILINE) == [str(address), str(value)]
