"""Samplers: what they interrupt, where that lies, and what they count."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.errors import SourceError
from dprobes.platform.linux.procfs import online_cpus
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_file
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_line, await_message, await_true, executable_segments, running, symbols_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from integration.support import Builder, Result, Runner


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def sampler(name: object, body: str, *, header: str = "", file_header: str = "", rate: str = "500hz") -> str:
    return f'name = "{name}"\n{file_header}sampler = {rate}\nminor = 1\n{header}{body}exit\n'


def records_in(output: Path) -> list[dict[str, Any]]:
    """Return the records that were written so far, the last line perhaps being on its way."""
    lines = output.read_text().split("\n")[:-1] if output.exists() else []
    return [json.loads(line) for line in lines]


def sample(
    run: Runner, source: str, *target: object, until: int = 20, key: str = "pid", seen: Collection[int] = ()
) -> Result:
    """Run a program until it has emitted so many records, with all of the values ``seen`` among those of ``key``."""
    client, output = run.start(source, list(map(str, target)), ["--engine", "ebpf"])

    def is_enough() -> bool:
        records = records_in(output)
        return len(records) >= until and {record[key] for record in records}.issuperset(seen)

    # On a busy machine a process may have to wait long for its turn.
    await_true(lambda: is_enough() or client.poll() is not None, "enough samples")
    return run.end(client, output)


@contextlib.contextmanager
def spinning(program: Path, *before: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Have a program in its endless loop; also the address of that."""
    with running(*before, program) as process:
        yield process, int(await_line(process), 16)


@pytest.mark.parametrize("kind", ["-pie", "-no-pie", "-static"])
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_samples_lie_in_the_module_wherever_it_is_loaded(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    program = build("sampled.c", kind, i386=i386)
    size = symbols_of(program)["behind"] - symbols_of(program)["spin"]
    with spinning(program) as (process, spin):
        result = sample(run, sampler(program, "push r, eip\npush spin\nlog 2\n"), "-p", process.pid)
    assert len(result.records) >= 20
    for record, (found, ip) in zip(result.records, result.words(size=4 if i386 else 8), strict=True):
        assert found == spin
        assert 0 <= ip - spin < size
        assert (record["ip"], record["pid"]) == (ip, process.pid)
    assert result.counts[1].executed == "clock"


def test_other_modules_of_the_process_are_not_sampled(build: Builder, run: Runner) -> None:
    program = build("sampled.c")
    with spinning(program) as (process, _):
        scope = ["-p", str(process.pid)]
        other, output = run.start(sampler("libc.so.6", "push 1\nlog 1\n"), scope, ["--engine", "ebpf"])
        await_message(other, "1 probepoint is active")
        assert len(sample(run, sampler(program, "log 0\n"), *scope, until=50).records) >= 50
        result = run.end(other, output)
    assert "the probepoints were inserted, but never reached" in result.stderr
    assert result.counts[1].hits == 0


def test_processes_out_of_scope_are_not_sampled(build: Builder, run: Runner) -> None:
    program = build("sampled.c")
    with spinning(program) as (first, _), spinning(program) as (second, _):
        one = sample(run, sampler(program, "push pid\nlog 1\n"), "-p", first.pid)
        both = sample(
            run, sampler(program, "push pid\nlog 1\n", rate="1000hz"), until=200, seen=(first.pid, second.pid)
        )
    assert {record["pid"] for record in one.records} == {first.pid}
    assert {record["pid"] for record in both.records} == {first.pid, second.pid}


def test_a_star_samples_whatever_runs(build: Builder, run: Runner) -> None:
    program, narrow = build("sampled.c"), build("sampled.c", i386=True)
    pids: dict[str, int] = {}
    with spinning(program, "taskset", "-c", "0") as (wide, _), spinning(narrow, "taskset", "-c", "0") as (small, spin):
        pids = {"wide": wide.pid, "small": small.pid}
        result = sample(run, sampler("*", "push r, eip\nlog 1\n", rate="1000hz"), until=400, seen=pids.values())
    size_of = {record["pid"]: len(bytes.fromhex(record["data"])) for record in result.records}
    # In a 32-bit process the handler works with words of 4 bytes; "log 1" is one of them.
    assert size_of[pids["wide"]] == 8
    assert size_of[pids["small"]] == 4
    inside = [words for r, words in zip(result.records, result.words(size=4), strict=True) if r["pid"] == pids["small"]]
    user = [words[0] for words in inside if words[0] >> 20 == spin >> 20]
    assert user


def test_a_star_reads_the_kernel_s_memory(build: Builder) -> None:
    """The kernel's structure of the thread has its number and name, in user code and in the kernel."""
    program = build("sampled.c")
    with spinning(program) as (process, _):
        text = f"""
        static long seen;
        sample 500hz {{
            @[curtask->pid - tid, curtask->tgid - pid] = count(); @by[comm] = count();
            if (pid == {process.pid}) seen = 1;
        }}
        every 10ms {{ if (seen) exit(); }}
        """
        words = ["run", "-e", text, "--engine", "ebpf", "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", *words], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    counts = {tuple(row["keys"]): row["value"] for row in rows if row["table"] == "_"}
    assert list(counts) == [(0, 0)]
    assert {row["keys"][0] for row in rows if row["table"] == "by"} >= {"sampled"}


def test_what_runs_of_a_process_reads_the_kernel_s_memory_too(build: Builder) -> None:
    program = build("sampled.c")
    text = "[maxhits 5] sample 500hz { @[curtask->pid - tid, curtask->tgid] = count(); }"
    with spinning(program) as (process, _):
        words = ["run", "-e", text, "-p", str(process.pid), "--format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", *words], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["keys"] for line in done.stdout.splitlines()] == [[0, process.pid]]


