"""The head start of a line that was run before: its probe is armed before the rest is imported."""

from __future__ import annotations

import binascii
import contextlib
import marshal
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    code_is_original,
    load_bias,
    memory_at,
    running,
    symbols_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.support import Builder

SITE = """
import os, sys, time
def hook(event, arguments):
    if event == "import" and arguments[0] == "dprobes.cli.main":
        place = os.environ.pop("STALLED_AT", "")
        if place:
            open(place + ".stalled", "w").close()
            while not os.path.exists(place + ".go"):
                time.sleep(0.005)
sys.addaudithook(hook)
"""
"""Has dprobes wait where it would import its command line, which comes behind the head start."""


class Machine:
    """A user with a cache directory, and a service whose library is probed."""

    def __init__(self, directory: Path, build: Builder) -> None:
        self.directory = directory
        library = build("service.c", "-shared", "-fPIC", "-DLIBRARY", name="libservice.so.1")
        self.library = directory / "libservice.so.1"
        shutil.copy2(library, self.library)
        self.program = build("service.c", str(self.library), f"-Wl,-rpath,{directory}", name="service")
        (directory / "site").mkdir()
        (directory / "site" / "sitecustomize.py").write_text(SITE)
        path = os.pathsep.join((str(directory / "site"), *filter(None, [os.environ.get("PYTHONPATH")])))
        self.environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(directory / "cache")}
        self.environment.pop("DPROBES_NO_CACHE", None)
        self.plans = directory / "cache" / "dprobes" / "headstarts"
        self.text = f'"{self.library}":write_file {{ @ = count(); }}'

    @contextlib.contextmanager
    def service(self) -> Iterator[subprocess.Popen[str]]:
        with running(self.program, stdin=subprocess.PIPE) as process:
            assert await_line(process) == "ready\n"
            yield process

    @contextlib.contextmanager
    def dprobes(self, *options: str, text: str = "", stalled: bool = False) -> Iterator[subprocess.Popen[str]]:
        """Run a line; if it is stalled, until it is let go."""
        for end in ("stalled", "go"):
            (self.directory / f"place.{end}").unlink(missing_ok=True)
        command = [*DPROBES, "run", "--engine", "ebpf", "-e", text or self.text, *options]
        more = {"STALLED_AT": str(self.directory / "place")} if stalled else {}
        with subprocess.Popen(
            command, env=self.environment | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                if stalled:
                    await_true((self.directory / "place.stalled").exists, "dprobes at the import of its command line")
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def go(self) -> None:
        (self.directory / "place.go").touch()

    def once(self, *options: str, text: str = "", is_new: bool = True) -> None:
        """Run a line until its probepoint active."""
        with self.dprobes(*options, text=text) as process:
            await_message(process, "active")
            finish(process)
        assert self.plans.exists() == is_new

    def is_armed(self, process: subprocess.Popen[str], name: str = "write_file") -> bool:
        offset = symbols_of(self.library)[name]
        return memory_at(process.pid, self.library, name, 1) != self.library.read_bytes()[offset : offset + 1]


def finish(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode in (0, 130), said
    return printed


def call(process: subprocess.Popen[str], count: int, name: str = "write_file") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{name} {count}\n")
    process.stdin.flush()
    assert await_line(process) == f"{count}\n"


def rewrite(machine: Machine, change: Callable[[Any], Any]) -> None:
    """Change the plan that is kept."""
    (file,) = machine.plans.iterdir()
    key, files, code, plan = marshal.loads(file.read_bytes()[4:])
    content = marshal.dumps((key, files, code, change(plan)))
    file.write_bytes(binascii.crc32(content).to_bytes(4, "little") + content)


@pytest.fixture
def machine(tmp_path: Path, build: Builder) -> Machine:
    require_bpf()
    require_initial_namespace()
    return Machine(tmp_path, build)


@pytest.mark.parametrize("scope", ["process", "all"])
def test_hits_of_before_and_after_the_rest_is_imported_count(machine: Machine, scope: str) -> None:
    with machine.service() as service:
        options = ("-p", str(service.pid)) if scope == "process" else ()
        machine.once(*options)
        assert code_is_original(service.pid, machine.library)
        with machine.dprobes(*options, stalled=True) as process:
            assert machine.is_armed(service)
            call(service, 1000)
            machine.go()
            await_message(process, "active")
            call(service, 500)
            assert "@: 1500" in finish(process)
        assert code_is_original(service.pid, machine.library)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("return {} {{ @ = hist(elapsed >= 0); }}", "20"),
        ("thread long n; {} {{ n++; @[n > 0] = count(); }}", "@[1]: 20"),
        ("long total; {} when (arg0 > 5) {{ total++; @ = last(total); }}", "@: 8"),
        ('{} {{ @a = count(); }} "{library}":handle_fault {{ @b = count(); }}', "@a: 20"),
    ],
)
def test_handlers_of_all_kinds_count_from_the_beginning(machine: Machine, text: str, shown: str) -> None:
    text = text.format(f'"{machine.library}":write_file', library=machine.library)
    with machine.service() as service:
        machine.once("-p", str(service.pid), text=text)
        with machine.dprobes("-p", str(service.pid), text=text, stalled=True) as process:
            assert machine.is_armed(service)
            call(service, 10)
            machine.go()
            await_message(process, "active")
            call(service, 10)
            assert shown in finish(process)


