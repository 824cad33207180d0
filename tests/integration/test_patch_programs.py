"""Programs with ``patch =``: functions of a running program are replaced until the end of the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.patching import patch_session
from dprobes.engines.ptrace.patching.live_patches import insert_patch, plan_patch
from dprobes.engines.ptrace.patching.patch_records import listed_patches
from dprobes.engines.ptrace.patching.patch_session import PatchSession, ProgramPatch
from dprobes.errors import EngineError
from integration.support import (
    DPROBES,
    PROGRAMS,
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    code_is_original,
    environment,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dprobes.engines.engine_interface import Job
    from dprobes.engines.ptrace.patching.patch_records import PatchRecord
    from integration.support import Builder

OBJECT = ("-shared", "-fPIC", "-nostartfiles")
ORIGINAL = "1003 107 4"
"""The output of replaced.c without a patch."""


@pytest.fixture
def program(build: Builder) -> Path:
    return build("replaced.c", "-O1", str(PROGRAMS / "named_twice.c"))


@pytest.fixture
def replacing(build: Builder) -> Path:
    return build("replacing.c", *OBJECT)


@pytest.fixture
def target(program: Path) -> Iterator[subprocess.Popen[str]]:
    with running(program, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield process


def ask(process: subprocess.Popen[str]) -> str:
    """Return the line that the program prints for a line of input."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return await_line(process).rstrip("\n")


def states_of(pid: int) -> list[tuple[str, str, str]]:
    return [(record.function, record.symbol, state.value) for record, state in listed_patches(pid)]


def rpn_of(program: Path, *patches: str) -> str:
    """Return a program; each of ``patches`` is a function, a blank, and what replaces it."""
    definitions = [f'offset = {each.split()[0]}\npatch = "{each.split()[1]}"\n' for each in patches]
    return f'name = "{program}"\n' + "".join(definitions)


