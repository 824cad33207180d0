"""The command line: usage, exit statuses, and what the verbs print."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dprobes.cli.command_group import VERBS
from dprobes.cli.main import run
from dprobes.engines.engine_interface import Area

PROGRAM = """\
name = "no-such-module"
major = 7
vars = 1

offset = main
minor = 1
    push r, arg0
loop1: inc lv, 0
    jnz loop1
    call twice
    log 1

proc twice
    dup 1
    ret
endproc
"""

LISTING = """\
name = "no-such-module"
major = 7
vars = 1
// module: not on this machine, x86_64, 8-byte words
// code: 31 bytes

offset = main
minor = 1
// not resolved
  0000     0  push r, arg0
loop1:
  0003     1  inc lv, 0
  0006     1  jnz loop1  // 0003
  000f     1  call twice  // 001c
  0018     2  log 1
  001b     1  exit  // added

proc twice
  001c     ?  dup 1
  001e     ?  ret
endproc
"""

NOTES = """\
{file}:1:1: note: there is no module 'no-such-module' on this machine; its probes are resolved when a process maps one
    name = "no-such-module"
    ^~~~~~~~~~~~~~~~~~~~~~~
{file}:11:5: note: the handler has no 'exit' at its end; it acts as if it had one
        log 1
        ^~~~~
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.rpn"
    path.write_text(PROGRAM)
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_lists_encoded_offsets_and_stack_depths(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "show", program, "--arch", "x86_64")
    assert (status, out) == (0, LISTING)
    assert err == NOTES.format(file=program)


def test_show_encodes_for_another_processor(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "show", program, "--arch", "s390")
    assert "// module: not on this machine, s390, 4-byte words\n// code: 23 bytes\n" in out


def test_check_prints_diagnostics_only(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "check", program) == (0, "", NOTES.format(file=program))


def test_check_ends_with_2_and_all_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.rpn"
    file.write_text('name = "x"\noffset = main\npusj r, 1\njmp nowhere\n')
    expected = f"""\
{file}:3:1: error: unknown instruction 'pusj'
    pusj r, 1
    ^~~~
hint: did you mean 'push'?
"""
    assert outcome(capsys, "check", file) == (2, "", expected)


def test_a_program_that_writes_needs_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "write.rpn"
    file.write_text('name = "no-such-module"\noffset = main\npush 1\npop r, eax\nexit\n')
    expected = f"""\
{file}:1:1: note: there is no module 'no-such-module' on this machine; its probes are resolved when a process maps one
    name = "no-such-module"
    ^~~~~~~~~~~~~~~~~~~~~~~
{file}:4:1: error: 'pop r, eax' writes to the target
    pop r, eax
    ^~~~~~~~~~
hint: allow it with --allow-write
"""
    assert outcome(capsys, "check", file) == (2, "", expected)
    assert outcome(capsys, "check", file, "--allow-write")[0] == 0


def test_a_define_reaches_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "define.rpn"
    file.write_text('name = "no-such-module"\noffset = WHERE + N\nexit\n')
    _, out, _ = outcome(capsys, "show", file, "-D", "WHERE=start", "-D", "N = 2")
    assert "\noffset = start + 0x2\n" in out


def test_locate_says_what_a_program_says(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "locate", "libc.so.6:malloc")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("module    /")
    assert "function  malloc" in lines
    nm = subprocess.run(["nm", "-D", lines[0].split()[1]], capture_output=True, text=True, check=True).stdout
    address = next(int(line.split()[0], 16) for line in nm.splitlines() if line.split()[-1].startswith("malloc@@"))
    assert f"address   {address:#x}" in lines
    marked = next(line for line in lines if line.startswith("=> "))
    assert f"opcode = 0x{marked.split()[2 + ('+' in marked)]}" in lines


