"""Another process finds out about a file what this one would, and no file makes it take more than it may."""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.errors import DprobesError, SourceError, TargetError
from dprobes.platform.foreign.examination import Limits
from dprobes.platform.foreign.examiner import Examiner
from dprobes.platform.foreign.foreign_outlines import Examined, Question, read_answer, write_answer
from dprobes.resolve.breakpoints import movable_probes
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.code.function_exits import ExitKind
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_outline import cheap_sites_in, first_executed, last_executed
from dprobes.target.probed_module import OWN_SYMBOLS
from dprobes.target.usdt import usdt_sites
from support.foreign_files import SYMTAB, add_symbols, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.rpn.rpn_program import Program

LIBC = "/lib/x86_64-linux-gnu/libc.so.6"

PROGRAM = """
name = "libc.so.6"
offset = malloc
minor = 1
push environ
exit
offset = "str*"
minor = 2
exit
offset = calloc
return = yes
minor = 3
exit
address = environ : environ + 7
watchpoint = w
minor = 4
exit
"""


def program(text: str = PROGRAM) -> Program:
    return parse_source(SourceFile("test.rpn", text), Diagnostics())


def here(path: str, text: str = PROGRAM) -> ResolvedModule:
    return resolve(program(text), OWN_SYMBOLS.module_of(ElfFile.open(path)), Diagnostics())


