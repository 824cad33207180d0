"""Counts, limits and variables are exact however many processes and threads hit the probepoints at once."""

from __future__ import annotations

import subprocess
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached, is_attached
from integration.support import (
    I386_LIBRARIES,
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    command_line,
    read_result,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf")
TICK = 'name = "{path}"\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n'


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def at_once(count: int, *command: object) -> None:
    """Run so many copies of a command at the same time."""
    words = " ".join(f"'{word}'" for word in command)
    script = f"for n in $(seq {count}); do {words} >/dev/null & done; wait"
    subprocess.run(["bash", "-c", script], check=True, timeout=TIMEOUT)


def test_200_processes_at_once_miss_nothing(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    client, output = run.start(TICK.format(path=program), [], ENGINE)
    await_attached(client)
    at_once(200, program, 50)
    result = run.end(client, output)
    assert result.counts[1].hits == result.counts[1].records == 200 * 50
    seen: dict[int, list[int]] = {}
    for record, (number,) in zip(result.records, result.words(), strict=True):
        seen.setdefault(record["pid"], []).append(number)
    assert len(seen) == 200
    assert all(numbers == list(range(50)) for numbers in seen.values())


def test_a_storm_of_forks_is_followed(build: Builder, run: Runner) -> None:
    """Each child is in scope before its first instruction, and through its exec."""
    result = run.command(TICK.format(path="storm"), build("storm.c"), 300, 40, options=ENGINE)
    assert Counter(words[0] for words in result.words()) == Counter([*range(300), *range(300), 300, *[0] * 300])
    assert result.counts[1].hits == 901
    assert len({r["pid"] for r in result.records}) == 601


def test_only_the_command_itself_counts_without_follow(build: Builder, run: Runner) -> None:
    result = run.command(TICK.format(path="storm"), build("storm.c"), 20, 5, options=[*ENGINE, "--no-follow"])
    assert result.words() == [[20]]


LIBC = """name = "libc.so.6"
offset = getpid
minor = 1
push r, sp
log 1
exit
"""
WITH_32_BIT_LIBRARY = f'mount --bind {I386_LIBRARIES} /usr/local/lib && exec "$@"'


@pytest.mark.alone
def test_programs_of_both_word_sizes_are_probed_in_one_run(build: Builder, tmp_path: Path) -> None:
    """The module is the C library, of which each word size has its own; records are as wide as the program's words."""
    programs = [build("getpids.c", i386=True), build("getpids.c")]
    source, output = tmp_path / "libc.rpn", tmp_path / "records"
    source.write_text(LIBC)
    words = " & ".join(f"'{program}' 100" for program in (*programs, *programs))
    client = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", WITH_32_BIT_LIBRARY, "sh",
         *command_line(source, output, ["--exit-status", "--", "bash", "-c", f"{words} & wait"], ENGINE)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    result = read_result(client, output)
    assert result.status == 0, result.stderr
    sizes = Counter((r["name"], len(bytes.fromhex(r["data"]))) for r in result.records if r["name"] == "getpids")
    assert sizes == {("getpids", 4): 200, ("getpids", 8): 200}


LIMITED = """name = "{path}"
offset = many_1*
minor = 1
passcount = 3
maxhits = 7
exit
"""


def test_each_place_of_a_pattern_has_limits_of_its_own(build: Builder, run: Runner) -> None:
    """Eight processes call 1111 functions 5 times each: the limits are reached while others are in the handler."""
    program = build("many.c")
    names = sorted(f"many_{n}" for n in range(10000) if str(n).startswith("1"))
    client, output = run.start(LIMITED.format(path=program), [], ENGINE)
    await_message(client, f"{len(names)} probepoints are active")  # the first of them are attached before
    at_once(8, program, 5)
    await_true(lambda: not is_attached(client.pid), "the end of the last probepoint")
    result = run.end(client, output)
    counts = Counter(r["symbol"] for r in result.records)
    assert result.status == 0, result.stderr
    assert counts == dict.fromkeys(names, 7)


@pytest.mark.parametrize("limits", [(0, 1), (99, 1), (1000, 2500)])
def test_limits_are_exact_at_several_places_under_threads(build: Builder, run: Runner, limits: tuple[int, int]) -> None:
    first, limit = limits
    names = ("stepped", "emulated")
    source = "name = torture\nvars = 2\n" + "".join(
        f"offset = {name}\nminor = {n}\npasscount = {first}\nmaxhits = {limit}\ninc lv, {n}\nexit\n"
        for n, name in enumerate(names)
    )
    result = run.command(source, build("torture.c"), 1, 8, options=ENGINE)
    for n in range(2):
        count = result.counts[n]
        assert (count.hits, count.records, count.passed) == (first + limit, limit, first)


COUNTED = """name = threads
vars = 2
gvars = 2
cvars = 1

offset = tick
minor = 1
inc lv, 0
dec lv, 1
inc gv, 1
inc cv, 0
abort

offset = main
minor = 2
return = yes
push lv, 0
push lv, 1
push gv, 1
log 3
exit
"""


def test_increments_of_many_threads_are_all_there(build: Builder, run: Runner) -> None:
    result = run.command(COUNTED, build("threads.c"), 16, 2000, options=ENGINE)
    (words,) = result.words(2)
    assert sorted(words) == sorted([32000, 2**64 - 32000, 32000])
    assert result.counts[1].hits == 32000
    assert result.counts[1].records == 0


@pytest.mark.parametrize("scope", ["process", "namespace", "all"])
def test_a_process_whose_first_thread_has_ended_is_probed(build: Builder, run: Runner, scope: str) -> None:
    program = build("leaderless.c")
    source = f'name = "{program}"\noffset = tick\nminor = 1\npush pid\nlog 1\nexit\n'
    with running(program, 600) as target:
        await_line(target)
        options = {"process": [], "namespace": ["--pid-namespace"], "all": []}[scope]
        words = [] if scope == "all" else ["-p", str(target.pid)]
        client, output = run.start(source, words, [*ENGINE, *options])
        await_attached(client)
        await_true(lambda: output.exists() and output.stat().st_size > 2000, "records")
        result = run.end(client, output)
        assert result.status == 0, result.stderr
        assert {words[0] for words in result.words()} == {target.pid}
        assert result.counts[1].hits == len(result.records)