ONE_SCOPE = "give only one of -c COMMAND, -p PID, --cgroup PATH and --uid USER; without them all processes are probed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["xyz"], "Error: there is no verb 'xyz'\n"),
        (["chek", "x"], "Error: there is no verb 'chek'; did you mean 'check'?\n"),
        (["run", "x.rpn", "-c", "ls", "-p", "1"], f"Error: {ONE_SCOPE}\n"),
        (["run", "x.rpn", "--uid", "0", "--cgroup", "/sys/fs/cgroup"], f"Error: {ONE_SCOPE}\n"),
        (["run", "x.rpn", "--no-follow"], "Error: --no-follow needs a command (-c COMMAND) or a process (-p PID)\n"),
        (["run", "x.rpn", "--uid", "nobody-of-that-name"], "Error: --uid: there is no user 'nobody-of-that-name'\n"),
        (
            ["run", "x.rpn", "--cgroup", "/no/such"],
            "Error: --cgroup: there is no directory '/no/such'; cgroups are below /sys/fs/cgroup\n",
        ),
        (
            ["run", "x.rpn", "--cgroup", "/"],
            "Error: --cgroup: '/' is not a cgroup of version 2, which eBPF programs need\n",
        ),
        (
            ["run", "x.rpn", "--engine", "ptrace"],
            "Error: the ptrace engine needs a command (-c COMMAND) or a process (-p PID); other scopes need --engine",
        ),
        (
            ["run", "x.rpn", "--engine", "ptrace", "-c", "ls", "--pid-namespace"],
            "Error: --pid-namespace needs --engine ebpf\n",
        ),
        (["run", "x.rpn", "-c", "ls", "more"], "Error: unexpected argument 'more': the command was given with -c\n"),
        (["run", "x.rpn", "-c", "'"], "Error: the command is not well formed: no closing quotation\n"),
        (["run", "x.rpn", "-c", " "], "Error: the command is empty\n"),
        (["run", "x.rpn", "-p", "1", "--exit-status"], "Error: --exit-status needs a command (-c COMMAND)\n"),
        (["run", "x.rpn", "-c", "ls", "--log", "pdi"], "Error: --log has no item 'pdi'; did you mean 'pid'?\n"),
        (
            ["run", "x.rpn", "-c", "ls", "--log", "everything"],
            "Error: --log has no item 'everything'; write PROCNAME, PID, UID, CSEIP, SSESP, TSC, TID, or ALL\n",
        ),
        (["run", "x.rpn", "-p", "0"], "Error: Invalid value for '-p' / '--pid': 0 is not in the range x>=1.\n"),
        (["locate", ":main"], "Error: the name of the module is empty\n"),
        (["locate", "ls:main*2"], "Error: 'main*2' is not a symbol, a number, or a symbol and a number: "),
    ],
)
def test_each_usage_error_has_its_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = outcome(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["locate", "libc:malloc"], "there is no module 'libc' on this machine\nhint: did you mean 'libc.so.6'?"),
        (["locate", "/etc/passwd"], "'/etc/passwd' is not an ELF file"),
        (["locate", "/etc"], "there is no module '/etc' on this machine"),
        (["locate", "/no/such/file"], "there is no module '/no/such/file' on this machine"),
        (["locate", "libc.so.6:maloc"], "has no symbol 'maloc'\nhint: did you mean 'malloc'"),
        (["locate", "libc.so.6:0x1"], "offset 0x1 is not in the code of"),
        (["locate", "libc.so.6:malloc+1"], "is inside an instruction of"),
    ],
)
def test_each_failure_has_its_message_and_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = outcome(capsys, *arguments)
    assert status == 1
    assert err.startswith("dprobes: error: ")
    assert message in err


def test_a_module_that_is_none_is_an_error_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.rpn"
    file.write_text('major = 1\nname = "/etc/passwd"\noffset = main\nexit\n')
    expected = f"""\
{file}:2:1: error: '/etc/passwd' is not an ELF file
    name = "/etc/passwd"
    ^~~~~~~~~~~~~~~~~~~~
"""
    for arguments in (["check", str(file)], ["show", str(file)], ["build", str(file)], ["insert", str(file)]):
        assert outcome(capsys, *arguments) == (2, "", expected)
    assert outcome(capsys, "run", str(file), "-c", "true")[0::2] == (2, expected)


def test_a_refused_line_of_the_original_is_shown_in_our_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a b.rpn"
    file.write_text("name = x\nexit\n")
    status, _, err = outcome(capsys, "--insert", str(file), "--log-target=KLOG")
    assert status == 2
    form = f"dprobes insert '{file}' --log-target KLOG"
    assert err.endswith(f"dprobes: note: the present form, which has all options, is: {form}\n")


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        status, out, _ = outcome(capsys, verb, "--help")
        assert status == 0
        assert out.startswith(f"Usage: dprobes {verb} ")
    status, out, _ = outcome(capsys, "--help")
    assert all(verb in out for verb in VERBS)


def test_doctor_says_yes_or_no_to_everything_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = outcome(capsys, "doctor")
    findings, _, conclusion = out.partition("what you can do now:\n")
    first_words = [line.split()[0] for line in findings.splitlines() if line]
    headings = [f"{area.value}:".split()[0] for area in Area]
    assert set(first_words) <= {"yes", "no", "remedy:", *headings}
    assert [word for word in first_words if word in headings] == headings
    assert conclusion.startswith('     probe a command\n         dprobes run malloc -c "ls /"\n')
    for what in (
        "take over a process of this user (ptrace)",
        "execute copies of probed instructions (a system call injected into the target)",
        "watch memory and code (debug registers): ",
        "hand a process over to a debugger (exit 1): ",
        "write core files here (exit 3)",
        "run handlers in the kernel (eBPF engine): ",
    ):
        assert what in out
    assert status == 0