def test_no_record_is_lost_that_is_made_before_somebody_reads(machine: Machine) -> None:
    """More of them than the ring has room for, and each is there, in order."""
    early, late = 60_000, 1000
    text = f'"{machine.library}":write_file {{ printf("%d\\n", arg0); }}'
    with machine.service() as service:
        options = ("-p", str(service.pid), "--ring-size", "1", "-o", str(machine.directory / "records"))
        machine.once(*options, text=text)
        (machine.directory / "records").unlink()
        with machine.dprobes(*options, text=text, stalled=True) as process:
            assert machine.is_armed(service)
            call(service, early)
            machine.go()
            await_message(process, "active")
            call(service, late)
            finish(process)
    found = [int(line.split()[-1]) for line in (machine.directory / "records").read_text().splitlines()]
    assert len(found) == early + late
    assert found == [*range(early), *range(late)]


def test_another_process_of_the_same_program_has_a_head_start_too(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
    with (
        machine.service() as other,
        machine.service() as third,
        machine.dprobes("-p", str(other.pid), stalled=True) as process,
    ):
        assert machine.is_armed(other)
        call(third, 7)
        call(other, 20)
        machine.go()
        await_message(process, "active")
        call(third, 7)
        assert "@: 20" in finish(process)


def test_children_count_that_there_were_before(machine: Machine) -> None:
    """A shell is the process of -p; the service is its child, and has another one later."""
    script = f'"{machine.program}"; "{machine.program}"'
    with running("sh", "-c", script, stdin=subprocess.PIPE) as shell:
        await_line(shell)
        # The shell itself does not map the library, and so there is no head start for it.
        machine.once("-p", str(shell.pid))
        with machine.dprobes("-p", str(shell.pid), stalled=True) as process:
            machine.go()
            await_message(process, "active")
            call(shell, 30)
            assert "@: 30" in finish(process)


def test_a_killed_head_start_leaves_the_code_as_it_was(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        for _ in range(5):
            with machine.dprobes("-p", str(service.pid), stalled=True) as process:
                assert machine.is_armed(service)
                process.kill()
                process.wait(TIMEOUT)
            await_true(lambda: code_is_original(service.pid, machine.library), "the code of before")
            call(service, 10)


def test_an_interrupt_ends_a_head_start(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        with machine.dprobes("-p", str(service.pid), stalled=True) as process:
            assert machine.is_armed(service)
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT) == 130
        assert code_is_original(service.pid, machine.library)


def _another_size(plan: Any) -> Any:
    """Have the probe table made for more probepoints than there are."""
    path, identity, places, steps, scope, contents, ring = plan
    (number, _, _), *_ = contents
    command, attributes, *rest = steps[number]
    larger = attributes[:8] + (int.from_bytes(attributes[8:12], "little") * 2).to_bytes(4, "little") + attributes[12:]
    steps = (*steps[:number], (command, larger, *rest), *steps[number + 1 :])
    return path, identity, places, steps, scope, contents, ring


def _one_step_more(plan: Any) -> Any:
    path, identity, places, steps, *rest = plan
    return path, identity, places, (*steps, steps[1]), *rest


@pytest.mark.parametrize("change", [_another_size, _one_step_more])
def test_what_turns_out_to_be_something_else_counts_nothing(machine: Machine, change: Callable[[Any], Any]) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        rewrite(machine, change)
        for calls_early in (False, True):  # the first of these runs keeps another plan
            with machine.dprobes("-p", str(service.pid), stalled=True) as process:
                assert machine.is_armed(service)
                call(service, 1000)
                machine.go()
                await_message(process, "active")
                call(service, 11)
                assert f"@: {1011 if calls_early else 11}" in finish(process)
        assert code_is_original(service.pid, machine.library)


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "checked", "ours"])
def test_a_damaged_plan_does_no_harm(machine: Machine, damage: str) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        (file,) = machine.plans.iterdir()
        content = file.read_bytes()
        if damage == "ours":
            rewrite(machine, lambda plan: plan[:3])
        else:
            other = marshal.dumps(("another key", {}, (), ()))
            file.write_bytes(
                {
                    "empty": b"",
                    "cut": content[: len(content) // 2],
                    "other": content[:-1] + bytes([content[-1] ^ 0x55]),
                    "checked": binascii.crc32(other).to_bytes(4, "little") + other,
                }[damage]
            )
        with machine.dprobes("-p", str(service.pid), stalled=True) as process:
            assert not machine.is_armed(service)
            machine.go()
            await_message(process, "active")
            call(service, 5)
            assert "@: 5" in finish(process)
        with machine.dprobes("-p", str(service.pid), stalled=True):
            assert machine.is_armed(service)


def test_somebody_elses_breakpoint_is_left_alone(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        place = load_bias(service.pid, machine.library) + symbols_of(machine.library)["write_file"]
        with (
            breakpoint_in(service.pid, place),
            machine.dprobes("-p", str(service.pid), stalled=True) as process,
        ):
            assert uprobes_of(process.pid) == 0
            machine.go()
            await_message(process, "CONFLICT")
        assert code_is_original(service.pid, machine.library)


def test_what_has_changed_has_no_head_start(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
    data = machine.library.read_bytes()
    machine.library.unlink()
    machine.library.write_bytes(data)
    with machine.service() as service, machine.dprobes("-p", str(service.pid), stalled=True):
        assert not machine.is_armed(service)


def test_a_process_of_another_program_has_none(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        with running("sleep", "60") as other, machine.dprobes("-p", str(other.pid), stalled=True):
            assert not machine.is_armed(service)


@pytest.mark.parametrize(
    ("options", "handler"),
    [
        (("--allow-write",), "@ = count();"),
        (("--pid-namespace",), "@ = count();"),
        ((), "@[ustack()] = count();"),
        (("-D", "UNUSED=1", "--filter", "pid > 0"), "@ = count();"),
    ],
)
def test_what_may_change_something_or_depends_on_more_has_none(
    machine: Machine, options: tuple[str, ...], handler: str
) -> None:
    text = f'"{machine.library}":write_file {{ {handler} }}'
    with machine.service() as service:
        machine.once("-p", str(service.pid), *options, text=text, is_new=False)


@pytest.mark.parametrize(("pattern", "is_new"), [("many_1?", True), ("many_1??", False)])
def test_few_places_have_one(machine: Machine, build: Builder, pattern: str, is_new: bool) -> None:
    program = build("many.c")
    with running(program, "1", "wait", stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        machine.once("-p", str(process.pid), text=f'"{program}":{pattern} {{ @ = count(); }}', is_new=is_new)


def test_a_command_has_none(machine: Machine) -> None:
    command = [*DPROBES, "run", "--engine", "ebpf", "-e", machine.text, "--", str(machine.program)]
    done = subprocess.run(
        command,
        env=machine.environment,
        input="write_file 3\n",
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    assert "@: 3" in done.stdout
    assert not machine.plans.exists()


def test_the_switch_turns_it_off(machine: Machine) -> None:
    with machine.service() as service:
        machine.once("-p", str(service.pid))
        machine.environment["DPROBES_NO_CACHE"] = "1"
        with machine.dprobes("-p", str(service.pid), stalled=True):
            assert not machine.is_armed(service)


def test_a_refused_run_takes_it_away(machine: Machine, tmp_path: Path) -> None:
    """The same line as before, but the file for its output cannot be made any more."""
    place = tmp_path / "directory" / "records"
    place.parent.mkdir()
    with machine.service() as service:
        machine.once("-p", str(service.pid), "-o", str(place))
        shutil.rmtree(place.parent)
        with machine.dprobes("-p", str(service.pid), "-o", str(place), stalled=True) as process:
            assert machine.is_armed(service)
            machine.go()
            _, said = process.communicate(timeout=TIMEOUT)
            assert process.returncode != 0
            assert str(place) in said
        assert code_is_original(service.pid, machine.library)


@contextlib.contextmanager
def breakpoint_in(pid: int, address: int) -> Iterator[None]:
    """Have a debugger, which is a process of its own, keep a breakpoint in a process."""
    script = (
        "import ctypes, os, sys\n"
        "pid, address = int(sys.argv[1]), int(sys.argv[2])\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.ptrace(ctypes.c_long(0x4206), pid, None, None) == 0\n"  # PTRACE_SEIZE
        "memory = os.open(f'/proc/{pid}/mem', os.O_RDWR)\n"
        "old = os.pread(memory, 1, address)\n"
        "os.pwrite(memory, b'\\xcc', address)\n"
        "print('there', flush=True)\n"
        "sys.stdin.read()\n"
        "os.pwrite(memory, old, address)\n"
    )
    with running(sys.executable, "-c", script, pid, address, stdin=subprocess.PIPE) as debugger:
        assert await_line(debugger) == "there\n"
        yield
        assert debugger.stdin is not None
        debugger.stdin.close()
        debugger.wait(TIMEOUT)


def uprobes_of(pid: int) -> int:
    """Return how many places the links of a process have uprobes at."""
    count = 0
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            count += sum(int(line.split()[1]) for line in entry.read_text().splitlines() if "uprobe_cnt" in line)
    return count
