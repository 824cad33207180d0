"""Tracepoints and system calls: each is a hit, with the right fields, in 64-bit and 32-bit programs."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.formatters.address_names import KernelNames
from dprobes.target.kernel.tracefs import open_trace_files
from dprobes.target.kernel.tracepoints import KernelTracepoints
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, TIMEOUT, await_true

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

HEADER = "name = vmlinux\nmodtype = tracepoint\nmajor = 9\n"
NO_DESCRIPTOR = 999
"""The descriptor that tests/programs/systemcalls.c asks for."""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def words_of(record: dict[str, Any]) -> tuple[int, ...]:
    """Return the words that a record's handler logged, with their signs."""
    data = bytes.fromhex(record["data"])
    return struct.unpack(f"={len(data) // 8}q", data)


def trace(run: Runner, source: str, *command: str) -> Result:
    """Run a command while a program is inserted."""
    return run(source, ["--", *command], ["--engine", "ebpf"])


def program(*definitions: str) -> str:
    return HEADER + "".join(f"{definition}log 1\nexit\n" for definition in definitions)


@pytest.mark.parametrize("i386", [False, True])
def test_each_system_call_is_a_hit_with_its_arguments_and_result(run: Runner, build: Builder, i386: bool) -> None:
    source = HEADER + (
        "offset = syscall:lseek\nminor = 1\n"
        "push tp, whence\npush tp, offset\npush tp, fd\npush tp, arg1\nlog 4\nexit\n"
        "offset = syscall:lseek\nreturn = yes\nminor = 2\n"
        "push tp, offset\npush tp, ret\nlog 2\nexit\n"
        "offset = syscall:dup\nreturn = yes\nminor = 3\npush tp, ret\nlog 1\nexit\n"
    )
    binary = build("systemcalls.c", "-pthread", i386=i386)
    records = trace(run, source, str(binary), "40").records
    expected = [*range(1000, 1040), 6000, 7000]
    entries = [words_of(record) for record in records if record["minor"] == 1]
    mine = sorted(words for words in entries if words[1] == NO_DESCRIPTOR)
    assert mine == [(offset, NO_DESCRIPTOR, offset, 2) for offset in expected]
    ends = [words_of(record) for record in records if record["minor"] == 2]
    assert sorted(words for words in ends if words[1] in expected) == [(-errno.EBADF, offset) for offset in expected]
    descriptors = [words_of(record)[0] for record in records if record["minor"] == 3]
    assert len(descriptors) == len(expected)
    assert all(descriptor > 2 for descriptor in descriptors)


def test_a_program_of_the_other_word_size_is_told_apart(run: Runner, build: Builder) -> None:
    """The number of dup is 32 in 64-bit programs, and 41 in 32-bit ones, where 32 is gtty."""
    counts = {}
    for name in ("dup", "pipe", "gtty"):
        for i386 in (False, True):
            binary = build("systemcalls.c", "-pthread", i386=i386)
            definition = f"offset = syscall:{name}\nminor = 1\npush tp, arg0\n"
            counts[name, i386] = len(trace(run, program(definition), str(binary), "10").records)
    assert counts == {
        ("dup", False): 12,
        ("dup", True): 12,
        ("pipe", False): 0,
        ("pipe", True): 0,
        ("gtty", False): 0,
        ("gtty", True): 0,
    }