def test_help_does_not_import_what_only_verbs_need() -> None:
    code = (
        "import sys; from dprobes.cli.main import run; run(['--help']);"
        "print([m for m in ('iced_x86', 'elftools', 'ctypes', 'dprobes.vm', 'dprobes.rpn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_traceback(program: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "show", program],
        stdout=write_end, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write_end)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_file_of_garbage_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "garbage.rpn"
    file.write_bytes(bytes(range(256)) * 10)
    status, out, err = outcome(capsys, "check", file)
    assert (status, out) == (2, "")
    assert err.count("error:") == 1


def test_json_records_of_a_run_have_the_documented_keys(tmp_path: Path) -> None:
    file = tmp_path / "malloc.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\nmaxhits = 1\npush r, arg0\nlog 1\nexit\n')
    output = tmp_path / "records"
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", file, "--format", "json", "-o", output, "-c", "ls /"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    lines = output.read_text().splitlines()
    assert len(lines) == 1
    keys = "major minor cpu pid tid uid name ip sp time module symbol data"
    assert set(keys.split()) <= json.loads(lines[0]).keys()
    assert done.stdout == subprocess.run(["ls", "/"], capture_output=True, text=True, check=True).stdout


def test_what_one_engine_can_do_is_nothing_to_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "control.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\npush r, cr0\nlog 1\nexit\n')
    assert outcome(capsys, "check", file) == (0, "", "")  # behind a stub there are such registers


def test_a_library_of_another_processor_is_not_called_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s390.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\nexit\n')
    _, _, err = outcome(capsys, "check", file, "--arch", "s390")
    assert err.startswith(
        f"{file}:1:1: note: there is no module 'libc.so.6' for s390 on this machine; "
        "its probes are resolved when a process maps one\n"
    )