def ask(examiner: Examiner, path: str | Path, text: str = PROGRAM, **more: Any) -> Examined | None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        question = Question(str(path), program(text), OWN_SYMBOLS, wants_moves=True, **more)
        return examiner.examine(question, descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def examiner() -> Iterator[Examiner]:
    examiner = Examiner()
    yield examiner
    examiner.close()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library"
    source = "int tick(int x) { return x + 1; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source, text=True, check=True)
    return path


TICK = "name = library\noffset = tick\nminor = 1\nexit\n"


def test_the_files_of_answers_are_closed(examiner: Examiner, library: Path) -> None:
    ask(examiner, library, TICK)
    before = len(list(Path("/proc/self/fd").iterdir()))
    ask(examiner, library, TICK)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_answer_is_what_this_process_would_find(examiner: Examiner) -> None:
    expected, found = here(LIBC), ask(examiner, LIBC)
    assert found is not None
    assert found.resolved is not None
    assert found.resolved.probepoints == expected.probepoints
    assert len(expected.in_code) > 50
    assert found.resolved.symbols == expected.symbols
    assert expected.events
    assert found.resolved.left_out == expected.left_out
    assert found.resolved.image == expected.image
    elf, module = expected.module.elf, found.module
    assert module.elf.load_segments == elf.load_segments
    assert (module.elf.build_id, module.elf.soname, module.word_size) == (elf.build_id, elf.soname, elf.word_size)
    assert module.outline.first_executed == first_executed(elf)
    assert module.outline.last_executed == last_executed(elf)
    movable = [probe.instruction for probe in movable_probes(expected)]
    assert cheap_sites_in(module, movable) == cheap_sites_in(expected.module, movable)
    for probe in expected.in_code:
        start = expected.module.function_start(probe.offset)
        assert module.function_start(probe.offset) == (start if start == probe.instruction.address else None)


LIBSTDCXX = "/usr/lib/x86_64-linux-gnu/libstdc++.so.6"
USDT = 'name = "libstdc++.so.6"\noffset = usdt:libstdcxx:catch\npush usdt, 2\nlog 1\nexit\n'


def test_sites_of_usdt_probes_come_back_with_their_arguments(examiner: Examiner) -> None:
    if not usdt_sites(ElfFile.open(LIBSTDCXX)):
        pytest.skip("libstdc++.so.6 has no USDT probes here")
    expected, found = here(LIBSTDCXX, USDT), ask(examiner, LIBSTDCXX, USDT)
    assert found is not None
    assert found.resolved is not None
    assert found.resolved.in_code == expected.in_code
    assert expected.in_code[0].arguments[1].size == 8
    right = write_answer(expected.module, expected, moves={}, own_places={})
    question = Question(LIBSTDCXX, program(USDT), OWN_SYMBOLS)
    for place, value in ((4, "8@%rax"), (4, "8@%rax 8@%xmm0"), (2, expected.in_code[0].offset), (2, 1 << 40)):
        wrong = json.loads(json.dumps(right))
        wrong["probes"][0][-1][place] = value  # an argument less, one without a value, semaphores in code and nowhere
        with pytest.raises(TargetError, match="its contents are not valid"):
            read_answer(json.dumps(wrong).encode(), question)


def test_errors_come_back(examiner: Examiner, library: Path) -> None:
    with pytest.raises(SourceError, match="has no symbol 'tock'"):
        ask(examiner, library, TICK.replace("tick", "tock"))
    with pytest.raises(TargetError, match="is not an ELF file"):
        ask(examiner, __file__, TICK)


def test_a_file_with_another_soname_is_not_meant(examiner: Examiner) -> None:
    assert ask(examiner, LIBC, soname="libc.so.7") is None
    found = ask(examiner, LIBC, soname="libc.so.6")
    assert found is not None
    assert found.resolved is not None
    hooks = ask(examiner, LIBC, soname="libc.so.7", own_functions=("longjmp", "nosuch"))
    assert hooks is not None
    assert hooks.resolved is None
    assert list(hooks.module.outline.own_places) == ["longjmp"]


def test_a_file_that_is_a_hole_is_not_read(examiner: Examiner, library: Path, tmp_path: Path) -> None:
    path = tmp_path / "hole"
    claim(library, path, SYMTAB, 20 << 30)
    with pytest.raises(TargetError, match=rf"'{path}' is a hole for the most part: \d+ of its \d+ bytes are on disk"):
        ask(examiner, path, TICK)
    assert ask(examiner, library, TICK) is not None


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_only_regular_files_are_read(examiner: Examiner, tmp_path: Path, kind: str) -> None:
    path = tmp_path
    if kind == "fifo":
        os.mkfifo(path := tmp_path / "fifo")
    elif kind == "device":
        path = Path("/dev/zero")
    with pytest.raises(TargetError, match="expected an ELF file"):
        ask(examiner, path, TICK)


def test_memory_is_limited(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "symbols"
    add_symbols(library, path, 2_000_000)
    examiner = Examiner(Limits(memory=200 << 20))
    try:
        with pytest.raises(TargetError) as caught:
            ask(examiner, path, TICK.replace("tick", '"*"'))
        assert caught.value.message == (
            f"'{path}' is not probed: reading it takes more memory than is allowed for a file of another user: 200 MiB"
        )
        assert ask(examiner, library, TICK) is not None
    finally:
        examiner.close()


@pytest.mark.parametrize("limits", [Limits(processor_time=1), Limits(time=1)])
def test_time_is_limited(library: Path, tmp_path: Path, limits: Limits) -> None:
    path = tmp_path / "symbols"
    add_symbols(library, path, 2_000_000)
    examiner = Examiner(limits)
    try:
        with pytest.raises(TargetError) as caught:
            ask(examiner, path, TICK.replace("tick", '"*"'))
        assert caught.value.message == (
            f"'{path}' is not probed: reading it takes longer than is allowed for a file of "
            f"another user: {limits.processor_time} s of processor time, {limits.time} s in all"
        )
        assert ask(examiner, library, TICK) is not None
    finally:
        examiner.close()


def test_nobody_waits_for_an_answer_that_is_not_wanted(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "symbols"
    add_symbols(library, path, 2_000_000)
    examiner = Examiner()
    wanted = [True]
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    question = Question(str(path), program(TICK.replace("tick", '"*"')), OWN_SYMBOLS)
    answers: list[object] = []

    def work() -> None:
        answers.append(examiner.examine(question, descriptor, lambda: wanted[0]))

    thread = threading.Thread(target=work)
    try:
        thread.start()
        time.sleep(0.3)
        wanted[0] = False
        thread.join(30)
        assert answers == [None]
    finally:
        os.close(descriptor)
        examiner.close()


def test_a_process_that_was_killed_is_started_again(examiner: Examiner, library: Path) -> None:
    assert ask(examiner, library, TICK) is not None
    process = examiner._process
    assert process is not None
    process.kill()
    assert ask(examiner, library, TICK) is not None


def test_nothing_that_is_answered_is_believed() -> None:
    """Change a right answer in one place at a time: it is refused, or makes probepoints that lie in code."""
    resolved = here(LIBC)
    moves = {probe.offset: 4 for probe in movable_probes(resolved)[:3]}
    right = write_answer(resolved.module, resolved, moves=moves, own_places={"malloc": resolved.in_code[0].offset})
    question = Question(LIBC, program(), OWN_SYMBOLS, own_functions=("malloc",))
    assert read_answer(json.dumps(right).encode(), question) is not None
    chance = random.Random(1)
    wrong: list[object] = [
        None,
        True,
        -1,
        1 << 64,
        1 << 70,
        0.5,
        "x",
        "x" * 100_000,
        [],
        [[]],
        {},
        [1] * 9,
        "90" * 20,
        3,
    ]
    refused = 0
    for _ in range(1500):
        answer = json.loads(json.dumps(right))
        _change(answer, chance, wrong)
        try:
            found = read_answer(json.dumps(answer).encode(), question)
        except DprobesError:
            refused += 1
            continue
        if found is None or found.resolved is None:
            continue
        for probe in found.resolved.in_code:
            assert found.module.elf.is_executable_offset(probe.offset)
            assert 0 < probe.instruction.length <= 15
            assert all(isinstance(leaving.kind, ExitKind) for leaving in probe.code.exits.exits)
    assert refused > 500
    for text in (b"", b"[]", b"{", b"[" * 100_000, b"{}", b'{"error": 5}', b"\xff"):
        with pytest.raises(TargetError):
            read_answer(text, question)


def _change(value: dict[str, Any], chance: random.Random, wrong: list[object]) -> None:
    holder: Any = value
    while True:
        place = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        inner = holder[place]
        if isinstance(inner, list | dict) and inner and chance.random() < 0.8:
            holder = inner
            continue
        holder[place] = chance.choice(wrong)
        return
