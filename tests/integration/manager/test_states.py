"""The states that query shows for probepoints, and variables that programs of both engines share."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.manager.sandbox import service
from integration.support import TIMEOUT, await_line, await_true, running

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder


def state(sandbox: Sandbox, name: str, minor: int = 1) -> tuple[str, str]:
    (probe,) = (probe for probe in sandbox.probes(name) if probe["minor"] == minor)
    return probe["state"], probe["detail"]


def test_mismatch(sandbox: Sandbox, target: Service, engine: str) -> None:
    text = f'name = "{target.library}"\noffset = write_file\nopcode = 0x55\nminor = 1\nexit\n'
    text += "offset = release_memory\nminor = 2\nexit\n"
    source = sandbox.write("p.rpn", text)
    done = sandbox.shell(f"dprobes insert {source} --engine {engine} -p {target.pid} --as svc")
    assert "warning: MISMATCH: opcode 0x48 (lea rax, [rdi*8]) is there, not 0x55; not inserted" in done.stderr
    assert done.stdout == "inserted 'svc': 1 of 2 probepoints active\n"
    assert state(sandbox, "svc")[0] == "MISMATCH"
    assert state(sandbox, "svc", 2)[0] == "ACTIVE"
    target.call("write_file", 2)
    target.call("release_memory", 3)
    await_true(lambda: sandbox.counts("svc") == {1: 0, 2: 3}, "the hits")


def test_a_program_waits_for_its_module(sandbox: Sandbox, build: Builder) -> None:
    """By ptrace it may be there before: the module is probed as soon as a process maps it."""
    plugin, loader = build("plugin.c", "-shared", "-fPIC"), build("loader.c", "-ldl")
    source = sandbox.write("p.rpn", f'name = "{plugin}"\noffset = plugin_call\nminor = 1\nexit\n')
    with running("sh", "-c", f"echo ready; read line; exec {loader} {plugin} 3", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        said = sandbox(f"dprobes insert {source} --engine ptrace -p {process.pid} --as late")
        assert said == f"inserted 'late': it waits for the module '{plugin}'\n"
        assert sandbox.probes("late") == []
        assert "definition 1 is not resolved: no file of the module" in sandbox("dprobes query")
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.wait(TIMEOUT) == 0
        await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the program")
        assert sandbox.counts("late") == {1: 9}


def test_the_return_of_a_function_that_never_returns_waits_for_nothing(
    sandbox: Sandbox, build: Builder, engine: str
) -> None:
    program = build("sampled.c")
    source = sandbox.write("p.rpn", f'name = "{program}"\noffset = main\nreturn = yes\nminor = 1\nexit\n')
    with running(program) as process:
        await_line(process)
        done = sandbox.shell(f"dprobes insert {source} --engine {engine} -p {process.pid} --as never")
        assert done.returncode == 1
        assert done.stdout == "inserted 'never': 0 of 1 probepoints active\n"
        assert "warning: 'main' never returns\n" in done.stderr
        assert state(sandbox, "never") == ("COMPILED", "it never returns")


def test_conflict_with_a_tracers_breakpoint(sandbox: Sandbox, target: Service) -> None:
    require_bpf()
    require_initial_namespace()
    source = sandbox.write("p.rpn", f'name = "{target.library}"\noffset = write_file\nminor = 1\nexit\n')
    sandbox(f"dprobes insert {source} --engine ptrace -p {target.pid} --as first")
    done = sandbox.shell(f"dprobes insert {source} --engine ebpf -p {target.pid} --as svc")
    assert done.returncode == 1
    assert re.search(
        rf"warning: CONFLICT at write_file: in process {target.pid}: a breakpoint of the dprobes of process \d+, "
        ".*is there: offset",
        done.stderr,
    )
    assert state(sandbox, "svc")[0] == "CONFLICT"
    target.call("write_file", 2)
    await_true(lambda: sandbox.counts("first") == {1: 2}, "the hits of the first one")


@pytest.mark.usefixtures("debug_registers")
def test_no_debug_register_is_left(sandbox: Sandbox, build: Builder) -> None:
    require_bpf()
    require_initial_namespace()
    program = build("watched.c")
    text = f'name = "{program}"\n' + "".join(
        f"address = {name}\nwatchpoint = rw\nminor = {n}\nexit\n"
        for n, name in enumerate(("cell", "cell + 8", "bytes", "bytes + 8", "bytes + 16"), 1)
    )
    source = sandbox.write("p.rpn", text)
    with running("sh", "-c", f"echo ready; read line; exec {program} put 3", stdin=subprocess.PIPE) as process:
        await_line(process)
        sandbox(f"dprobes insert {source} --engine ptrace -p {process.pid} --as five")
        assert process.stdin is not None
        process.stdin.close()
        await_true(lambda: sandbox.json("dprobes query --json")["programs"][0]["ended"], "the end of the program")
        states = [probe["state"] for probe in sandbox.probes("five")]
        assert sorted(states) == ["DEBUGREG_UNAVAIL"] + ["REMOVED"] * 4
        assert sum(sandbox.counts("five").values()) > 0


def test_the_manager_does_not_probe_itself(sandbox: Sandbox, target: Service, engine: str) -> None:
    source = sandbox.write("p.rpn", f'name = "{target.library}"\noffset = write_file\nminor = 1\nexit\n')
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as svc")
    refusal = sandbox.refused(f"dprobes insert {source} --engine {engine} -p {sandbox.manager} --as other")
    assert refusal == f"dprobes: error: EXCLUDED: process {sandbox.manager} is dprobes itself\n"


@pytest.mark.alone
def test_the_manager_is_no_process_of_a_program_for_all(sandbox: Sandbox) -> None:
    """It calls what is probed for each record that it writes: each would bring forth another one."""
    require_bpf()
    require_initial_namespace()
    source = sandbox.write("p.rpn", 'name = "libc.so.6"\noffset = write\nminor = 1\nexit\n')
    sandbox(f"dprobes insert {source} --engine ebpf --as everybody")
    for _ in range(20):
        subprocess.run(["true"], check=True)
        sandbox("echo hits > /dev/null; /bin/echo hits > /dev/null")
    await_true(lambda: sandbox.counts("everybody", "records")[1] >= 20, "hits of other processes")
    sandbox("dprobes remove --name everybody")
    pids = {json.loads(line)["pid"] for line in sandbox("dprobes log --format json").splitlines()}
    assert len(pids) >= 20
    assert sandbox.manager not in pids


def test_both_engines_share_the_global_variables(sandbox: Sandbox, build: Builder) -> None:
    require_bpf()
    require_initial_namespace()
    with service(build) as one, service(build) as two:
        for engine, each, function in (("ptrace", one, "release_memory"), ("ebpf", two, "write_file")):
            text = (
                f'name = "{each.library}"\ngvars = 3\nvars = 1\noffset = {function}\nminor = 1\n'
                "inc gv, 2\ninc lv, 0\nexit\n"
            )
            source = sandbox.write(f"{engine}.rpn", text)
            sandbox(f"dprobes insert {source} --engine {engine} -p {each.pid} --as {engine}")
        one.start("release_memory", 2_000)
        two.start("write_file", 100_000, 2)
        one.finish(2_000)
        two.finish(200_000)

        def values() -> tuple[list[int], dict[str, list[int]]]:
            found = sandbox.json("dprobes getvars --json")
            return found["globals"]["values"], {each["name"]: each["locals"] for each in found["programs"]}

        await_true(
            lambda: values() == ([0, 0, 202_000], {"ptrace": [2_000], "ebpf": [200_000]}), "every hit, counted once"
        )
        # A program that takes the place of another one begins with fresh locals; globals stay.
        sandbox(f"dprobes insert {sandbox.directory}/ebpf.rpn --engine ebpf -p {two.pid} --as ebpf --replace")
        assert values() == ([0, 0, 202_000], {"ptrace": [2_000], "ebpf": [0]})
        assert sandbox.counts("ebpf") == {1: 0}
