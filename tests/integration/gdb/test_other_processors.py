"""Programs of other processors behind QEMU's stub: one probe program with portable names says the same everywhere."""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.target.code.machine_code import disassemble, unprobeable
from dprobes.target.probed_module import Module
from integration.gdb.processors import EmulatedProgram, Processor, without_steps
from integration.support import DPROBES, TIMEOUT, await_true, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.support import Builder, Runner

    Starter = Callable[..., EmulatedProgram]

LINKAGES = pytest.mark.parametrize("flags", [("-static",), ()], ids=["static", "dynamic"])


def engine(endpoint: str) -> list[str]:
    return ["--engine", f"gdb={endpoint}"]


def calls_of(path: Path) -> str:
    """Return a program that logs the calls of tick, and their returns."""
    return f"""name = "{path}"
offset = tick
minor = 1
push r, arg0; push r, pc; push r, sp; log 3; exit
offset = tick
return = yes
minor = 2
push entry, arg0; push r, retval; push r, sp; log 3; exit
"""


@LINKAGES
def test_calls_and_returns(
    build: Builder, run: Runner, processor: Processor, start: Starter, flags: tuple[str, ...]
) -> None:
    path = processor.build(build, "hotloop.c", *flags)
    program = start(path, "40")
    result = run(calls_of(path), [], engine(program.endpoint))
    assert result.status == 0, result.stderr
    assert program.output() == "780\n"
    entries = result.words(1, processor.word_size, processor.order)
    returns = result.words(2, processor.word_size, processor.order)
    # The last cell is logged first.
    assert [
        (n, pc == record["ip"], sp == record["sp"])
        for record, (sp, pc, n) in zip(result.records[::2], entries, strict=True)
    ] == [(n, True, True) for n in range(40)]
    assert [(value, n) for _, value, n in returns] == [(n + 1, n) for n in range(40)]
    popped = processor.word_size if processor.name == "i386" else 0  # the return address
    assert {out - into for (into, *_), (out, *_) in zip(entries, returns, strict=True)} == {popped}
    assert [each["minor"] for each in result.records] == [1, 2] * 40
    assert result.counts[1].hits == result.counts[2].hits == 40


def instructions_of(path: Path, function: str) -> list[int]:
    module = Module.load(path)
    (symbol,) = module.symbols.lookup(function)
    start = module.file_offset(symbol.address)
    listed = disassemble(module, start, symbol.size)
    return [each.offset for each in listed if each.offset < start + symbol.size and unprobeable(each) is None]


@pytest.mark.parametrize("function", ["collatz", "pick"])
def test_a_stub_without_single_steps(
    build: Builder, run: Runner, processor: Processor, start: Starter, tmp_path: Path, function: str
) -> None:
    """Each instruction of functions with branches is probed: the counts are those of a stub with single steps."""
    path = processor.build(build, "branches.c", "-static")
    offsets = instructions_of(path, function)
    text = f'name = "{path}"\n' + "".join(f"offset = {at}\nminor = {n}\nexit\n" for n, at in enumerate(offsets))
    counts = []
    for has_steps in (True, False):
        program = start(path)
        endpoint = program.endpoint if has_steps else without_steps(program.endpoint, tmp_path)
        result = run(text, [], engine(endpoint))
        assert result.status == 0, result.stderr
        assert program.output() == "8 9\n"
        counts.append({minor: count.hits for minor, count in result.counts.items()})
    assert counts[0] == counts[1]
    assert len(counts[0]) == len(offsets) > 5
    assert max(counts[0].values()) > 1


