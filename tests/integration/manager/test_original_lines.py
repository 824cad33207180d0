"""The original's command lines, as its man page has them, in a real shell, with a manager."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

import pytest

from integration.manager.sandbox import rows
from integration.support import await_true, code_is_original

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Sandbox, Service

EXAMPLE_6 = """\
name = "{library}"
major = 1
groupdef = filesys memory process faults  // Valid groups
typedef = enter leave                     // Valid types
#ifndef LOGGED
#define LOGGED 1
#endif
vars = 2
gvars = 2

offset = start_process
minor = 0
group = process                   // probe point group
type = enter                      // probe point type
inc lv, 0
inc gv, 1
push LOGGED
log 1
exit

offset = start_process
minor = 1
return = yes
group = process
type = leave
push r, sp
log 1
exit

offset = allocate_memory
minor = 2
group = memory
type = enter
maxhits = 100
push r, sp
log 1
exit

offset = allocate_memory
minor = 4
return = yes
group = memory
type = leave
maxhits = 100
push r, sp
log 1
exit

offset = write_file
minor = 5
group = filesys
type = enter
maxhits = 100
push r, sp
log 1
exit

offset = write_file
minor = 6
return = yes
group = filesys
type = leave
maxhits = 100
push r, sp
log 1
exit

offset = handle_fault
minor = 7
group = faults
type = enter
maxhits = 100
push r, sp
log 1
exit

offset = handle_fault
minor = 8
return = yes
group = faults
type = leave
maxhits = 100
push r, sp
log 1
exit
"""
"""
Example 6 of the man page, with a library's functions for those of the kernel, the same codes, groups and types.

Where its last instructions are depends on the compiler, so what leaves a function is a probepoint at its return.
"""

FUNCTIONS = {"start_process": (0, 1), "allocate_memory": (2, 4), "write_file": (5, 6), "handle_fault": (7, 8)}

LINES = [
    ("", {0, 1, 2, 4, 5, 6, 7, 8}),
    (" --group process --type enter", {0}),
    (" --group = filesys", {5, 6}),
    (" --type = leave", {1, 4, 6, 8}),
    (" --group process memory --type leave", {1, 4}),
]


@pytest.fixture(autouse=True)
def _bpf() -> None:
    """Have the engine that inserts into all processes, which is what the original's lines say."""
    from integration.ebpf.kernel import require_bpf, require_initial_namespace

    require_bpf()
    require_initial_namespace()


@pytest.fixture
def example(sandbox: Sandbox, target: Service) -> Path:
    return sandbox.write("example.rpn", EXAMPLE_6.format(library=target.library))


@pytest.fixture
def kernel_log() -> Iterator[KernelLog]:
    if not os.access("/dev/kmsg", os.W_OK | os.R_OK):
        pytest.skip("/dev/kmsg cannot be read and written here")
    try:
        log = KernelLog()
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read here: {error.strerror}")
    yield log
    os.close(log.descriptor)