PRINTING = {
    "show": ["{program}"],
    "doctor": [],
    "locate": ["libc.so.6:malloc"],
    "list": ["libc.so.6"],
    "examples": ["malloc"],
    "build": ["--emit", "rpn", "{program}"],
    "convert": ["{script}"],
    "completion": ["bash"],
    "log": ["{trace}"],
    "format": ["{trace}"],
    "sql": ["{trace}", "SELECT * FROM records"],
}
RUN = ["-e", 'libc.so.6:malloc(n) {{ printf("%d", n); }}', "--engine", "ptrace", "--", "{called}"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files that verbs read."""
    directory = tmp_path_factory.mktemp("inputs")
    program = directory / "program.rpn"
    program.write_text('name = "libc.so.6"\noffset = malloc\nmaxhits = 1\npush r, arg0\nlog 1\nexit\n')
    (directory / "script.bt").write_text("uprobe:libc:malloc { @ = count(); }\n")
    code = "#include <stdlib.h>\nvoid *volatile kept;\nint main() { kept = malloc(1); kept = malloc(2); }\n"
    (directory / "called.c").write_text(code)
    called, trace = directory / "called", directory / "hits.dpt"
    subprocess.run(["gcc", "-o", called, directory / "called.c"], check=True)
    command: list[str | Path] = [sys.executable, "-m", "dprobes", "run", program, "--engine", "ptrace"]
    subprocess.run([*command, "-o", trace, "--", called], check=True, capture_output=True, timeout=60)
    return {"program": program, "script": directory / "script.bt", "called": called, "trace": trace}


@pytest.mark.parametrize("verb", PRINTING)
def test_a_full_disk_is_one_line(verb: str, inputs: dict[str, Path]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", verb, *(word.format(**inputs) for word in PRINTING[verb])],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "dprobes: error: standard output: no space left on device\n")


@pytest.mark.parametrize("verb", [*PRINTING, "run"])
def test_a_pipe_that_nobody_reads_is_nothing_to_talk_about(verb: str, inputs: dict[str, Path]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", verb, *(word.format(**inputs) for word in PRINTING.get(verb, RUN))],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("probe ", "0,0 "))]  # what a run counts
    assert (done.returncode, said) == (0 if verb == "run" else 1, [])


def test_a_system_call_that_fails_is_not_taken_for_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dprobes.engines.ptrace.ptrace_doctor.examine", refuse)
    assert outcome(capsys, "doctor") == (
        1,
        "",
        "dprobes: error: no space left on device\nhint: 'dprobes doctor' shows what works on this machine\n",
    )


def test_missing_standard_files_disturb_nothing(program: Path) -> None:
    command = f"exec {sys.executable} -m dprobes check {program} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=60, check=False).returncode == 0


def test_files_that_never_end_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "error: '/dev/zero' is not a regular file\n"
    assert outcome(capsys, "check", "/dev/zero") == (2, "", expected)


def test_padding_between_functions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "padded.s"
    source.write_text(
        ".globl one, two\n.type one, @function\none: ret\n.size one, . - one\n.byte 0x48, 0xb8\n"
        ".type two, @function\ntwo: ret\nnop\nnop\nnop\nnop\nnop\nnop\nnop\nnop\n.size two, . - two\n"
    )
    library = tmp_path / "padded.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    status, _, err = outcome(capsys, "locate", f"{library}:one+1")
    assert status == 1
    assert "is between functions, not in one\nhint: 'two' starts at 0x" in err


def test_two_definitions_at_one_place_are_an_error_that_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "twice.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\nexit\noffset = malloc\nminor = 1\nexit\n')
    status, _, err = outcome(capsys, "check", file)
    assert status == 2
    assert f"{file}:4:1: error: two probe definitions at offset 0x" in err
    assert f"{file}:2:1: note: the first one is here\n    offset = malloc\n    ^~~~~~~~~~~~~~~\n" in err


def test_a_wrong_opcode_is_a_mismatch_with_the_right_one_in_the_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    located = outcome(capsys, "locate", "libc.so.6:malloc")[1]
    opcode = next(line for line in located.splitlines() if line.startswith("opcode = "))
    file = tmp_path / "mismatch.rpn"
    file.write_text('name = "libc.so.6"\noffset = malloc\nopcode = 0x01\nexit\n')
    status, _, err = outcome(capsys, "check", file)
    assert status == 0
    assert err.startswith(f"{file}:3:1: warning: MISMATCH: opcode {opcode.split()[-1]} (")
    assert err.endswith(f"hint: if the place is right, write '{opcode}'\n")


def test_locate_shows_a_system_call_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "locate", "syscall:openat")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "system call  openat, 257 in x86_64, 295 in i386"
    assert "offset = syscall:openat          // with 'return = yes' its end" in out
    assert "push tp, filename   // const char *" in out
    assert out.endswith("// at the end:\npush tp, ret   // long\n")


def test_locate_lists_system_calls_by_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "locate", "syscall:*at2") == (
        0,
        "syscall renameat2\nsyscall openat2\nsyscall faccessat2\nsyscall fchmodat2\n",
        "",
    )


def test_locate_shows_both_faces_of_a_tracepoint(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "locate", "tracepoint:sched:sched_switch")
    assert (status, err) == (0, "")
    assert "offset = sched:sched_switch\n" in out
    assert re.search(r"// the record:\n(.*\n)*push tp, prev_pid +// pid_t\n", out)
    assert re.search(r"// or the arguments, (.*\n)*push tp, prev +// struct task_struct \*\n", out)


def test_locate_lists_tracepoints_by_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "locate", "tracepoint:sched:*_fork")
    assert (status, out, err) == (0, "tracepoint sched:sched_process_fork\n", "")


@pytest.mark.parametrize(
    "what", ["tracepoint sched:sched_process_e*", "tracepoint:sched:sched_process_e*", "syscall openat*"]
)
def test_what_is_listed_of_the_kernel_s_events_is_a_place(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = outcome(capsys, "list", what)
    assert (status, err) == (0, "")
    for place in out.splitlines():
        assert outcome(capsys, "check", "-e", place + " { }")[:1] == (0,)
        assert outcome(capsys, "locate", place)[0] == 0
    status, whole, _ = outcome(capsys, "locate", "tracepoint")
    assert status == 0
    assert "tracepoint sched:sched_process_fork\n" in whole
    assert "tracepoint:ftrace:" not in whole


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("syscall:opena", "there is no system call 'opena'\nhint: did you mean 'openat'"),
        ("syscall:zz*", "no system call matches 'zz*'"),
        ("tracepoint:sched:sched_swich", "this kernel has no tracepoint 'sched:sched_swich'\nhint: did you mean"),
        ("tracepoint:zz", "this kernel has no tracepoint that matches 'zz:*'"),
    ],
)
def test_locate_says_what_is_not_there(capsys: pytest.CaptureFixture[str], place: str, message: str) -> None:
    status, out, err = outcome(capsys, "locate", place)
    assert (status, out) == (1, "")
    assert err.startswith(f"dprobes: error: {message}")