def test_the_copies_of_the_cpus_add_up_to_all_samples(build: Builder, run: Runner) -> None:
    program = build("sampled.c")
    body = "inc cv, 0\npush cv, 0\nlog 1\n"
    with spinning(program, "taskset", "-c", "0"), spinning(program, "taskset", "-c", "1"):
        source = sampler(program, body, file_header="cvars = 1\n", rate="1000hz")
        result = sample(run, source, until=400, key="cpu", seen=(0, 1))
    copies: dict[int, list[int]] = {}
    for record, (value,) in zip(result.records, result.words(), strict=True):
        copies.setdefault(record["cpu"], []).append(value)
    assert set(copies) == {0, 1}
    # Each CPU counts its own samples, one after the other; the sum of their copies is that of all.
    assert all(values == list(range(1, len(values) + 1)) for values in copies.values())
    assert sum(values[-1] for values in copies.values()) == result.counts[1].hits == len(result.records)


def test_samplers_that_tick_together_all_run(build: Builder, run: Runner) -> None:
    program = build("sampled.c")
    samplers = "".join(f"sampler = 2000hz\nminor = {n}\nlog 0\nexit\n" for n in range(4))
    with spinning(program) as (process, _):
        result = sample(run, f'name = "{program}"\n{samplers}', "-p", process.pid, until=2000)
    assert all(count.hits == count.records > 100 for count in result.counts.values())
    # Its mappings do not change; only that would be a reason.
    assert "ran no handler" not in result.stderr


def test_maxhits_and_passcount_end_a_sampler_and_its_clock(build: Builder, run: Runner) -> None:
    program = build("sampled.c")
    source = sampler(program, "log 0\n", header="maxhits = 7\npasscount = 5\n")
    with spinning(program) as (process, _):
        endless, _ = run.start(sampler(program, "log 0\n"), ["-p", str(process.pid)], ["--engine", "ebpf"])
        await_true(lambda: links_of(endless.pid)["perf"] == os.sysconf("SC_NPROCESSORS_ONLN"), "a clock on each CPU")
        client, output = run.start(source, ["-p", str(process.pid)], ["--engine", "ebpf"])
        await_true(lambda: len(records_in(output)) == 7, "the last sample")
        await_true(lambda: links_of(client.pid)["perf"] == 0, "the end of the clocks")
        result = run.end(client, output)
    count = result.counts[1]
    assert (count.hits, count.records, count.passed) == (12, 7, 5)