class KernelLog:
    """Read what is written to the kernel's log from now on."""

    def __init__(self) -> None:
        self.descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self.descriptor, 0, os.SEEK_END)
        self.lines: list[str] = []

    def records(self) -> list[str]:
        """Return the header lines of our records, those of before included."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = os.read(self.descriptor, 8192).decode(errors="replace")
                self.lines += message.partition(";")[2].splitlines()[:1]
        return [line for line in self.lines if "DProbes(" in line]


def call_all(target: Service, count: int) -> None:
    for name in FUNCTIONS:
        target.call(name, count)


def test_example_6_with_its_six_lines(sandbox: Sandbox, target: Service, example: Path) -> None:
    sandbox("dprobes --build-ppdf example.rpn -o example.ppdf")
    assert (sandbox.directory / "example.ppdf").exists()
    for options, minors in LINES:
        said = sandbox(f"dprobes --apply-ppdf example.ppdf{options}")
        count = len(minors)
        assert said == f"inserted '{target.library}': {count} of {count} probepoints active\n"
        call_all(target, 3)
        name = str(target.library)
        await_true(lambda: all(hits == 3 for hits in sandbox.counts(name).values()), "the hits")  # noqa: B023
        assert sandbox.counts(name) == dict.fromkeys(minors, 3)
        sandbox("dprobes --remove --all")
    assert code_is_original(target.pid, target.library)
    target.end()


def test_insert_with_a_definition_query_getvars_and_remove(sandbox: Sandbox, target: Service, example: Path) -> None:
    name = str(target.library)
    # The blanks of the man page's line are part of it.
    assert sandbox("dprobes -i example.rpn -D LOGGED = 7 --group process --type enter -l PID UID").startswith(
        "inserted"
    )
    target.call("start_process", 4)
    await_true(lambda: sandbox.counts(name, "records") == {0: 4}, "the records")
    *_, row = rows(sandbox("dprobes --query --all"))
    assert row[:5] == ["1,0", "start_process", "ACTIVE", "4", "4"]
    assert sandbox(f"dprobes -q --name {name}") == sandbox(f"dprobes --query --name = {name}")
    for line in ("dprobes --query --all --extended", "dprobes -q -a -x"):
        extended = sandbox(line)
        assert "groupdef" in extended or "filesys" in extended
        assert "  locals: 4, 0\n" in extended
        assert re.search(r"inc lv, 0$", extended, re.MULTILINE)

    assert rows(sandbox(f"dprobes --getvars --name {name} --index=0-0 --local"))[-1] == ["lv,0", "4", "0x4"]
    assert rows(sandbox("dprobes -g -a -i=1-1 --global"))[-1] == ["gv,1", "4", "0x4"]
    assert sandbox("dprobes --getvars --all --reset") == ""
    assert sandbox.json("dprobes getvars --json")["programs"][0]["locals"] == [0, 0]

    lines = sandbox("dprobes log --format dprobes").splitlines()
    headers = [line for line in lines if line.startswith("DProbes(1,0)")]
    assert len(headers) == 4
    assert all(f"pid={target.pid} uid={os.getuid()}" in line for line in headers)
    assert [line for line in lines if line not in headers] == ["07 00 00 00 00 00 00 00"] * 4

    assert sandbox.refused("dprobes --insert example.rpn") == (
        f"dprobes: error: a program for '{name}' is inserted already\n"
        "hint: --merge adds to it, --replace replaces it, --as NAME inserts another one\n"
        "dprobes: note: the present form, which has all options, "
        "is: dprobes insert example.rpn --log-target KLOG\n"
    )
    assert sandbox("dprobes --insert example.rpn --merge --type = leave").startswith("inserted")
    assert sorted(probe["minor"] for program in sandbox.json("dprobes query --json")["programs"]
                  for probe in program["probes"]) == [0, 1, 4, 6, 8]  # fmt: skip
    assert sandbox(f"dprobes --remove --name {name}").startswith("removed ")
    assert sandbox("dprobes -q -a") == "no program is inserted\n"
    assert sandbox("dprobes -r -a") == "no program is inserted\n"
    target.end()


def test_replace_and_unformatted_output(sandbox: Sandbox, target: Service, example: Path) -> None:
    name = str(target.library)
    sandbox("dprobes -i example.rpn -u process -t enter --log-target ./first.txt -f")
    target.call("start_process", 2)
    await_true(lambda: sandbox.counts(name) == {0: 2}, "the hits")
    sandbox("dprobes -i example.rpn -u = memory -t = enter -c --dont-verify-opcodes --log-target ./second.txt")
    target.call("start_process", 2)
    target.call("allocate_memory", 1)
    await_true(lambda: sandbox.counts(name) == {2: 1}, "the hit")
    first, second = (sandbox.directory / file for file in ("first.txt", "second.txt"))
    await_true(lambda: first.read_text().count("DProbes(1,0)") == 2, "the first file")
    await_true(lambda: second.exists() and second.read_text().count("DProbes(1,2)") == 1, "the second file")
    assert first.read_text().splitlines()[1] == "01 00 00 00 00 00 00 00"
    sandbox("dprobes --remove --all")
    target.end()


def test_records_go_to_the_kernels_log(sandbox: Sandbox, target: Service, example: Path, kernel_log: KernelLog) -> None:
    done = sandbox.shell("dprobes --insert example.rpn --group filesys --type enter --log ALL --stop-cpus")
    assert (done.returncode, done.stdout) == (0, f"inserted '{target.library}': 1 of 1 probepoints active\n")
    assert "note: --stop-cpus has no effect: probepoints are inserted without stopping the processors" in done.stderr
    target.call("write_file", 3)
    await_true(lambda: len(kernel_log.records()) == 3, "three records in the kernel's log")
    pattern = (
        rf"DProbes\(1,5\) cpu=\d+ name=service pid={target.pid} uid={os.getuid()} cs=[0-9a-f]+ rip=[0-9a-f]{{16}} "
    )
    assert all(re.search(pattern, line) for line in kernel_log.records()), kernel_log.records()
    assert sandbox.json("dprobes log-target list --json")["targets"][0]["name"] == "KLOG"
    sandbox("dprobes --remove --all")
    target.end()


@pytest.mark.parametrize(("line", "start"), [("-h", "Usage: dprobes"), ("--help", "Usage: dprobes"),
                                             ("-v", "dprobes "), ("--version", "dprobes ")])  # fmt: skip
def test_help_and_version(sandbox: Sandbox, line: str, start: str) -> None:
    assert sandbox(f"dprobes {line}").startswith(start)


def test_log_targets_that_cannot_be_leave_nothing(sandbox: Sandbox, target: Service, example: Path) -> None:
    assert "there is no log target 'NOWHERE'" in sandbox.refused("dprobes -i example.rpn --log-target NOWHERE")
    assert sandbox.manager is None  # none was started for that
    # Nor is a log target left by a program that cannot be inserted.
    again = f"dprobes insert example.rpn -p {target.pid} --engine ptrace"
    sandbox(again)
    assert "is inserted already" in sandbox.refused(f"{again} --log-target ./records.txt")
    assert sandbox("dprobes log-target list") == "no log targets besides the manager's trace file\n"
