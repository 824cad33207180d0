"""A run from within a PID namespace, as in a container: the kernel's numbers of processes are not those of the run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import has_begun, require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT, await_true, command_line, environment, read_result

if TYPE_CHECKING:
    from integration.support import Builder, Result

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
WHY = "processes have other numbers in this PID namespace than in the kernel"
TICK = 'name = "{}"\noffset = tick\nminor = 1\n{}\nexit\n'


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made")


def run_nested(path: Path, program: str, *command: object) -> tuple[Result, int]:
    """
    Run a program on all processes, dprobes being process 1 of a namespace, and then commands.

    Return the result and what the kernel's number of dprobes was.
    """
    source, output = path / "program.rpn", path / "records.json"
    source.write_text(program)
    words = [*UNSHARE, *command_line(source, output, [], ["--engine", "ebpf"])]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment()) as client:
        children = Path(f"/proc/{client.pid}/task/{client.pid}/children")
        await_true(lambda: client.poll() is not None or bool(children.read_text()), "the run")
        (pid,) = (int(number) for number in children.read_text().split())
        await_true(lambda: client.poll() is not None or has_begun(pid), "the run")
        assert client.poll() is None, client.communicate()
        if command:
            subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT)
        subprocess.run(["kill", "-INT", str(pid)], check=True)
        return read_result(client, output), pid


def dprobes(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [*UNSHARE, *DPROBES, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=TIMEOUT, check=False)


@pytest.mark.alone
def test_dprobes_does_not_probe_itself(tmp_path: Path) -> None:
    """It calls the function when Ctrl-C wakes it up, before it takes the probepoint away."""
    result, pid = run_nested(tmp_path, 'name = "libc.so.6"\noffset = eventfd_write\nminor = 1\npush pid\nlog 1\nexit\n')
    assert result.status == 0, result.stderr
    assert pid not in [number for (number,) in result.words()]


def test_records_are_emitted_where_nobody_can_look_at_threads(build: Builder, tmp_path: Path) -> None:
    program = build("faults.c")
    source = f'name = "{program}"\noffset = at_protected\nminor = 1\nexit\n'
    result, _ = run_nested(tmp_path, source, program, "protected", 20)
    assert result.status == 0, result.stderr
    assert (result.counts[1].hits, len(result.records)) == (20, 20)


def test_a_tree_is_left_to_handlers_in_the_process(build: Builder, tmp_path: Path) -> None:
    program, source = build("hotloop.c"), tmp_path / "tick.rpn"
    source.write_text(TICK.format(program, ""))
    taken = dprobes("run", source, "-v", "--", program, 20)
    assert taken.returncode == 0, taken.stderr
    assert taken.stderr.startswith(
        f"dprobes: note: engine inline: the ebpf engine cannot follow processes here: {WHY}; "
        "handlers run in the process\n"
    )
    refused = dprobes("run", source, "--engine", "ebpf", "--", program, 20)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        f"dprobes: error: the ebpf engine cannot follow the processes of -c and -p here: {WHY}\n"
        "hint: use --engine ptrace, or the initial PID namespace\n"
    )


@pytest.mark.parametrize("code", [1, 3])
@pytest.mark.parametrize("watched", [False, True])
def test_what_stops_a_process_is_refused(build: Builder, tmp_path: Path, code: int, watched: bool) -> None:
    program, source = build("hotloop.c"), tmp_path / "stop.rpn"
    where = f'name = "{program}"\noffset = tick\n'
    if watched:
        where = 'name = "all"\nmodtype = kernel\naddress = 0x10000\nwatchpoint = w\n'
    source.write_text(f"{where}exit {code}\n")
    refused = dprobes("run", source, "--engine", "ebpf", "--allow-write")
    assert refused.returncode == 2
    line = where.count("\n") + 1
    assert refused.stderr.endswith(
        f"{source}:{line}:1: error: the ebpf engine cannot carry out 'exit {code}' from within a PID namespace\n"
        f"    exit {code}\n    ^~~~~~\nhint: use --engine ptrace with -c COMMAND or -p PID\n"
    )


def test_doctor_says_so() -> None:
    assert (
        f"no   follow processes (-c, -p): {WHY}\n     remedy: use the initial PID namespace, or --engine ptrace\n"
    ) in dprobes("doctor").stdout
