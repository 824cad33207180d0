"""What cannot be done is refused with one clear message and the right exit status, before the target is touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import (
    DPROBES,
    NOBODY,
    TIMEOUT,
    Runner,
    as_nobody,
    await_breakpoint,
    await_line,
    await_traced,
    await_true,
    code_is_original,
    command_line,
    load_bias,
    memory_at,
    nobody_python,
    read_memory,
    read_result,
    running,
    symbols_of,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner

TORTURE = "name = torture\noffset = stepped\nminor = 1\npush 1\nlog 1\nexit\n"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def refused(run: Runner, target: list[str], message: str, status: int = 1, source: str = TORTURE, **popen: Any) -> None:
    result = run(source, target, **popen)
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert len(re.findall(r"^dprobes: error:|^Error:|: error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert result.status == status
    assert result.records == []


def free_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_a_process_that_is_gone(run: Runner) -> None:
    pid = free_pid()
    refused(run, ["-p", str(pid)], f"there is no process {pid}")


def test_a_thread_of_the_kernel(run: Runner) -> None:
    if not Path("/proc/2/comm").exists() or Path("/proc/2/comm").read_text() != "kthreadd\n":
        pytest.skip("no kernel thread is visible here")
    refused(run, ["-p", "2"], "process 2 .*is a thread of the kernel")


def test_a_zombie(run: Runner) -> None:
    with subprocess.Popen(["true"]) as process:
        await_true(lambda: "Z" in Path(f"/proc/{process.pid}/stat").read_text(), "the zombie")
        refused(run, ["-p", str(process.pid)], "zombie")


@pytest.mark.parametrize("tool", ["gdb", "strace"])
def test_a_process_that_is_traced_already(build: Builder, run: Runner, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    with running(build("torture.c"), 60, 1) as target:
        await_line(target)
        options = ["-nx", "-batch", "-ex", "shell sleep 60"] if tool == "gdb" else ["-o", "/dev/null"]
        with subprocess.Popen(
            [tool, *options, "-p", str(target.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as other:
            try:
                await_traced(target.pid)
                refused(run, ["-p", str(target.pid)], rf"traced by process {tracer_of(target.pid)} \({tool}\)")
            finally:
                other.send_signal(signal.SIGTERM if tool == "strace" else signal.SIGKILL)


ATTACHING = {
    "gdb": ("gdb", "-nx", "-batch", "-p"),
    "strace": ("timeout", "-s", "INT", "1", "strace", "-o", "/dev/null", "-p"),
}
REFUSED = {
    "gdb": r"ptrace: Operation not permitted\.",
    "strace": r"strace: attach: ptrace\(PTRACE_SEIZE, \d+\): Operation not permitted",
}
ATTACHED = {"gdb": r"\[Inferior 1 \(process \d+\) detached\]", "strace": r"strace: Process \d+ attached"}


@pytest.mark.parametrize("tool", ATTACHING)
def test_another_tracer_is_kept_out_until_the_end(build: Builder, run: Runner, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    program = build("torture.c")

    def attach() -> str:
        done = subprocess.run(
            [*ATTACHING[tool], str(target.pid)], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        return done.stdout + done.stderr

    with running(program, 600, 2) as target:
        await_line(target)
        process, output = run.start(TORTURE, ["-p", str(target.pid)])
        await_traced(target.pid)
        assert re.search(REFUSED[tool], attach())
        await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
        result = run.end(process, output)
        assert result.counts[1].hits == result.counts[1].records > 0
        assert re.search(ATTACHED[tool], attach())
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


@pytest.fixture
def shared(run: Runner, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """Return a directory that every user may write to."""
    tmp_path.chmod(0o777)
    return tmp_path


def run_as_nobody(
    environment: dict[str, str], directory: Path, source: str, target: list[str]
) -> tuple[subprocess.CompletedProcess[str], Path]:
    program, output = directory / "nobody.rpn", directory / "nobody.json"
    program.write_text(source)
    arguments = [nobody_python(), *command_line(program, output, target)[1:]]
    return subprocess.run(
        arguments, check=False, env=environment, cwd="/", capture_output=True, text=True, timeout=TIMEOUT, **as_nobody()
    ), output


@needs_root
def test_a_process_of_another_user(build: Builder, shared: Path, nobody_environment: dict[str, str]) -> None:
    with running(build("torture.c"), 60, 1) as target:
        await_line(target)
        done, _ = run_as_nobody(nobody_environment, shared, TORTURE, ["-p", str(target.pid)])
        assert done.returncode == 1
        assert re.search(rf"process {target.pid} .*belongs to user 0, not to user {NOBODY}", done.stderr), done.stderr
        assert "Traceback" not in done.stderr


@needs_root
def test_an_ordinary_user_can_probe_a_command(build: Builder, shared: Path, nobody_environment: dict[str, str]) -> None:
    source = "name = threads\noffset = tick\nminor = 1\npush uid\nlog 1\nexit\n"
    done, output = run_as_nobody(nobody_environment, shared, source, ["--", str(build("threads.c")), "3", "50"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "150\n"
    assert [json.loads(line)["uid"] for line in output.read_text().splitlines()] == [NOBODY] * 150


@needs_root
@pytest.mark.skipif(
    Path("/proc/sys/vm/unprivileged_userfaultfd").read_text() == "1\n", reason="vm.unprivileged_userfaultfd is 1"
)
def test_an_ordinary_user_cannot_protect_pages(
    build: Builder, shared: Path, nobody_environment: dict[str, str]
) -> None:
    source = "name = protected\naddress = shared+1000:shared+1099\nwatchpoint = w\npush 1\nlog 1\nexit\n"
    command = ["--", str(build("protected.c", "-pthread")), "threads", "5", "2"]
    done, _ = run_as_nobody(nobody_environment, shared, source, command)
    assert done.returncode == 1
    assert done.stdout == "10 10 0\n"
    assert (
        "no debug register holds it, and its page cannot be protected: userfaultfd(2): operation not permitted; "
        "/dev/userfaultfd: permission denied; without root, the process needs CAP_SYS_PTRACE or the machine "
        "vm.unprivileged_userfaultfd = 1; not inserted there"
    ) in done.stderr


@needs_root
def test_an_ordinary_user_can_probe_a_process_of_the_same_user(
    build: Builder, shared: Path, nobody_environment: dict[str, str]
) -> None:
    program = build("torture.c")
    with running(program, 600, 2, cwd="/", **as_nobody()) as target:
        await_line(target)
        source = TORTURE.replace("minor = 1", "minor = 1\nmaxhits = 20")
        path, output = shared / "nobody.rpn", shared / "nobody.json"
        path.write_text(source)
        arguments = [nobody_python(), *command_line(path, output, ["-p", str(target.pid)])[1:]]
        with subprocess.Popen(
            arguments, env=nobody_environment, cwd="/", stderr=subprocess.PIPE, text=True, **as_nobody()
        ) as client:
            await_true(lambda: output.exists() and output.read_text().count("\n") == 20, "20 records")
            client.send_signal(signal.SIGINT)
            _, stderr = client.communicate(timeout=TIMEOUT)
            assert client.returncode == 0, stderr
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


@needs_root
def test_a_program_that_the_user_may_not_read_runs_without_probes(
    build: Builder, shared: Path, nobody_environment: dict[str, str]
) -> None:
    secret = shared / "threads"
    shutil.copy(build("threads.c"), secret)
    secret.chmod(0o711)
    source = "name = family\noffset = tick\nminor = 1\npush 1\nlog 1\nexit\n"
    script = f"{build('family.c')} fork 1; {secret} 2 10; {build('family.c')} fork 1"
    done, output = run_as_nobody(nobody_environment, shared, source, ["--exit-status", "--", "sh", "-c", script])
    assert done.returncode == 0, done.stderr
    assert "20\n" in done.stdout
    assert output.read_text().count("\n") == 4
    assert "may not read" in done.stderr


def test_a_command_that_does_not_exist(run: Runner) -> None:
    refused(run, ["--", "/nonexistent/command"], "'/nonexistent/command' does not exist")


def test_a_file_that_is_not_executable(run: Runner, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("x")
    refused(run, ["--", str(file)], "is not executable")


def test_a_file_that_is_no_program(run: Runner, tmp_path: Path) -> None:
    file = tmp_path / "torture"
    file.write_bytes(b"\x7fELF" + bytes(100))
    file.chmod(0o755)
    refused(run, ["--", str(file)], "ELF|cannot be started", status=2, source=TORTURE)


def test_a_program_for_another_machine_cannot_be_started(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("torture.c")
    data = bytearray(program.read_bytes())
    data[18:20] = (0x08).to_bytes(2, "little")  # e_machine: MIPS
    file = tmp_path / "other"
    file.write_bytes(data)
    file.chmod(0o755)
    refused(run, ["--", str(file)], f"'{file}' cannot be started: exec format error|cannot be started")


def test_a_module_that_is_never_mapped(build: Builder, run: Runner) -> None:
    source = TORTURE.replace("torture", '"libnothere.so"')
    refused(run, ["--", str(build("family.c")), "fork", "0"], "no probepoint was inserted", source=source)


def test_an_opcode_that_is_not_there(build: Builder, run: Runner) -> None:
    source = TORTURE.replace("minor = 1", "opcode = 0x12\nminor = 1")
    program = build("torture.c")
    refused(run, ["--", str(program), "0", "1"], "MISMATCH", source=source)
    # The module was mapped: it is the opcode that does not fit.
    result = run(source, ["--", str(program), "0", "1"])
    assert result.stderr.endswith("dprobes: error: no probepoint was inserted\n")


def test_the_breakpoint_of_another_debugger(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 60, 0) as target:
        await_line(target)
        target.send_signal(signal.SIGSTOP)
        await_true(lambda: "(torture) T" in Path(f"/proc/{target.pid}/stat").read_text(), "the stop")
        address = load_bias(target.pid, program) + symbols_of(program)["main"]
        original = read_memory(target.pid, address, 1)
        with Path(f"/proc/{target.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(b"\xcc")
        source = TORTURE.replace("stepped", "main")
        process, output = run.start(source, ["-p", str(target.pid)])
        await_traced(target.pid)
        await_true(lambda: read_memory(target.pid, address, 1) == b"\xcc", "nothing")
        assert process.stderr is not None
        assert "CONFLICT" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert result.status == 1
        assert "no probepoint was inserted" in result.stderr
        assert read_memory(target.pid, address, 1) == b"\xcc" != original


def test_the_breakpoint_that_a_killed_gdb_leaves_behind(build: Builder, run: Runner) -> None:
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    program = build("slots.c")
    # A calm program: what the death of gdb itself does to a busy one is not our concern.
    with running(program, "plain", stdin=subprocess.PIPE) as target:
        await_line(target)
        commands = ["-ex", "break *main", "-ex", "continue"]
        with subprocess.Popen(
            ["gdb", "-nx", "-batch", "-p", str(target.pid), *commands],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as gdb:
            await_breakpoint(target.pid, program, "main")
            gdb.kill()
        await_true(lambda: tracer_of(target.pid) == 0, "the end of gdb's tracing")
        target.send_signal(signal.SIGCONT)  # gdb stops threads by SIGSTOP
        client, output = run.start("name = slots\noffset = main\nminor = 1\nexit\n", ["-p", str(target.pid)])
        assert client.stderr is not None
        assert "CONFLICT" in client.stderr.readline()
        assert run.end(client, output).status == 1
        assert memory_at(target.pid, program, "main", 1) == b"\xcc"
        assert target.stdin is not None
        target.stdin.write("x")
        target.stdin.flush()
        assert await_line(target) == "31300\n"


@needs_root
def test_a_process_that_forbids_looking_into_it(
    build: Builder, run: Runner, shared: Path, nobody_environment: dict[str, str]
) -> None:
    source = "name = undumpable\noffset = tick\nminor = 1\nmaxhits = 5\npush 1\nlog 1\nexit\n"
    with running(build("undumpable.c"), cwd="/", **as_nobody()) as target:
        await_line(target)
        done, _ = run_as_nobody(nobody_environment, shared, source, ["-p", str(target.pid)])
        assert done.returncode == 1
        assert f"process {target.pid} (undumpable) does not allow tracing\n" in done.stderr
        assert "it has made itself not dumpable" in done.stderr
        assert "Traceback" not in done.stderr
        # Root may.
        client, output = run.start(source, ["-p", str(target.pid)])
        await_true(lambda: output.exists() and output.read_text().count("\n") == 5, "5 records")
        assert run.end(client, output).counts[1].hits == 5


UNSUPPORTED = {
    "cr3": "push r, cr3",
    "msr": "push r, msr",
    "task": "push task",
    "port": "push io, u8",
    "watchpoint": "watchpoint = io",
    "kernel": "modtype = kernel",
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_the_engine_lacks_is_refused_before_anything_starts(
    build: Builder, run: Runner, tmp_path: Path, feature: str
) -> None:
    text = UNSUPPORTED[feature]
    source = {
        "watchpoint": "name = torture\naddress = 0x70:0x71\nwatchpoint = io\nminor = 1\nexit\n",
        "kernel": "name = vmlinux\nmodtype = kernel\noffset = 0x100\nminor = 1\nexit\n",
    }.get(feature, TORTURE.replace("exit\n", f"push 0\n{text}\nexit\n"))
    marker = tmp_path / "started"
    result = run(source, ["--", "touch", str(marker)], ["--allow-write"])
    assert result.status == 2, result.stderr
    assert "error" in result.stderr
    assert "Traceback" not in result.stderr
    assert not marker.exists()


def test_an_output_file_that_cannot_be_written(build: Builder, tmp_path: Path) -> None:
    source = tmp_path / "p.rpn"
    source.write_text(TORTURE)
    marker = tmp_path / "started"
    command = [
        *DPROBES,
        "run",
        "--engine",
        "ptrace",
        str(source),
        "-o",
        str(tmp_path / "missing" / "output"),
        "--",
        "touch",
        str(marker),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 1, done.stderr
    assert "cannot be written: no such file or directory" in done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("way", ["-o", ">"])
def test_a_full_disk_is_an_error_and_the_target_goes_on(build: Builder, tmp_path: Path, way: str) -> None:
    program = build("torture.c")
    source = tmp_path / "p.rpn"
    source.write_text(TORTURE)
    with running(program, 60, 2) as target:
        await_line(target)
        command = [
            *DPROBES,
            "run",
            "--engine",
            "ptrace",
            str(source),
            *(["-o", "/dev/full"] if way == "-o" else []),
            "-p",
            str(target.pid),
        ]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
        assert done.returncode == 1, done.stderr
        assert "no space left on device" in done.stderr.lower()
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        await_true(lambda: not tracer_of(target.pid), "the end of tracing")
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_dprobes_itself_is_excluded(tmp_path: Path) -> None:
    source = tmp_path / "self.rpn"
    source.write_text('name = "libc.so.6"\noffset = malloc\nexit\n')
    command = f"exec {' '.join(DPROBES)} run {source} -p $$"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert re.fullmatch(r"dprobes: error: EXCLUDED: process \d+ is dprobes itself\n", result.stderr)
    assert result.returncode == 1


def test_a_run_on_a_run_of_a_command_is_refused_by_the_inner_one(build: Builder, run: Runner, tmp_path: Path) -> None:
    inner = tmp_path / "inner.rpn"
    inner.write_text("name = hotloop\noffset = tick\nminor = 1\npush 1\nlog 1\nexit\n")
    program = build("hotloop.c")
    for _ in range(3):
        command = [*DPROBES, "run", str(inner), "--engine", "ptrace", "--", str(program), "5"]
        result = run("name = hotloop\noffset = tick\nminor = 1\nexit\n", ["--exit-status", "--", *command])
        assert result.status == 1
        assert ") is already traced by the dprobes of process " in result.stderr
        assert "hint: a process has one tracer: insert all programs with 'dprobes insert'" in result.stderr
        assert result.stdout == ""