def links_of(pid: int) -> Counter[str]:
    """Return the kinds of the BPF links that a process holds."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for line in entry.read_text().splitlines():
                if line.startswith("link_type:"):
                    kinds[line.split()[1]] += 1
    return kinds


def test_the_stack_trace_names_the_place_of_the_sample(build: Builder, run: Runner) -> None:
    program = build("sampled.c", "-no-pie")
    ((offset, address, _),) = executable_segments(program)
    body = "push 0\npush mem, u8\n"
    with spinning(program) as (process, _):
        result = sample(run, sampler(program, body, file_header="autostacktrace = yes\n"), "-p", process.pid)
    traces = [record for record in result.records if "stack_trace" in record]
    assert traces
    for record in traces:
        data = bytes.fromhex(record["data"])
        # A prefix of three bytes, the module's name, and the file offset.
        place = 3 + int.from_bytes(data[1:3], "little")
        assert int.from_bytes(data[place : place + 8], "little") == record["ip"] - address + offset


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        (Feature.FIND_VMA, "bpf_find_vma"),
        (Feature.BTF, "BTF type information"),
        (Feature.PERF_EVENT, "BPF programs on perf events"),
    ],
)
def test_what_the_kernel_lacks_is_named_before_anything_is_inserted(
    build: Builder, tmp_path: Path, feature: Feature, name: str
) -> None:
    program = build("sampled.c")
    source = tmp_path / "x.rpn"
    source.write_text(sampler(program, "log 0\n"))
    diagnostics = Diagnostics()
    parsed = parse_file(source, diagnostics, CompileOptions())
    resolved = resolve(parsed, Module.load(program), diagnostics)
    engine = EbpfEngine(features=Features(overrides={feature: False}))
    with pytest.raises(SourceError) as caught:
        engine.plan_file(parsed, resolved, diagnostics)
    (refusal,) = caught.value.diagnostics
    assert refusal.message == (f"the ebpf engine cannot sample a module here: this kernel has no {name} (switched off)")
    assert refusal.span is not None
    assert refusal.span.line == 2


def test_the_example_samples_every_cpu(run: Runner) -> None:
    source = (Path(__file__).parents[3] / "examples" / "busy.rpn").read_text()
    result = sample(run, source, until=30)
    assert {record["cpu"] for record in result.records} <= set(online_cpus())
    assert result.counts[1].hits == len(result.records)


BOTH_CONTEXTS = 'name = "*"\nmajor = 7\nsampler = 499hz\nminor = 1\n'
BOTH_CONTEXTS += "push u, eip\npush u, cs\npush r, eip\npush r, cs\nlog 4\nexit\n"
IN_AND_OUT = "import os\nwhile os.times().user < 0.3: os.urandom(1_000_000), sum(range(20_000))"


def test_a_sample_in_the_kernel_has_the_registers_of_the_program_too(run: Runner) -> None:
    result = run(BOTH_CONTEXTS, ["--", sys.executable, "-c", IN_AND_OUT], ["--engine", "ebpf"])
    assert result.status == 0
    seen = set()
    for record in result.records:
        code, ip, user_code, user_ip = struct.unpack("=4Q", bytes.fromhex(record["data"]))
        assert ip == record["ip"]
        assert user_ip >> 63 == 0
        assert ip >> 63 or ip == user_ip
        seen.add((code, user_code))
    assert seen == {(0x10, 0x33), (0x33, 0x33)}