@pytest.mark.parametrize("i386", [False, True])
def test_what_a_system_call_takes_has_the_size_and_sign_of_its_type(build: Builder, tmp_path: Path, i386: bool) -> None:
    source = tmp_path / "signs.dpc"
    source.write_text(
        "return syscall lseek { @failed[retval] = count(); }\n"
        'syscall lseek when (whence >= 0) { @whence[whence] = count(); printf("%d %u", whence, fd); }\n'
        'syscall openat when (dfd < 0) { @dfd[dfd] = count(); printf("%s", filename); }\n'
    )
    binary = build("systemcalls.c", "-pthread", i386=i386)
    command = [*DPROBES, "run", str(source), "--engine", "ebpf", "--", str(binary), "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"@failed[{-errno.EBADF}]: 42" in done.stdout
    assert "@whence[2]: 42" in done.stdout
    assert done.stdout.count(f"  2 {NO_DESCRIPTOR}\n") == 42
    assert "@dfd[-100]: " in done.stdout
    assert "libc.so.6" in done.stdout


def test_strings_of_arguments_are_read(run: Runner) -> None:
    body = "push tp, filename\npush 200\nxchg\nlog str\npush tp, ret\n"
    source = program(f"offset = syscall:openat\nreturn = yes\nminor = 1\n{body}")
    result = trace(run, source, "/bin/cat", "/etc/passwd", "/no")
    found = {}
    for record in result.records:
        data = bytes.fromhex(record["data"])
        assert data[0] == 1
        length = int.from_bytes(data[1:3], "little")
        found[data[3 : 3 + length].decode()] = struct.unpack("=q", data[3 + length :])[0]
    assert found["/etc/passwd"] >= 3
    assert found["/no"] == -errno.ENOENT


def test_fields_of_records_are_those_of_the_tracepoint(run: Runner) -> None:
    """Who forks, and whom: the shell says which processes those were."""
    body = "push tp, child_pid\npush tp, parent_pid\nlog 2\n"
    script = "for n in 1 2 3 4 5; do /bin/sh -c 'echo $PPID $$'; done; :"
    source = HEADER + f"offset = sched:sched_process_fork\nminor = 1\n{body}exit\n"
    result = trace(run, source, "/bin/sh", "-c", script)
    said = {tuple(map(int, line.split())) for line in result.stdout.splitlines()}
    assert len(said) == 5
    assert said <= {words_of(record) for record in result.records}


def test_strings_of_records_are_read_wherever_they_are(run: Runner) -> None:
    """An array in the record (newcomm), and one behind it (filename)."""
    need_kernel_memory()
    names = "push tp, filename\npush 60\nxchg\nlog str\n"
    other = "push tp, newcomm\npush 16\nxchg\nlog str\n"
    source = f"offset = sched:sched_process_exec\nminor = 1\n{names}exit\n"
    source += f"offset = task:task_rename\nminor = 2\n{other}exit\n"
    result = trace(run, HEADER + source, "/bin/sh", "-c", "/bin/true; /usr/bin/env true; :")
    strings = Counter((record["minor"], bytes.fromhex(record["data"])[3:].decode()) for record in result.records)
    assert strings[1, "/bin/true"] == 1
    assert strings[1, "/usr/bin/env"] == 1
    assert strings[2, "true"] == 2
    assert strings[2, "env"] == 1


def test_strings_of_records_are_strings_in_c(tmp_path: Path) -> None:
    need_kernel_memory()
    source = tmp_path / "strings.dpc"
    source.write_text(
        """
        tracepoint sched:sched_process_exec { printf("%s is %d", filename, args.pid); @[filename] = count(); }
        tracepoint task:task_rename {
            printf("%s, %s of %d", newcomm, args.newcomm, sizeof newcomm);
            @named[args.newcomm] = count();
        }
        """
    )
    command = [*DPROBES, "run", str(source), "--engine", "ebpf", "--", "/bin/sh", "-c", "/usr/bin/env true; :"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    texts = [line.split("]  ")[-1] for line in done.stdout.splitlines() if "]  " in line]
    assert "env, env of 16" in texts
    assert sum(text.startswith("/usr/bin/env is ") for text in texts) == 1
    assert "@[/usr/bin/env]: 1" in done.stdout
    assert "@named[env]: 1" in done.stdout


def need_kernel_memory() -> None:
    from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features

    if (error := Features().error(Feature.READ_KERNEL)) is not None:
        pytest.skip(f"kernel lockdown: {error}")


def test_arguments_are_followed_by_the_kernels_types(run: Runner) -> None:
    """The task that a process is, its numbers, and its parent's, equal what the process says itself."""
    body = "push tp, p.real_parent.pid\npush tp, p.tgid\npush tp, p.pid\nlog 3\npush tp, p\npush task\nlog 2\n"
    source = program(f"offset = sched:sched_process_exec\nminor = 1\n{body}push tp, p.mm.mm_users.counter\n")
    result = trace(run, source, "/bin/sh", "-c", "/bin/sh -c 'echo $PPID $$'; :")
    parent, own = map(int, result.stdout.split())
    found = {words_of(record)[:3]: words_of(record)[3:] for record in result.records}
    task, pointer, users = found[own, own, parent]
    assert task == pointer
    assert users == 1


def test_a_null_pointer_on_the_way_raises_an_exception(run: Runner) -> None:
    """A thread of the kernel has no memory of its own: ``mm`` is null, and what is behind it is not there."""
    body = (
        "push tp, next.mm\njnz user\nros 1\nsx none\npush tp, next.mm.pgd\npush 1\nlog 2\nexit\n"
        "none: ros 3\npush 2\nlog 1\nexit\nuser: abort\n"
    )
    source = HEADER + f"offset = sched:sched_switch\nminor = 1\nmaxhits = 20000\n{body}"
    client, output = run.start(source, [], ["--engine", "ebpf"])
    await_true(lambda: output.exists() and output.read_text().count("\n") >= 5, "threads of the kernel")
    records = run.end(client, output).records
    assert {words_of(record) for record in records} == {(2,)}


@pytest.mark.parametrize("field", ["", "push tp, prev.pid\nros 1\n"], ids=["record", "arguments"])
def test_the_call_stack_of_a_sleeper_is_that_which_the_kernel_shows(run: Runner, field: str) -> None:
    script = "sleep 60 & echo $!; sleep 1; cat /proc/$!/stack; kill $!; wait"
    source = HEADER + f"offset = sched:sched_switch\nminor = 1\n{field}log kstack\nexit\n"
    result = run(source, ["--", "/bin/sh", "-c", script], ["--engine", "ebpf", "--log", "pid"])
    pid, *lines = result.stdout.splitlines()
    shown = [line.split()[1].partition("/")[0] for line in lines]
    assert len(shown) > 3
    names = KernelNames()
    stacks = []
    for record in result.records:
        data = bytes.fromhex(record["data"])
        assert data[0] == 9
        addresses = struct.unpack(f"={int.from_bytes(data[1:3], 'little')}Q", data[3:])
        if record["pid"] == int(pid):
            stacks.append([(names.name_of(address) or ("?", ""))[0] for address in addresses])
    assert shown in [stack[-len(shown) :] for stack in stacks]


def test_counts_are_exact_on_all_cpus(run: Runner, build: Builder) -> None:
    """100 000 calls by many threads, counted with fields at both ends."""
    calls = 20_000
    binary = build("systemcalls.c", "-pthread")
    command = ("/bin/sh", "-c", "for n in 1 2 3 4 5; do $0 $1 & done; wait; exec /bin/true", str(binary), str(calls))
    body = "push tp, fd\npush 999\nsub\njz ours\nabort\nours: inc gv, 0\nabort\n"
    end = "push tp, ret\npush 9\nadd\njz failed\nabort\nfailed: inc gv, 1\nabort\n"
    source = (
        "name = vmlinux\nmodtype = tracepoint\ngvars = 2\n"
        f"offset = syscall:lseek\nminor = 1\n{body}offset = syscall:lseek\nreturn = yes\nminor = 2\n{end}"
    )
    source += "offset = sched:sched_process_exec\nminor = 3\npush gv, 0\npush gv, 1\nlog 2\nexit\n"
    counted = [words_of(record) for record in trace(run, source, *command).records]
    assert counted[-1] == (5 * (calls + 2), 5 * (calls + 2))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "offset = sched:sched_swich\nminor = 1\nexit\n",
            "this kernel has no tracepoint 'sched:sched_swich'",
            "did you mean 'sched:sched_switch'",
        ),
        (
            "offset = syscall:opena\nminor = 1\nexit\n",
            "there is no system call 'opena'",
            "did you mean 'openat'",
        ),
        (
            "offset = sched:sched_switch\nminor = 1\npush tp, prev_pd\nlog 1\nexit\n",
            "'sched:sched_switch' has no field 'prev_pd'",
            "there are prev_comm, prev_pid,",
        ),
        (
            "offset = sched:sched_switch\nminor = 1\npush tp, prev.pdi\nlog 1\nexit\n",
            "'prev', of the type 'struct task_struct', has no member 'pdi'",
            "",
        ),
        (
            "offset = sched:sched_switch\nminor = 1\npush tp, prev_pid\npush tp, prev.pid\nlog 2\nexit\n",
            (
                "'prev_pid' is a field of the record of 'sched:sched_switch', and 'prev.pid' is not: a handler sees "
                "either the record or the arguments"
            ),
            "the record has prev_comm, prev_pid,",
        ),
        (
            "offset = syscall:close\nminor = 1\npush tp, ret\nlog 1\nexit\n",
            "the system call 'close' has no field 'ret'",
            "its fields are arg0, arg1, arg2, arg3, arg4, arg5, fd",
        ),
        (
            "offset = sched:sched_switch\nminor = 1\npush tp, prev.sched_reset_on_fork\nlog 1\nexit\n",
            "'prev.sched_reset_on_fork' is a bit field, which no program can load",
            "",
        ),
        (
            "offset = syscall:close\nminor = 1\nexit\noffset = syscall:close\nminor = 2\nexit\n",
            "two probe definitions at syscall:close",
            "",
        ),
    ],
)
def test_what_is_not_there_is_an_error(run: Runner, text: str, message: str, hint: str) -> None:
    result = trace(run, HEADER + text, "/bin/true")
    assert result.status == 2
    assert f": error: {message}\n" in result.stderr
    assert (f"hint: {hint}" if hint else "") in result.stderr