def test_returns_of_recursion_and_tail_calls(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    """Recursion and tail calls: each return is told in its order, with the argument of its entry."""
    path = processor.build(build, "tails.c", "-static")
    text = "".join(
        f"offset = {function}\nreturn = yes\nminor = {minor}\npush entry, arg0; push r, retval; log 2; exit\n"
        for minor, function in enumerate(("fib", "tail"), 1)
    )
    program = start(path)
    result = run(f'name = "{path}"\n{text}', [], engine(program.endpoint))
    assert result.status == 0, result.stderr
    calls: list[list[int]] = []

    def fib(n: int) -> int:
        value = n if n < 2 else fib(n - 1) + fib(n - 2)
        calls.append([value, n])
        return value

    fib(3)
    fib(5)
    found = result.words(1, processor.word_size, processor.order)
    assert sorted(found) == sorted(calls)
    assert result.words(2, processor.word_size, processor.order) == [[2, 3]]
    assert found in (calls, calls[-15:] + calls[:-15])  # C does not say which of the two calls comes first
    assert program.output() == "5 2\n"


def test_a_function_of_a_library(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    path = processor.build(build, "hotloop.c")
    library = f"{processor.root}/lib/libc.so.6"
    program = start(path, "12")
    result = run(
        f'name = "{library}"\noffset = strtoul\nminor = 1\npush 2; push r, arg0; log str; exit\n',
        [],
        engine(program.endpoint),
    )
    assert result.status == 0, result.stderr
    assert [bytes.fromhex(each["data"])[-2:] for each in result.records] == [b"12"]
    assert program.output() == "66\n"


def test_registers_and_memory_are_changed(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    """The third call gets 1000 for 2, and finds a sum that was not there."""
    path = processor.build(build, "hotloop.c", "-static")
    change = "push 1000; pop r, arg0"
    if processor.name == "i386":
        change = "push 4; push r, sp; add; push 1000; pop mem, u32"
    write = f"push 90; pop mem, {'u32' if processor.word_size == 4 else 'u64'}"
    head = f'name = "{path}"\noffset = tick\nminor = 1\n'
    text = f"{head}push r, arg0; push 2; eq; jz out\n{change}\npush sum; {write}\nout: exit\n"
    program = start(path, "9")
    result = run(text, [], [*engine(program.endpoint), "--allow-write"])
    assert result.status == 0, result.stderr
    assert program.process.wait(TIMEOUT) == -signal.SIGABRT  # tick does not return 3
    assert result.counts[1].hits == 3


def functions_on_stack(record: dict[str, Any], path: Path, processor: Processor) -> list[str]:
    """Return the functions of a program of fixed addresses on a logged call stack, the innermost first."""
    data, module = bytes.fromhex(record["data"]), Module.load(path)
    count = int.from_bytes(data[1:3], processor.order)
    size = processor.word_size
    words = [int.from_bytes(data[at : at + size], processor.order) for at in range(3, 3 + count * size, size)]
    symbols = [module.symbol_at(module.file_offset(word)) for word in words]
    return [name for symbol in symbols if symbol is not None for name in (symbol[0],)]


def test_call_stacks(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    """At the entry of a function the return address may still be in a register; from the caller on it is not."""
    path = processor.build(build, "tails.c", "-static")
    head = f'name = "{path}"\n'
    text = (
        head + "offset = fib\nminor = 1\nlog ustack; exit\noffset = tail\nreturn = yes\nminor = 2\nlog ustack; exit\n"
    )
    program = start(path)
    result = run(text, [], engine(program.endpoint))
    assert result.status == 0, result.stderr
    assert program.output() == "5 2\n"
    entries = [functions_on_stack(each, path, processor) for each in result.records if each["minor"] == 1]
    (at_return,) = [functions_on_stack(each, path, processor) for each in result.records if each["minor"] == 2]
    assert at_return[0] == "main"
    assert max(each.count("fib") for each in entries) == 5
    for each in entries:
        assert each[each.count("fib") :][:1] == ["main"]  # tail has jumped
        assert each[each.count("fib") + 1 :] == at_return[1:]


def test_c_with_debug_information(build: Builder, processor: Processor, start: Starter) -> None:
    """Parameters and variables are found where the compiler says, on each processor."""
    path = processor.build(build, "hotloop.c", "-static")
    program = start(path, "4")
    source = f'{path}:tick(n) {{ printf("%lu after %lu", n, sum); }}'
    command = [*DPROBES, "run", *engine(program.endpoint), "-e", source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"\d+ after \d+", result.stdout) == ["0 after 0", "1 after 0", "2 after 1", "3 after 3"]


def test_a_function_is_skipped(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    """The calls of tick for 1 and 3 return at once, with what main expects, and add nothing."""
    path = processor.build(build, "hotloop.c", "-static")
    text = f'name = "{path}"\noffset = tick\nminor = 1\npush r, arg0; push 1; and; jz out\n'
    program = start(path, "5")
    result = run(
        f"{text}push r, arg0; push 1; add; skip\nout: exit\n", [], [*engine(program.endpoint), "--allow-write"]
    )
    assert result.status == 0, result.stderr
    assert program.output() == "6\n"
    assert result.counts[1].hits == 5


def test_floating_point_registers(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    """QEMU leaves them out where it tells all registers: they are asked for one by one. i386 has 2.5 in memory."""
    path = processor.build(build, "floats.c", "-static")
    name = {"aarch64": "v0", "riscv64": "fa0", "s390x": "fpr0", "i386": "mxcsr"}.get(processor.name, "fpr1")
    cells = {"aarch64": 2, "ppc": 2}.get(processor.name, 1)
    program = start(path)
    text = f'name = "{path}"\noffset = halve\nminor = 1\npush u, {name}; log {cells}; exit\n'
    result = run(text, [], engine(program.endpoint))
    assert result.status == 0, result.stderr
    (words,) = result.words(1, processor.word_size, processor.order)
    value = sum(word << 8 * processor.word_size * n for n, word in enumerate(words))  # the lowest cell is on top
    is_i386 = processor.name == "i386"
    assert value & (1 << 64) - 1 == (0x1F80 if is_i386 else int.from_bytes(struct.pack("<d", 2.5), "little"))
    assert program.output() == "1.25\n"


def test_a_register_that_a_stub_lacks(build: Builder, run: Runner, processor: Processor, start: Starter) -> None:
    if processor.name not in ("ppc", "ppc64"):
        pytest.skip("processor: QEMU has all registers of the table")
    path = processor.build(build, "hotloop.c", "-static")
    program = start(path, "4")
    result = run(f'name = "{path}"\noffset = tick\nminor = 1\npush r, mq; log 1; exit\n', [], engine(program.endpoint))
    assert result.status == 2
    assert f"4:9: error: the stub {program.endpoint} has no register 'mq'" in result.stderr
    assert program.output() == "6\n"


def test_a_program_goes_on_unharmed_when_dprobes_is_killed(
    build: Builder, run: Runner, processor: Processor, start: Starter
) -> None:
    path = processor.build(build, "hotloop.c", "-static")
    program = start(path, "5000")
    client, output = run.start(calls_of(path), [], engine(program.endpoint))
    await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
    time.sleep(0.05)
    client.kill()
    client.communicate(timeout=TIMEOUT)
    await_true(lambda: program.log == "12497500\n", "the end of the program")


def test_the_place_is_refused_by_engines_for_x86(build: Builder, run: Runner, processor: Processor) -> None:
    if processor.name == "i386":
        pytest.skip("processor: it is x86")
    path = processor.build(build, "hotloop.c", "-static")
    result: Any = run(calls_of(path), ["-c", "/bin/true"], ["--engine", "ptrace"])
    assert result.status == 2
    where = result.stderr.partition(":")[0]
    needs = "needs probes in code of another processor, which the ptrace engine lacks"
    assert result.stderr.splitlines()[:4] == [
        f"{where}:1:1: error: '{path}, for {processor.name}' {needs}",
        f'    name = "{path}"',
        "    ^" + "~" * (len(f'name = "{path}"') - 1),
        "hint: use --engine gdb=ENDPOINT, with the stub of such a machine or process",
    ]
