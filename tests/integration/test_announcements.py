"""What a run says while it goes on, and where its program comes from; nobody is at a terminal here."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.insessions import on_demand
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT, await_message, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return str(request.param)


def test_a_run_on_a_process_says_when_it_is_armed(build: Builder, tmp_path: Path, engine: str) -> None:
    path = build("ondemand.c", "-pthread")
    source = tmp_path / "p.rpn"
    source.write_text(f'name = "{path}"\noffset = stepped\nlog 0\nexit\noffset = emulated\nlog 0\nexit\n')
    with on_demand(path) as target:
        command = [*DPROBES, "run", str(source), "--engine", engine, "-p", str(target.process.pid)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as client:
            said = await_message(client, "Ctrl-C ends the run")
            assert said == "dprobes: note: 2 probepoints are active; Ctrl-C ends the run\n"
            target.say("call 3")  # no hit is missed from now on
            client.send_signal(signal.SIGINT)
            output, rest = client.communicate(timeout=TIMEOUT)
        assert len(output.splitlines()) == 6
        assert "active" not in rest


def test_a_program_may_come_from_standard_input(build: Builder) -> None:
    text = f'name = "{build("hotloop.c")}"\noffset = tick\nlog 0\nexit\n'

    def dprobes(*arguments: str, program: str = text) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*DPROBES, *arguments], input=program, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )

    done = dprobes("run", "-", "--engine", "ptrace", "--", str(build("hotloop.c")), "4")
    assert (done.returncode, done.stdout.count("]  tick\n")) == (0, 4), done.stderr
    assert dprobes("check", "-").returncode == 0
    wrong = dprobes("check", "-", program="name = x\noffset = f\npsh 1\nexit\n")
    assert wrong.stderr.startswith("<standard input>:3:1: error: ")
    unnamed = dprobes("build", "-")
    assert unnamed.returncode == 2
    assert "Error: a program from standard input needs a name for what is built: -o OUT\n" in unnamed.stderr


def test_standard_input_that_is_closed_is_an_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *DPROBES, "check", "-"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "error: standard input is closed\n")