def test_ptrace_has_no_tracepoints(run: Runner) -> None:
    source = program("offset = syscall:close\nminor = 1\npush tp, fd\n")
    result = run(source, ["--", "/bin/true"], ["--engine", "ptrace"])
    assert result.status == 2
    assert "tracepoints and system calls of the kernel" in result.stderr


def test_every_tracepoint_has_its_fields() -> None:
    """What the kernel describes is found, record by record: no format is misread."""
    known = KernelTracepoints()
    with open_trace_files() as files:
        names = [
            (subsystem, name) for subsystem in files.names("events") for name in files.names(f"events/{subsystem}")
        ]
        texts = {pair: files.read("events/{}/{}/format".format(*pair)) for pair in names if pair[0] != "ftrace"}
    assert len(texts) > 300
    for (subsystem, name), text in texts.items():
        fields = known.record_fields(subsystem, name)
        described = [line for line in text.splitlines() if line.startswith("\tfield:") and "common_" not in line]
        assert len(fields) == len({field.name for field in fields.values()}) == len(described), (subsystem, name)
        assert known.find(subsystem, name, fields).fields.keys() == fields.keys()


def test_tracefs_is_not_mounted_anywhere() -> None:
    before = Path("/proc/self/mounts").read_text()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with open_trace_files() as files:
        assert "sched_switch" in files.names("events/sched")
    assert Path("/proc/self/mounts").read_text() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


