"""Programs in DProbes C on real processes, with both engines, and the words of docs/reference/dpc.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT

if TYPE_CHECKING:
    from integration.support import Builder

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "reference" / "dpc.md").read_text()
TARGET = """
import ctypes, os
libc = ctypes.CDLL(None)
for number in range(5):
    libc.abs(number - 2)
os.chdir("/usr/lib")
"""


def dprobes(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def printed(text: str, *options: str) -> list[str]:
    """Return what a program prints of a run of ``TARGET``."""
    done = dprobes("run", "-e", text, *options, "--", sys.executable, "-S", "-c", TARGET)
    return done.stdout.splitlines()


@pytest.mark.parametrize("engine", ENGINES)
def test_values_are_printed_as_c_has_them(engine: str) -> None:
    text = 'libc.so.6:abs(int n) when (n != 0) { printf("abs %d %u", n, n < 0 ? -n : n * 2); }'
    lines = printed(text, "--engine", engine)
    assert [line.split("abs ")[1] for line in lines] == ["-2 2", "-1 1", "1 2", "2 4"]


@pytest.mark.parametrize("engine", ENGINES)
def test_strings_are_compared_and_printed(engine: str) -> None:
    text = 'libc.so.6:chdir(char *path) when (startswith(str(path), "/usr")) { printf("to %s", path) }'
    (line,) = printed(text, "--engine", engine)
    assert line.endswith("to /usr/lib")


@pytest.mark.parametrize("engine", ENGINES)
def test_functions_loops_and_variables(engine: str) -> None:
    text = """
    static long sum, seen[4];
    int twice(int x) { return x + x; }
    libc.so.6:abs(int n) {
        seen[sum & 3] = n;
        for (int i = 0; i < n; i++) sum += twice(i + 1);
        if (n == 2) printf("%d", sum);
    }
    """
    assert printed(text, "--engine", engine)[-1].split()[-1] == "8"


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_are_kept_where_the_hit_is(engine: str) -> None:
    text = "libc.so.6:abs(int n) { @[n < 0] = count(); @sum += n * n; }"
    lines = printed(text, "--engine", engine)
    assert sorted(lines) == ["@[0]: 3", "@[1]: 2", "@sum: 10"]


@pytest.mark.parametrize("engine", [*ENGINES, "inline"])
def test_texts_in_quotes_are_keys_and_kept(engine: str) -> None:
    text = """
    static long calls;
    libc.so.6:abs(int n) {
        @calls["abs"] = count(); @by[comm, "read"]++; @sign[n < 0 ? "negative" : n ? "positive" : "zero"] = sum(n);
        @state[pid] = calls++ ? "called more than once" : "called";
        if (@state[pid] == "called") @of[@state[pid]] = count();
    }
    begin { @calls["a text of the tool"] = count(); }
    """
    lines = printed(text, "--engine", engine)
    assert [re.sub(r"python3[.0-9]*", "python", re.sub(r"state\[\d+\]", "state[N]", line)) for line in lines] == [
        "@calls[a text of the tool]: 1",
        "@calls[abs]: 5",
        "@by[python, read]: 5",
        "@sign[negative]: -3",
        "@sign[zero]: 0",
        "@sign[positive]: 3",
        "@state[N]: called more than once",
        "@of[called]: 1",
    ]


@pytest.mark.parametrize("engine", [*ENGINES, "inline"])
def test_keys_have_the_sign_of_their_type(engine: str) -> None:
    text = "libc.so.6:abs(int n) { @[n]++; @bits[(unsigned)n] = count(); } end { @[-2]++; @[-7]++; print(@); }"
    lines = printed(text, "--engine", engine)
    assert set(lines) == {
        "@[-7]: 1", "@[-2]: 2", "@[-1]: 1", "@[0]: 1", "@[1]: 1", "@[2]: 1",
        "@bits[0]: 1", "@bits[1]: 1", "@bits[2]: 1", "@bits[4294967294]: 1", "@bits[4294967295]: 1",
    }  # fmt: skip


@pytest.mark.parametrize("engine", [*ENGINES, "inline"])
def test_bytes_of_memory_are_keys(engine: str) -> None:
    text = """
    libc.so.6:chdir(char *path) when (startswith(str(path), "/usr")) {
        @[mem(path, 4)] = count(); @of[mem(path + 1, 3), str(path, 2), mem(path + 7, 2)] = count();
    }
    """
    assert printed(text, "--engine", engine) == ["@[/usr]: 1", r"@of[usr, /u…, b\x00]: 1"]


LEAKS = """
static long kept;
return take(size) { @stack[retval] = ustack(2); @size[retval] = size; @live[@stack[retval]] = sum(size); }
give(block) {
    @live[@stack[block]] -= @size[block];
    if (@stack[block]) @given = count();
    if (++kept == 1) printf("%k", @stack[block]);
    delete(@stack[block]); delete(@size[block]);
}
end { print(@live); print(@given); clear(@size); clear(@stack); print(@size); print(@stack); }
"""


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_what_a_call_stack_has_allocated_is_taken_off_when_it_is_freed(engine: str, build: Builder) -> None:
    done = dprobes("run", "-e", LEAKS, "--engine", engine, "--", str(build("allocations.c", "-fno-inline")))
    text = re.sub(r"\+0x[0-9a-f]+", "", done.stdout)
    assert text.split("]\n", 1)[1] == (
        "    many [allocations]\n    main [allocations]\n"
        "@live[\n    few [allocations]\n    main [allocations]\n]: 300\n"
        "@live[\n    many [allocations]\n    main [allocations]\n]: 1600\n"
        "@given: 20\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root")
def test_a_kept_call_stack_is_not_for_handlers_in_the_kernel(build: Builder) -> None:
    done = dprobes("run", "-e", LEAKS, "--engine", "ebpf", "--", str(build("allocations.c", "-fno-inline")), status=2)
    first = done.stderr.splitlines()
    assert first[0] == (
        "-e:3:71: error: the ebpf engine cannot run this handler: 'push' cannot look at table '@stack': "
        "its call stacks are followed outside of the kernel"
    )
    assert (
        first[-1]
        == "hint: use --engine ptrace, or addresses of callers as keys, as 'dprobes sets libc.malloc/leaks' shows"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_faults_are_counted_by_line(engine: str, tmp_path: Path) -> None:
    program = tmp_path / "faulty.dpc"
    program.write_text("""
        static long sum;
        int twice(int *p) {
            return 2 * *p;
        }
        libc.so.6:abs(int x) when (x != 0) {
            if (x == -2)
                sum += *(long *)8;
            printf("abs %d", x);
            sum += 7 / (x - 1);
            if (x == 2) sum += twice((int *)16);
            printf("never for 1 and 2");
            try { sum = 1 / (sum - sum); } catch { }
        }
    """)
    done = dprobes("run", str(program), "--engine", engine, "--", sys.executable, "-S", "-c", TARGET)
    # Nothing of the hit that ends before it prints; of the others what they have printed until then.
    lines = [line.split("]  ")[-1].strip() for line in done.stdout.splitlines()]
    assert lines == ["abs -1", "never for 1 and 2", "abs 1", "abs 2"]
    assert [line for line in done.stderr.splitlines() if "fault" in line] == [
        f"1 fault at {program}:8: memory that is not there",
        f"1 fault at {program}:10: a division by zero",
        f"1 fault at {program}:11: memory that is not there",
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_loops_without_an_end_are_faults(engine: str) -> None:
    text = 'libc.so.6:abs(int n) { if (n == 1) while (1) ; printf("%d", n); }'
    done = dprobes("run", "-e", text, "--engine", engine, "--", sys.executable, "-S", "-c", TARGET)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["-2", "-1", "0", "2"]
    assert "1 fault at -e:1: more jumps than jmpmax allows\n" in done.stderr


@pytest.mark.alone
def test_values_have_names_in_json() -> None:
    text = 'module "libc.so.6", major 7; abs(int n) when (n == 1) { printf("value=%d of %s", n, comm); }'
    done = dprobes("run", "-e", text, "--format", "json", "--", sys.executable, "-S", "-c", TARGET)
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (record["major"], record["fields"]) == (7, {"n": 1})


def test_the_module_may_be_the_command(tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text("int f(int x) { return x + 1; }\nint main(void) { return f(41) - 42; }\n")
    subprocess.run(["gcc", "-O0", "-o", str(program), str(source)], check=True)
    done = dprobes("run", "-e", 'return f(int x) { printf("f(%d) = %d", (int)x, (int)retval) }', "--", str(program))
    assert done.stdout.endswith("f(41) = 42\n")


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_of_64_bits_in_programs_of_32(engine: str, tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own32"
    source.write_text("""
        long long total = 0x100000000;
        __attribute__((noinline)) long long f(int a, long long b, int c) { total += b * a; return total - c; }
        static void leave(int status) { __asm__ volatile("int $0x80" : : "a"(1), "b"(status)); }
        void _start(void) { f(3, 5000000000, 7); f(-2, 1, 0); leave(f(1, 0, 0) == 0); }
    """)
    options = ["-m32", "-O1", "-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-fcf-protection=none"]
    subprocess.run(["gcc", *options, "-o", str(program), str(source)], check=True)
    text = """
    extern long long total; static unsigned long long sum;
    f(int a, long long b, int c) { sum += b; printf("%d %d %d %d", a, b, c, total); }
    return f { printf("= %d of %u", (unsigned long long)reg("edx") << 32 | (unsigned)retval, sum); }
    """
    done = dprobes("run", "-e", text, "--engine", engine, "--", str(program))
    assert [line.split("]  ")[-1] for line in done.stdout.splitlines()] == [
        "3 5000000000 7 4294967296",
        "= 19294967289 of 5000000000",
        "-2 1 0 19294967296",
        "= 19294967294 of 5000000001",
        "1 0 0 19294967294",
        "= 19294967294 of 5000000001",
    ]


def test_errors_are_shown_in_c() -> None:
    done = dprobes("run", "-e", 'libc.so.6:no_such_function() { printf("x") }', "--", "true", status=2)
    assert done.stderr.startswith("-e:1:1: error: ")
    assert "\n    libc.so.6:no_such_function() { printf" in done.stderr
    assert "\n    ^~~~" in done.stderr


@pytest.mark.alone
def test_a_program_is_compiled_for_other_machines(tmp_path: Path) -> None:
    program, built = tmp_path / "abs.dpc", tmp_path / "abs.ppdf"
    program.write_text('libc.so.6:abs(int n) when (n > 1) { printf("abs %d", n) }\n')
    assert dprobes("check", str(program)).stderr == ""
    rpn = dprobes("build", str(program), "--emit", "rpn").stdout
    assert '    // printf("abs %d", n)\n' in rpn
    assert dprobes("build", str(program), "--dump", "tree").stdout.startswith("ProgramTree\n")
    dprobes("build", str(program), "-o", str(built))
    done = dprobes("run", str(built), "--", sys.executable, "-S", "-c", TARGET)
    assert done.stdout.endswith("abs 2\n")
    # What was printed as RPN is the same program.
    again = tmp_path / "abs.rpn"
    again.write_text(rpn)
    assert dprobes("show", str(again)).stdout == dprobes("show", str(program)).stdout


def test_the_examples_of_the_guide_compile(tmp_path: Path) -> None:
    programs = re.findall(r"^```c\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^dprobes run -e '(.*?)'", GUIDE, re.MULTILINE)
    assert (len(programs), len(lines)) == (5, 7)
    for number, text in enumerate((*programs, *lines)):
        file = tmp_path / f"{number}.dpc"
        file.write_text(text)
        done = dprobes("build", str(file), "--emit", "rpn")
        assert done.returncode == 0, done.stderr
        assert ("offset = " in done.stdout) is not text.startswith("begin")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_hit_at_a_return_is_the_function_that_returned(engine: str, tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text(
        "int call_one(int n) { return n + 1; }\nint call_two(int n) { return call_one(n) + 1; }\n"
        "int main(void) { return call_two(1) + call_one(2) - 6; }\n"
    )
    subprocess.run(["gcc", "-O0", "-o", str(program), str(source)], check=True)
    text = f'return {program}:call_* {{ @[func] = count(); printf("%s: %d", func, retval) }}'
    # Of a process that executes another program the names are those of then.
    done = dprobes("run", "-e", text, "--engine", engine, "--", "sh", "-c", f"exec {program}")
    assert [re.sub(r"^\d.*  ", "", line) for line in done.stdout.splitlines()] == [
        "call_one [own]: 2", "call_two [own]: 3", "call_one [own]: 3", "@[call_two [own]]: 1", "@[call_one [own]]: 2",
    ]  # fmt: skip