def run(source: Path, pid: int, *options: str) -> subprocess.Popen[str]:
    command = [*DPROBES, "run", str(source), "-p", str(pid), *options]
    return subprocess.Popen(
        command, cwd=source.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def end(client: subprocess.Popen[str]) -> str:
    """End a run by Ctrl-C, and return the rest of its messages."""
    client.send_signal(signal.SIGINT)
    output, said = client.communicate(timeout=TIMEOUT)
    assert output == ""
    assert client.returncode in (0, 130), said
    return said


@pytest.mark.parametrize("form", ["rpn", "dpc", "ppdf"])
def test_functions_are_patched_until_the_run_ends(
    form: str, program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    source = tmp_path / f"fix.{form}"
    (tmp_path / "fix.so").symlink_to(replacing)
    text = rpn_of(program, "work ./fix.so:work", "length ./fix.so:length")
    if form == "dpc":
        text = f'module "{program}";\n[patch "./fix.so:work"] work;\n[patch "./fix.so:length"] length {{ }}\n'
    if form == "ppdf":
        (tmp_path / "fix.rpn").write_text(text)
        building = [*DPROBES, "build", "fix.rpn", "-o", str(source), "--allow-write"]
        subprocess.run(building, cwd=tmp_path, check=True, env=environment(), capture_output=True)
    else:
        source.write_text(text)
    client = run(source, target.pid, "--allow-write")
    said = await_message(client, "2 functions are patched; Ctrl-C ends the run")
    patched = rf"dprobes: note: patched 'work' of '{program}' in process {target.pid}: 9 threads stopped for [\d.]+ ms"
    assert re.search(patched, said)
    assert ask(target) == "1001003 107 104"
    assert sorted(states_of(target.pid)) == [("length", "length", "active"), ("work", "work", "active")]
    assert [line.split(";")[0] for line in end(client).splitlines()] == [
        f"dprobes: note: restored 'length' in process {target.pid}",
        f"dprobes: note: restored 'work' in process {target.pid}",
    ]
    assert ask(target) == ORIGINAL
    assert code_is_original(target.pid, program)


def test_a_persistent_patch_stays(
    program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    source = tmp_path / "fix.rpn"
    source.write_text(rpn_of(program, f"work {replacing}:work", f"length {replacing}:length") + "persist = yes\n")
    client = run(source, target.pid, "--allow-write")
    await_message(client, "2 functions are patched")
    assert end(client).startswith(
        f"dprobes: note: the patch of 'length' stays in process {target.pid}\n"
        f"hint: remove it: dprobes patch --remove length -p {target.pid} --allow-write\n"
    )
    assert ask(target) == "1003 107 104"
    assert sorted(states_of(target.pid)) == [("length", "length", "active"), ("work", "work", "removed")]


@pytest.mark.parametrize(("replace", "result"), [("no", 2 * 1_001_003), ("yes", 2 * 1003)])
def test_a_patch_is_stacked_or_calls_the_original(
    replace: str, result: int, program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    insert_patch(plan_patch(target.pid, replacing, "work", None, None))
    source = tmp_path / "fix.rpn"
    source.write_text(rpn_of(program, f"work {replacing}:doubled") + f"replace = {replace}\n")
    client = run(source, target.pid, "--allow-write")
    await_message(client, "1 function is patched")
    assert ask(target).split()[0] == str(result)
    end(client)
    assert ask(target).split()[0] == "1001003"


def test_nothing_stays_if_one_patch_cannot_be_inserted(
    program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A thread is always in next_line, which waits for input."""
    source = tmp_path / "fix.rpn"
    text = rpn_of(program, f"work {replacing}:work", f"next_line {replacing}:next_line")
    source.write_text(text + "idle = 1\n")
    _, said = run(source, target.pid, "--allow-write").communicate(timeout=TIMEOUT)
    assert said == (
        f"dprobes: error: 'next_line' was not patched: a frame of the function may be on the stack of thread "
        f"{target.pid}\n"
    )
    assert {state for _, _, state in states_of(target.pid)} == {"removed"}
    assert ask(target) == ORIGINAL
    assert code_is_original(target.pid, program)


def test_the_run_ends_with_the_process(
    program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    source = tmp_path / "fix.rpn"
    source.write_text(rpn_of(program, f"work {replacing}:work"))
    client = run(source, target.pid, "--allow-write")
    await_message(client, "1 function is patched")
    target.kill()
    client.communicate(timeout=TIMEOUT)
    assert client.returncode == 0


@pytest.mark.parametrize("engine", ["ebpf", "inline", "gdb=localhost:1", "replay=/dev/null"])
def test_other_engines_refuse_patches(
    engine: str, program: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    source = tmp_path / "fix.rpn"
    source.write_text(rpn_of(program, "work ./fix.so:work"))
    command = [*DPROBES, "run", str(source), "--engine", engine, "--allow-write"]
    command += [] if "=" in engine else ["-p", str(target.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    name = engine.partition("=")[0]
    assert done.returncode == 2
    assert (
        f"fix.rpn:3:1: error: 'patch = \"./fix.so:work\"' needs replacing functions of programs, which the {name} "
        "engine lacks\n"
    ) in done.stderr


def test_a_command_is_not_patched(program: Path, replacing: Path, tmp_path: Path) -> None:
    source, marker = tmp_path / "fix.rpn", tmp_path / "started"
    source.write_text(rpn_of(program, f"work {replacing}:work"))
    command = [*DPROBES, "run", str(source), "--engine", "ptrace", "--allow-write", "--", "touch", str(marker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert done.stderr.endswith(
        "dprobes: error: a patch needs a running process, whose libraries are loaded\n"
        "hint: give the id of the process with -p\n"
    )
    assert not marker.exists()


@pytest.mark.parametrize("option", ["--filter=arg0 == 1", "--count=pid", "--stacks=folded"])
def test_options_about_hits_are_refused(program: Path, replacing: Path, tmp_path: Path, option: str) -> None:
    source = tmp_path / "fix.rpn"
    source.write_text(rpn_of(program, f"work {replacing}:work"))
    command = [*DPROBES, "run", str(source), "--allow-write", "-p", str(os.getpid()), "--allow-self", option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert done.returncode == 2
    assert f"Error: {option.partition('=')[0]} is for hits, and a patch has none\n" in done.stderr


def test_patches_and_probes_are_separate_programs(
    program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    source = tmp_path / "fix.dpc"
    source.write_text(f'[patch "{replacing}:work"] "{program}":work;\nlibc.so.6:malloc {{ }}\n')
    _, said = run(source, target.pid, "--allow-write", "--engine", "ptrace").communicate(timeout=TIMEOUT)
    assert said.endswith(
        "dprobes: error: a program has either patches or probes\nhint: write the patches into a program of their own\n"
    )
    assert states_of(target.pid) == []


def test_functions_of_several_modules_are_patched(
    program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    fix = tmp_path / "fix.c"
    fix.write_text("int puts(const char *text) { return text[0]; }\n")
    subprocess.run(["gcc", *OBJECT, "-o", "fix.so", "fix.c"], cwd=tmp_path, check=True)
    source = tmp_path / "fix.dpc"
    source.write_text(f'[patch "{replacing}:work"] "{program}":work;\n[patch "./fix.so:puts"] libc.so.6:puts;\n')
    client = run(source, target.pid, "--allow-write")
    await_message(client, "2 functions are patched")
    assert ask(target).split()[0] == "1001003"
    assert sorted(states_of(target.pid)) == [("puts", "puts", "active"), ("work", "work", "active")]
    end(client)
    assert {state for _, _, state in states_of(target.pid)} == {"removed"}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_an_idle_function(
    ending: signal.Signals, program: Path, replacing: Path, target: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A thread is always in next_line, so the second patch would be tried for an hour."""
    source = tmp_path / "fix.rpn"
    text = rpn_of(program, f"work {replacing}:work", f"next_line {replacing}:next_line")
    source.write_text(text + "idle = 3600\n")
    client = run(source, target.pid, "--allow-write")
    await_true(lambda: ("work", "work", "active") in states_of(target.pid), "the first patch")
    client.send_signal(ending)
    _, said = client.communicate(timeout=TIMEOUT)
    assert "Traceback" not in said
    assert client.returncode == (130 if ending == signal.SIGINT else -ending)
    assert {state for _, _, state in states_of(target.pid)} == {"removed"}
    assert code_is_original(target.pid, program)


def session_of(program: Path, pid: int, patches: list[ProgramPatch]) -> PatchSession:
    """Return a session with patches, without the program that they come from."""
    job = SimpleNamespace(resolved=SimpleNamespace(probepoints=()), scope=SimpleNamespace(pid=pid), program=None)
    return PatchSession(cast("Job", job), patches)


def test_a_patch_that_stays_after_an_error_is_named_in_it(
    program: Path, replacing: Path, target: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = [plan_patch(target.pid, replacing, name, name, None) for name in ("work", "next_line")]
    patches = [
        ProgramPatch(0, planned[0], None, persists=False),
        ProgramPatch(1, planned[1], 0, persists=False),
    ]

    def refuse(_pid: int, _record: PatchRecord) -> bool:
        raise EngineError("thread 1 does not stop")

    monkeypatch.setattr(patch_session, "remove_patch", refuse)
    with pytest.raises(EngineError) as caught:
        session_of(program, target.pid, patches).begin()
    assert caught.value.message == (
        f"'next_line' was not patched: a frame of the function may be on the stack of thread {target.pid}; "
        f"the patch of 'work' stays in process {target.pid}: thread 1 does not stop"
    )
    assert caught.value.hint == f"remove it later: dprobes patch --remove work -p {target.pid} --allow-write"


def test_a_process_that_may_not_be_inspected_has_not_left_the_program(
    program: Path, replacing: Path, target: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sets PR_SET_DUMPABLE to 0 shows no stack to users without CAP_SYS_PTRACE."""
    planned = plan_patch(target.pid, replacing, "work", "work", None)
    session = session_of(program, target.pid, [ProgramPatch(0, planned, None, persists=False)])
    session.begin()
    monkeypatch.setattr(patch_session, "first_stack_of", lambda _: None)
    session.wake()
    assert not session._await()
    session.close()
    assert states_of(target.pid) == [("work", "work", "removed")]