SLEEPER = """
import os, threading, time
def sleep():
    for n in range(5):
        before = time.monotonic_ns()
        time.sleep(0.04 * (n + 1))
        os.write(1, b"%d %d\\n" % (threading.get_native_id(), time.monotonic_ns() - before))
threads = [threading.Thread(target=sleep) for _ in range(3)]
for each in threads: each.start()
for each in threads: each.join()
"""


def test_a_system_call_knows_how_long_it_has_taken(run: Runner) -> None:
    source = HEADER + (
        "offset = syscall:clock_nanosleep\nreturn = yes\nminor = 1\npush tp, which_clock\npush elapsed\nlog 2\nexit\n"
        "offset = syscall:clone3\nreturn = yes\nminor = 2\nsx unseen\npush tp, ret\npush elapsed\nlog 2\nexit\n"
        "unseen:\npush tp, ret\npush -1\nlog 2\nexit\n"
        "offset = syscall:clone\nreturn = yes\nminor = 3\nsx unseen2\npush tp, ret\npush elapsed\nlog 2\nexit\n"
        "unseen2:\npush tp, ret\npush -1\nlog 2\nexit\n"
    )
    result = trace(run, source, sys.executable, "-S", "-E", "-c", SLEEPER)
    measured = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    sleeps = [(record["tid"], *words_of(record)) for record in result.records if record["minor"] == 1]
    for thread in {tid for tid, _ in measured}:
        own = [time for tid, time in measured if tid == thread]
        seen = [(elapsed, clock) for tid, elapsed, clock in sleeps if tid == thread]
        assert [clock for _, clock in seen] == [1] * 5, "CLOCK_MONOTONIC"
        # A busy machine may delay the thread before and after the call, which is to end at a time, not after one.
        for number, ((elapsed, _), time) in enumerate(zip(seen, own, strict=True), 1):
            assert number * 20_000_000 < elapsed <= time
    made = [words_of(record) for record in result.records if record["minor"] > 1]
    assert sum(returned > 0 and elapsed > 0 for elapsed, returned in made) == 3, made
    # A new thread returns from the call that its parent has made; nobody has seen it enter.
    assert {elapsed for elapsed, returned in made if returned == 0} == {-1}
