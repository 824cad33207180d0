"""What is said of programs in DProbes C is said in C, at its places: all of it at once, and what hits came upon."""

from __future__ import annotations

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


@pytest.fixture
def program(build: Builder) -> Path:
    return build("served.c", "-O1", "-g")


def dprobes(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dprobes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_wrong_handlers_and_wrong_places_are_told_together(program: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.dpc"
    source.write_text(f"""module "{program}";
nope(x) {{ printf("%d", x); }}
serve(req) {{ prinf("x"); }}
watch w nothing {{ printf("%d", undefined); }}
[opcode 0x11] finish {{ @++; }}
errors {{ @++; }}
""")
    done = dprobes("check", str(source))
    assert done.returncode == 2
    said = [line.removeprefix(f"{source}:") for line in done.stderr.splitlines() if not line.startswith("    ")]
    opcode = next(line for line in said if "MISMATCH" in line).split("opcode ")[1][:4]
    mismatch = next(line for line in said if "MISMATCH" in line)
    assert said == [
        f"2:1: error: '{program}' has no symbol 'nope'",
        "3:14: error: there is no function 'prinf'",
        "hint: did you mean 'printf'?",
        f"4:1: error: '{program}' has no symbol 'nothing'",
        "4:32: error: 'undefined' is not defined",
        (
            f"hint: the debug information of '{program}' has no such name; "
            "for a variable without it, declare it: extern int undefined;"
        ),
        mismatch,
        f"hint: if the place is right, write '[opcode {opcode}]' before the place",
        f"6:1: error: 'errors' in '{program}' is data, not code",
        "hint: to see accesses to it, write 'watch w errors' (or rw)",
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("seen[code + 4]++;", "an index that the array does not have"),
        ("@x = last(10 / (code - code));", "a division by zero"),
        ("@x = last(deeper(code));", "calls nested too deep"),
        ("while (code >= 0) { }", "more jumps than jmpmax allows"),
        ("@x = last(*(int *)(long)code);", "memory that is not there"),
        ('printf("%d", 10 / (code - code));', "a division by zero"),
        ('printf("%d %d", code, seen[code + 4]);', "an index that the array does not have"),
        ('if (code >= 0) printf("%d", deeper(code));', "calls nested too deep"),
    ],
)
def test_faults_have_the_words_of_c(program: Path, engine: str, statements: str, reason: str) -> None:
    source = f'module "{program}";\nstatic long seen[4];\nint deeper(int n) {{ return deeper(n + 1); }}\n'
    done = dprobes("run", "-e", f"{source}finish(code) {{ {statements} }}", "--engine", engine, "--", str(program))
    assert f"5 faults at -e:4: {reason}\n" in done.stderr


@pytest.mark.parametrize(
    ("statement", "message", "hint"),
    [
        ('printf("%d", reg("cr3"));', "'reg(\"cr3\")' needs control, debug and model-specific registers",
         "use --engine gdb=ENDPOINT, with the stub of such a machine or process"),
        ('printf("%k", kstack());', "'kstack()' needs the call stack in the kernel", "use --engine ebpf"),
    ],
)  # fmt: skip
def test_what_an_engine_lacks_is_named_as_written(program: Path, statement: str, message: str, hint: str) -> None:
    source = f'module "{program}"; finish(code) {{ {statement} }}'
    done = dprobes("run", "-e", source, "--engine", "ptrace", "--", str(program))
    assert done.returncode == 2
    assert f"error: {message}, which the ptrace engine lacks\n" in done.stderr
    assert f"hint: {hint}\n" in done.stderr


SLIPS = {
    "libc.so.6:read(fd) when (fd = 3) { @ = count(); }": (
        "-e:1:26: error: a condition assigns nothing: found '='",
        "hint: equality is '=='",
    ),
    "libc.so.6:read(fd) { printf(%d, fd); }": (
        "-e:1:29: error: expected an expression, found '%'",
        'hint: write the format in double quotes: printf("%d", x)',
    ),
    'libc.so.6:read(fd) { printf(\\"x\\"); }': (
        "-e:1:30: error: unterminated string: a quotation mark in single quotes of the shell needs no '\\' before it",
    ),
    "/tmp/a,b.so:f { @ = count(); }": (
        "-e:1:1: error: the module of '/tmp/a' is not known",
        "hint: write MODULE:FUNCTION; write a path with ',' or ':' in double quotes: \"./a,b.so\":FUNCTION",
    ),
    "nearby.so:f { @ = count(); }": (
        "-e:1:1: note: there is no module 'nearby.so' on this machine; its probes are resolved when a process maps one",
        "hint: a name without '/' is not looked for in the current directory: write \"./nearby.so\": before the place",
    ),
    "libc.so.6:read(__int128 wide) { printf(\"%d\", wide); }": (
        "-e:1:46: error: there is no arithmetic on more than 64 bits: this is '__int128'",
        'hint: its bits are reg("arg0")',
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", SLIPS)
def test_slips_of_newcomers_lead_somewhere(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nearby.so").write_bytes(Path("/proc/self/exe").read_bytes())
    said = [line for line in dprobes("check", "-e", text).stderr.splitlines() if not line.startswith("    ")]
    assert tuple(said[: len(SLIPS[text])]) == SLIPS[text]


def test_slips_on_the_command_line_lead_somewhere() -> None:
    assert dprobes("trace", "-e", "x").stderr.endswith("there is no verb 'trace'; did you mean 'run'?\n")
    text = "libc.so.6:malloc { @ = count() }"
    assert dprobes("run", text, "--", "true").stderr == (
        f"error: cannot read '{text}': no such file or directory\n"
        "hint: the text of a program is given with -e: dprobes run -e 'TEXT'\n"
    )


def test_a_function_of_two_files_is_named_with_them_in_c(tmp_path: Path) -> None:
    for name, factor in (("one.c", 2), ("two.c", 3)):
        code = f"static __attribute__((noinline)) int twin(int x) {{ return x * {factor}; }}\n"
        code += f"int call{factor}(int x) {{ return twin(x + 1) + twin(x); }}\n"
        (tmp_path / name).write_text(code)
    library = tmp_path / "libtwins.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", library, tmp_path / "one.c", tmp_path / "two.c"], check=True
    )
    said = dprobes("check", "-e", f"{library}:twin {{ @ = count(); }}").stderr.splitlines()
    assert re.fullmatch(
        rf"-e:1:1: error: 'twin' is the name of 2 places in '{library}', at file offsets "
        r"0x\w+ \(one.c\), 0x\w+ \(two.c\)",
        said[0],
    )
    assert re.fullmatch(r'hint: write the intended one as "one.c:twin" or 0x\w+', said[-1])


WHY_NOT_KNOWN = {
    "-g0": "'{}' has no debug information: parameters are named at the place, FUNCTION(a, b), or are arg0, arg1; "
    "for a variable, declare it: extern int zz;",
    "-g": "known at this place: req, name; no symbol of the module has it, either",
}


@pytest.mark.parametrize("flag", WHY_NOT_KNOWN)
def test_why_a_name_of_the_module_is_not_known(build: Builder, flag: str) -> None:
    program = build("served.c", flag)
    said = dprobes("check", "-e", f'{program}:serve {{ printf("%d", zz); }}').stderr.splitlines()
    assert said[0].endswith("error: 'zz' is not defined")
    assert said[-1] == f"hint: {WHY_NOT_KNOWN[flag].format(program)}"


CAUSES = {
    "big(a)": "what has a name depends on the place, and 'big' is none",
    "big.constprop.0": "known at this place: a, s, b; no symbol of the module has it, either",
    "within": "what has a name depends on the place, and 'within' is none",
    "chosen": "'chosen' chooses a function at run time (IFUNC): probe one that it can choose",
    "plain": "no debug information describes the code at this place, as in assembly: parameters are named there, "
    "FUNCTION(a, b), or are arg0, arg1; no symbol of the module has it, either",
}  # fmt: skip

CLONED = """int counter;
static __attribute__((noinline)) int big(int a, int b) { volatile int s = 0; while (a--) s += a * b; return s; }
static inline __attribute__((always_inline)) int within(int q) { return q * counter + 3; }
int other(int z) { return big(z, 7) + big(z + 1, 7) + within(z); }
static int first(int x) { return x; }
static void *choose(void) { return first; }
int chosen(int x) __attribute__((ifunc("choose")));
int plain(int x);
__asm__(".text\\n.globl plain\\n.type plain, @function\\nplain: mov %edi, %eax\\nret\\n.size plain, . - plain\\n");
int main(int argc, char **argv) { counter = argc; return other(argc) + chosen(argc) + plain(argc); }
"""


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cloned")
    (directory / "cloned.c").write_text(CLONED)
    program = directory / "cloned"
    subprocess.run(["gcc", "-g", "-O2", "-o", program, directory / "cloned.c"], check=True)
    return program


@pytest.mark.parametrize("place", CAUSES)
def test_why_a_name_is_not_known_there(cloned: Path, place: str) -> None:
    said = dprobes("check", "-e", f'{cloned}:{place} {{ printf("%d", zz); }}').stderr.splitlines()
    assert said[-1] == f"hint: {CAUSES[place]}"


def test_an_inlined_function_is_suggested_as_it_is_accepted(cloned: Path) -> None:
    said = dprobes("check", "-e", f"{cloned}:within {{ @ = count(); }}").stderr
    place = re.search(r"'(inline .+:within)' for all of them", said)
    assert place is not None
    assert dprobes("check", "-e", f"{place[1]} {{ @ = count(); }}").stderr == ""


def test_an_event_of_perf_is_told_to_be_a_tracepoint() -> None:
    from dprobes.target.kernel.tracepoints import KernelTracepoints

    try:
        KernelTracepoints().subsystems()
    except OSError:
        pytest.skip("the kernel shows its tracepoints to root only")
    assert dprobes("check", "-e", "sched:sched_switch { @ = count(); }").stderr.endswith(
        "hint: write 'tracepoint' before the place\n"
    )


HELP = (["help"], ["--help"]), (["help", "run"], ["run", "--help"]), (["help", "show"], ["show", "--help"])


@pytest.mark.parametrize(("words", "option"), HELP, ids=" ".join)
def test_help_is_a_verb_too(words: list[str], option: list[str]) -> None:
    done = dprobes(*words)
    assert done.returncode == 0
    assert done.stdout == dprobes(*option).stdout


LINES = {
    "help nix": "Error: there is no verb 'nix'\n",
    "top": "Error: there is no verb 'top'; did you mean 'run --top'?\n",
    "stat x": "Error: there is no verb 'stat'; did you mean 'run'?\n",
    "malloc": "Error: there is no verb 'malloc'; a program is run by 'dprobes run malloc'\n",
    "libc.so.6:malloc": "Error: there is no verb 'libc.so.6:malloc'; "
    "the text of a program is given with -e: dprobes run -e 'TEXT'\n",
    "-e x": "Error: dprobes has no option '-e'; the verb comes first: dprobes run -e 'TEXT'\n",
    "-l kprobe:vfs*": "Error: dprobes has no option '-l'; the verb comes first: dprobes list MODULE:PATTERN\n",
    "run libc.so.6:malloc -c true": "hint: a place is not a program: "
    "write dprobes run -e 'libc.so.6:malloc { @ = count() }'\n",
    "run -f json malloc": "Error: No such option '-f'. Did you mean --format?\n",
    "run --json malloc": "Error: No such option '--json'. Did you mean --format json?\n",
    "list uprobe:libc.so.6:mal*": "hint: write 'libc.so.6:mal*'\n",
    "list usdt:libc.so.6": "hint: write 'libc.so.6:usdt:*'\n",
    "list syscalls": "hint: write 'syscall', or 'syscall:*'\n",
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_as_for_other_tools_is_told_ours(line: str) -> None:
    done = dprobes(*line.split())
    assert done.returncode != 0
    assert done.stderr.endswith(LINES[line])


def test_probepoints_are_shown_as_json(program: Path) -> None:
    import json

    done = dprobes("show", "--json", "-e", f"{program}:serve {{ @++; }} return {program}:finish {{ @++; }}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["module"], each["place"], each["kind"], each["minor"]) for each in found] == [
        (str(program), "serve", "breakpoint", 1),
        (str(program), "finish (return)", "return", 2),
    ]
    offset = f"{program}:{found[0]['offset']:#x}"
    assert dprobes("check", "-e", f"[opcode {found[0]['opcode']:#x}] {offset} {{ @++; }}").stderr == ""


def test_a_debug_file_of_another_build_is_mentioned(cloned: Path, tmp_path: Path) -> None:
    debug, stripped = tmp_path / "apart.debug", tmp_path / "apart"
    subprocess.run(["objcopy", "--only-keep-debug", cloned, debug], check=True)
    subprocess.run(["objcopy", "--strip-all", "--remove-section=.note.gnu.build-id", cloned, stripped], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={debug}", stripped], check=True)
    symbols = subprocess.run(["nm", cloned], capture_output=True, text=True, check=True).stdout
    place = f"{stripped}:0x{symbols.split(' T other')[0].splitlines()[-1]}"
    assert dprobes("check", "-e", f"{place} {{ @ = sum(z); }}").stderr == ""
    with debug.open("ab") as file:
        file.write(b"of another build")
    problem = rf"'{debug}' is the debug file of another build: its CRC is 0x\w{{8}}, "
    problem += r"and \.gnu_debuglink of the module says 0x\w{8}"
    said = dprobes("check", "-e", f"{place} {{ @ = count(); }}").stderr
    assert re.fullmatch(rf"-e:1:1: note: {problem}\n.*\n.*\nhint: install that of this build\n", said)
    said = dprobes("check", "-e", f"{stripped}:other {{ @ = sum(z); }}").stderr
    assert re.search(rf"^hint: the file is stripped, and {problem}: install that of this build$", said, re.MULTILINE)
    assert re.search(rf"^hint: {problem}: parameters are named at the place, FUNCTION\(a, b\)", said, re.MULTILINE)
    said = dprobes("check", "-e", f"{stripped}:cloned.c:5 {{ @ = count(); }}").stderr
    assert re.search(rf"error: '{stripped}' has no debug information: {problem}$", said, re.MULTILINE)
    assert re.search(rf"^dprobes: note: {problem}$", dprobes("list", str(stripped)).stderr, re.MULTILINE)
