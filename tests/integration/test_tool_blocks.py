"""Blocks that the tool executes while a program runs: begin, every and end, with both engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from integration.support import TIMEOUT

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
DPROBES = [sys.executable, "-m", "dprobes"]
TARGET = "import ctypes; f = ctypes.CDLL(None).abs; [f(n) for n in range(4)]"
FOREVER = "import ctypes, time; f = ctypes.CDLL(None).abs\nwhile True: f(1); time.sleep(0.005)"


def run(text: str, engine: str, *options: str, target: str = TARGET) -> subprocess.CompletedProcess[str]:
    words = ["run", "-e", text, "--engine", engine, *options, "--", sys.executable, "-S", "-c", target]
    done = subprocess.run([*DPROBES, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("engine", ENGINES)
def test_begin_comes_before_the_command_and_end_behind_it(engine: str) -> None:
    text = """
    static long limit, table[4]; global long shared;
    long square(long x) { return x * x; }
    begin { limit = square(3); shared = 40; table[2] = 5; @start = 7; @n[comm] = count();
        printf("begin\t%-9s.", comm); }
    libc.so.6:abs(int x) {
        shared++; table[x]++; @n[comm] = count();
        if (x == 2) printf("limit=%d start=%d table=%d", limit, @start, table[2]);
    }
    end { printf("shared=%d table=%d,%d", shared, table[0], table[2]); }
    """
    lines = run(text, engine).stdout.splitlines()
    assert lines[0] == "begin\tdprobes  ."
    assert lines[1].endswith("limit=9 start=7 table=6")
    assert lines[2] == "shared=44 table=1,6"
    # What begin has put into tables is there with what handlers have.
    assert sorted(lines[3:]) == ["@n[dprobes]: 1", f"@n[{Path(sys.executable).name}]: 4", "@start: 7"]


@pytest.mark.parametrize("engine", ENGINES)
def test_strings_that_begin_puts_into_tables_are_there_at_a_hit(engine: str) -> None:
    text = """
    begin { @names[0] = "zero"; @names[1] = "one"; @first = @names[0]; @by["begin"] = count(); }
    libc.so.6:abs(int x) { @comm = comm; if (@names[x]) printf("%s", @names[x]); @seen[@names[x]] = count(); }
    end { @names[1] = "uno"; delete(@names[0]); printf("%s, %s", @first, @names[1]); @comm = "nobody"; }
    """
    lines = run(text, engine).stdout.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["zero", "one"]
    assert lines[2] == "zero, uno"
    assert sorted(lines[3:]) == [
        "@by[begin]: 1",
        "@comm: nobody",
        "@first: zero",
        "@names[1]: uno",
        "@seen[]: 2",
        "@seen[one]: 1",
        "@seen[zero]: 1",
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_are_printed_and_cleared(engine: str) -> None:
    text = """
    libc.so.6:abs(int x) { @sum[x & 1] = sum(x); @all = hist(x); @left = count(); @max = max(x); @avg = avg(x); }
    end {
        @sum[1] += 10; @max = max(7); @avg = avg(94); @all = hist(100);
        print(@sum); print(@sum, 1); printf("%d %d %d", @sum[1], @max, @avg);
        delete(@sum[0]); print(@sum);
        clear(@sum); clear(@all); clear(@max); clear(@avg);
        print(@sum); print(@all); @sum[5] += 1; print(@sum);
    }
    """
    lines = run(text, engine).stdout.splitlines()
    assert sorted(lines[:2]) == ["@sum[0]: 2", "@sum[1]: 14"]
    assert lines[2:4] == ["@sum: 1 row with a smaller value is not shown", "@sum[1]: 14"]
    # What the program prints is not printed again at the end, but for what it does not print.
    assert lines[4:] == ["14 7 20", "@sum[1]: 14", "@sum[5]: 1", "@left: 4"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_so_often_until_exit(engine: str) -> None:
    text = """
    static long rounds;
    libc.so.6:abs { @hits = count(); }
    every 50ms {
        if (!rounds && !@hits) return;
        printf("round %d %d", ++rounds, @hits > 0); clear(@hits);
        if (rounds == 3) exit();
        printf("on");
    }
    end { printf("over"); }
    """
    done = run(text, engine, target=FOREVER.replace("while True", "for _ in range(1000)"))
    # A round without a hit is possible on a slow machine, one too many is not.
    lines = [line.removesuffix(" 0").removesuffix(" 1") for line in done.stdout.splitlines() if line[0] != "@"]
    assert lines == ["round 1", "on", "round 2", "on", "round 3", "over"]


@pytest.mark.parametrize("engine", ENGINES)
def test_end_comes_after_a_signal_and_after_the_duration(engine: str) -> None:
    target = subprocess.Popen([sys.executable, "-S", "-c", FOREVER])
    try:
        text = """
        static long called;
        libc.so.6:abs { @hits = count(); }
        begin { printf("ready") }
        every 10ms { if (@hits > 0 && !called) { called = 1; printf("called"); } }
        end { printf("hits %d", @hits > 0) }
        """
        words = [*DPROBES, "run", "-e", text, "--engine", engine, "-p", str(target.pid)]
        done = subprocess.run(
            [*words, "--duration", "0.5"], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        # On a busy machine a duration may pass without a hit.
        printed = [line for line in done.stdout.splitlines() if line[0] != "@"]
        assert (printed[0], printed[-1][:-1]) == ("ready", "hits "), done.stderr
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Where these tests run under nohup(1), SIGHUP is ignored.
            plain = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
            child = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=plain,  # noqa: PLW1509
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert child.stdout.readline() == "called\n"
            child.send_signal(number)
            output, messages = child.communicate(timeout=TIMEOUT)
            assert output.splitlines()[0] == "hits 1", messages
        assert target.poll() is None
    finally:
        target.kill()
        target.wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exit_in_begin_lets_no_command_begin(engine: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = 'libc.so.6:abs { } begin { printf("no"); exit(); printf("never"); } end { printf("end"); }'
    words = ["run", "-e", text, "--engine", engine, "--", "touch", str(mark)]
    done = subprocess.run([*DPROBES, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.stdout.splitlines() == ["no", "end"], done.stderr
    assert not mark.exists()


def test_what_fails_ends_the_block_and_not_the_run(tmp_path: Path) -> None:
    program = tmp_path / "failing.dpc"
    program.write_text(
        "static long zero;\n"
        "long down(long x) { return down(x + 1); }\n"
        'libc.so.6:abs(int x) { printf("abs %d", x); }\n'
        "begin {\n"
        '    try { zero = 1 / zero; } catch (code) { printf("code %x", code); }\n'
        "    zero = 5 % zero;\n"
        "}\n"
        "begin { while (1) { } }\n"
        "end { down(1); }\n"
    )
    done = subprocess.run(
        [*DPROBES, "run", str(program), "--engine", "ptrace", "--", sys.executable, "-S", "-c", TARGET],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "code 20"
    assert len(lines) == 5
    assert re.findall(r"warning: .*/(failing.*)", done.stderr) == [
        "failing.dpc:6: a division by zero has ended 'begin'",
        "failing.dpc:8: more than 10000 jumps has ended 'begin'",
        "failing.dpc:2: more than 32 calls in each other has ended 'end'",
    ]


def test_in_json_each_printf_is_an_object() -> None:
    text = 'libc.so.6:abs(int x) { @s[x] = count(); } end { printf("a=%d\\nb", 1); print(@s, 1); }'
    lines = run(text, "ptrace", "--format", "json").stdout.splitlines()
    first, second = (json.loads(line) for line in lines[:2])
    assert first == {"block": "end", "text": "a=1\nb"}
    assert second["table"] == "s"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_file_says_is_printed(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("first\nsecond \x1b[2J\n")
    text = f"""
    libc.so.6:abs {{ @n = count(); }}
    end {{ cat("{tmp_path}/file"); clear(@n); cat("{tmp_path}/none"); printf("never"); }}
    """
    done = run(text, engine)
    assert done.stdout.splitlines() == ["first", "second \\x1b[2J"]
    assert f"'end': '{tmp_path}/none' cannot be read: no such file or directory" in done.stderr


LOOPS = """
libc.so.6:abs { }
end {
    for (t : tasks) if (t.ppid == PARENT) printf("task %d %d %s %s", t.pid, t.tid, t.state, t.comm);
    for (file : files(PROCESS)) printf("file %d %s", file.fd, file.path);
    for (m : maps(PROCESS)) printf("map %x-%x %s %08x %s", m.begin, m.end, m.permissions, m.offset, m.path);
    for (file : files(GONE)) printf("never");
    for (m : maps(GONE)) printf("never");
    printf("end");
}
"""
WAITING = """
import ctypes, socket, threading
threads = [threading.Thread(target=input)]
[each.start() for each in threads]
ctypes.CDLL(None).prctl(15, b"odd) R 1\\x1b[2J")
left, right = socket.socketpair()
print(flush=True)
threads[0].join()
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_loops_visit_what_proc_shows(engine: str) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "pass"]) as gone,
        subprocess.Popen(
            [sys.executable, "-S", "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as waiting,
    ):
        gone.wait()
        assert waiting.stdout is not None
        waiting.stdout.readline()
        pid, proc = waiting.pid, Path(f"/proc/{waiting.pid}")
        text = LOOPS.replace("PARENT", str(os.getpid())).replace("PROCESS", str(pid)).replace("GONE", str(gone.pid))
        lines = run(text, engine).stdout.splitlines()
        files = [f"file {each.name} {os.readlink(each)}" for each in (proc / "fd").iterdir()]  # noqa: PTH115
        maps = [line.split(maxsplit=5) for line in (proc / "maps").read_text().splitlines()]
        threads = sorted(int(each.name) for each in (proc / "task").iterdir())
        waiting.communicate(b"\n")
    assert sorted(line for line in lines if line.startswith("file")) == sorted(files)
    shown = [line for line in lines if line.startswith("map")]
    expected = []
    for extent, permissions, offset, _, _, *path in maps:
        begin, end = (f"{int(each, 16):x}" for each in extent.split("-"))
        expected.append(f"map {begin}-{end} {permissions} {offset} {''.join(path)}".rstrip())
    assert [line.rstrip() for line in shown] == expected
    tasks = [line for line in lines if line.startswith(f"task {pid} ")]
    assert tasks[0] == rf"task {pid} {threads[0]} S odd) R 1\x1b[2J"
    assert [int(line.split()[2]) for line in tasks] == threads
    assert len(threads) > 1
    assert lines[-1] == "end"
    assert not any("never" in line for line in lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_loops_count_the_processes_of_others_that_cannot_be_read(tmp_path: Path) -> None:
    text = 'm:f {{ }} begin {{ for (file : files({0})) printf("never"); for (m : maps({0})) printf("never"); exit(); }}'
    words = ["run", "-e", text.format(os.getpid()), "--engine", "ptrace", "--", "/bin/true"]
    done = subprocess.run(
        [*DPROBES, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False, user=65534, group=65534,
        extra_groups=[], env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": ""},
    )  # fmt: skip
    assert "never" not in done.stdout
    for kind in ("files", "maps"):
        said = f"the loops over '{kind}' left out 1 process of other users"
        assert said in done.stderr, done.stderr


def alone(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of blocks alone, with any options, and return the result."""
    return subprocess.run(
        [*DPROBES, "run", "-e", text, *words], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def test_blocks_alone_are_a_program() -> None:
    done = alone('begin { printf("hello"); @a[1] = 5; @a[1]++; @a[2] = 1; } end { printf("%d", @a[1]); }')
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "hello\n6\n@a[2]: 1\n@a[1]: 6\n"


def test_blocks_alone_end_with_exit_or_with_the_command(tmp_path: Path) -> None:
    counted = alone('static int n; every 10ms { n++; if (n == 3) { printf("%d", n); exit(); } }')
    assert (counted.returncode, counted.stdout, counted.stderr) == (0, "3\n", "")
    there = tmp_path / "there"
    done = alone(
        'begin { printf("before"); } end { printf("after"); }',
        "--exit-status",
        "--",
        "sh",
        "-c",
        f"echo >{there}; exit 3",
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "before\nafter\n", "")
    assert there.exists()


def test_blocks_alone_are_built_and_not_inserted(tmp_path: Path) -> None:
    source, built = tmp_path / "a.dpc", tmp_path / "a.ppdf"
    source.write_text('begin { @x = 3; @x--; printf("%d", @x); }')
    subprocess.run([*DPROBES, "build", source, "-o", built], check=True, capture_output=True, timeout=TIMEOUT)
    done = subprocess.run([*DPROBES, "run", built], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n@x: 2\n")
