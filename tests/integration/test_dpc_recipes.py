"""The recipes in DProbes C on real programs: each engine says what is known of the program otherwise."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dprobes.errors import DprobesError
from dprobes.sets.set_library import listed_sets
from integration.served_programs import (
    PYTHON,
    WAITING,
    go_server,
    needs,
    needs_usdt,
    postgres,
    redis_program,
    redis_run,
    tls_connection,
)
from integration.support import (
    I386_COMPILER,
    I386_FLAGS,
    I386_LIBRARIES,
    TIMEOUT,
)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DPROBES = [sys.executable, "-m", "dprobes"]
RECIPES = {path.stem: path for path in EXAMPLES.glob("*.dpc")}
VIEWS = {
    f"{each.name}/{view.name}": each.directory / view.file
    for each in listed_sets()
    if not isinstance(each.content, DprobesError) and each.directory.is_relative_to(ROOT)
    for view in each.content.views
    if view.file
}

_HEADER = re.compile(r"\d\d:\d\d:\d\d\.\d{6}  [^\[\n]+\[\d+\]  (?:ip=0x\w+  )?(.*)")

_WHOLE_LINES = "import sys; sys.stdout.reconfigure(line_buffering=True, write_through=False); "
"""What Python executes first on its first line: without it, print() writes each word by itself."""


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine: what a recipe prints is the same with each."""
    if request.param == "ebpf" and os.geteuid() != 0:
        pytest.skip("ebpf needs root")
    return str(request.param)


def run(recipe: str, engine: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a recipe by its name, as a user does."""
    command = [*DPROBES, "run", recipe, "--engine", engine, *arguments]
    # Our lines are written at once; those of the command must be, too, or ours would stand within them.
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3 * TIMEOUT, check=False, cwd=EXAMPLES.parent, env=environment
    )
    assert done.returncode == status, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return done


def records(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what records say, without the header of their lines."""
    return _HEADER.findall(done.stdout)


def rows(done: subprocess.CompletedProcess[str], table: str) -> dict[str, str]:
    """Return a table: its rows by their keys."""
    return dict(re.findall(rf"^@{table}\[(.*)\]: (.*)$", done.stdout, re.MULTILINE))


def compiled(directory: Path, source: str, *options: str, compiler: str = "gcc") -> Path:
    needs(compiler)
    path = directory / "program.c"
    path.write_text(textwrap.dedent(source))
    program = directory / "program"
    subprocess.run([compiler, *options, "-o", program, path], check=True)
    return program


def python(code: str) -> list[str]:
    if not Path(PYTHON).exists():
        pytest.skip("there is no /usr/bin/python3")
    return [PYTHON, "-S", "-c", _WHOLE_LINES + textwrap.dedent(code)]


def test_each_recipe_says_what_it_does_how_to_run_it_and_what_it_prints() -> None:
    assert len(RECIPES) >= 7
    assert len(VIEWS) >= 10
    for recipe, path in {**RECIPES, **VIEWS}.items():
        lines = path.read_text().splitlines()
        comment = lines[: next(number for number, line in enumerate(lines) if line[:2] != "//")]
        assert re.search(rf"^//   dprobes run {recipe}( |$)", "\n".join(comment), re.MULTILINE), recipe
        assert any(line.startswith("// ") and "prints" in line for line in comment), recipe
        assert len(lines) <= 45, recipe


def test_each_recipe_has_codes_of_its_own() -> None:
    codes = [re.findall(r", major (\d+);", path.read_text()) for path in RECIPES.values()]
    assert all(len(found) == 1 for found in codes)
    assert len({found[0] for found in codes}) == len(RECIPES)


def test_files_opened(engine: str) -> None:
    code = """
    import os
    os.write(1, b"OPENED %d\\n" % os.open("/etc/hostname", 0))
    try: os.open("/nowhere", 0)
    except OSError: pass
    """
    done = run("library-opens", engine, "--", *python(code))
    (descriptor,) = re.findall(r"^OPENED (\d+)$", done.stdout, re.MULTILINE)
    found = [re.sub(r", after \d+ us", "", each) for each in records(done)]
    assert found[-2:] == [f"/etc/hostname = {descriptor}", "/nowhere = -1"]


def test_commands_run(engine: str, tmp_path: Path) -> None:
    needs("strace", "wc")
    command = ["sh", "-c", "ls -l / | wc -l; /bin/true; true"]
    traced = tmp_path / "strace"
    subprocess.run(["strace", "-f", "-e", "execve", "-o", traced, *command], check=True, capture_output=True)
    calls = re.findall(r'execve\("(.*?)", \["[^"]*"(?:, "(.*?)")?(?:, "(.*?)")?.*\]', traced.read_text())
    expected = [" ".join(filter(None, call)) for call in calls[1:]]  # the first one is that of strace itself
    found = records(run("commands", engine, "--", *command))
    assert len(expected) >= 3
    assert sorted(found) == sorted(expected)


def test_slow_calls_of_a_function(engine: str) -> None:
    code = "import time\ntime.sleep(0.3)\ntime.sleep(0.001)\ntime.sleep(0.3)"
    done = run("slow-function", engine, "-D", "SLOW=250ms", "--", *python(code))
    found = [
        re.fullmatch(r"clock_nanosleep \[libc.so.6\] took (\d+) us, called from (.*)", each) for each in records(done)
    ]
    assert [match is not None and int(match[1]) >= 290_000 for match in found] == [True, True]
    assert all(match is not None and "python3" in match[2] for match in found)
    assert "\n3 in all" in done.stdout


NAPPING = """
    #include <time.h>
    __attribute__((noinline)) int nap(long ms) {
        struct timespec time = {0, ms * 1000000};
        return clock_nanosleep(CLOCK_MONOTONIC, 0, &time, 0);
    }
    __attribute__((noinline)) int early(void) { return nap(300) + 1; }
    __attribute__((noinline)) int late(void) { return nap(700) + 2; }
    __attribute__((noinline)) int often(void) { int n = 0; for (int i = 0; i < 5; i++) n += nap(1); return n + 3; }
    int main(void) { return early() + late() + often() - 6; }
"""


def test_the_slowest_calls_with_their_stacks(engine: str, tmp_path: Path) -> None:
    program = compiled(tmp_path, NAPPING, "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
    done = run("slowest-calls", engine, "-D", "COUNT=2", "--", str(program))
    found = re.findall(r"^@slowest\[\n((?: +.*\n)+)\]: (\d+) ms$", done.stdout, re.MULTILINE)
    ways = [re.findall(r"(\w+)\+0x\w+ \[program\]", stack)[:3] for stack, _ in found]
    assert ways == [["nap", "early", "main"], ["nap", "late", "main"]]
    assert [int(took) >= least for (_, took), least in zip(found, (300, 700), strict=True)] == [True, True]
    assert "@slowest: 1 row with a smaller value is not shown" in done.stdout


def test_the_slowest_single_calls_are_found_in_a_trace_file(engine: str, tmp_path: Path) -> None:
    program = compiled(tmp_path, NAPPING, "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
    said = (EXAMPLES / "slowest-calls.dpc").read_text()
    ((code, query),) = re.findall(r"run -e '(.*?)' -o calls.dpt.*\n.*sql calls.dpt '(.*?)'", said)
    trace = str(tmp_path / "calls.dpt")
    subprocess.run([*DPROBES, "run", "-e", code, "--engine", engine, "-o", trace, "--", program], check=True)
    asked = subprocess.run([*DPROBES, "sql", "--json", trace, query], check=True, capture_output=True, text=True)
    rows_found = [json.loads(line) for line in asked.stdout.splitlines()]
    assert len(rows_found) == 7
    ways = [[name.split("+")[0] for name in row["ustack_names"][:2]] for row in rows_found[:3]]
    assert ways == [["nap", "late"], ["nap", "early"], ["nap", "often"]]
    assert rows_found[0]["elapsed"] >= 700_000_000 > rows_found[1]["elapsed"] >= 300_000_000


LEAKING = """
    #include <stdlib.h>
    void *keep[100];
    __attribute__((noinline)) void *buffer(int n) { return malloc(n); }
    __attribute__((noinline)) void leaky(int i) { keep[i] = buffer(100); }
    __attribute__((noinline)) void tidy(int i) { free(buffer(200 + i)); }
    int main(void) { for (int i = 0; i < 10; i++) { leaky(i); tidy(i); } return 0; }
"""


@pytest.mark.parametrize("bits", [64, 32])
def test_leaks_by_stack(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    flags = ("-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
    if bits == 32:
        needs(I386_COMPILER)
        program = compiled(tmp_path, LEAKING, *flags, *I386_FLAGS, compiler=I386_COMPILER)
    else:
        program = compiled(tmp_path, LEAKING, *flags)
        monkeypatch.setenv("LD_LIBRARY_PATH", I386_LIBRARIES)  # the name means a library of 32 bits as well
    done = run("libc.malloc/leaks", engine, "--", str(program))
    found = {re.sub(r"\+0x\w+ \[program\]", "", key): value for key, value in rows(done, "bytes").items()}
    assert found == {"buffer, leaky, main": "1000"}
    assert rows(done, "size") == {}  # what the recipe keeps for itself is not shown


def test_heap_use_by_call_site(engine: str, tmp_path: Path) -> None:
    program = compiled(tmp_path, LEAKING, "-O1")
    done = run("libc.malloc/callers", engine, "--", str(program))
    ((place, total),) = rows(done, "bytes").items()
    assert (place.split("+")[0], total) == ("buffer", str(10 * 100 + sum(range(200, 210))))
    assert rows(done, "sizes")[place] == "count 20, average 152.25, total 3045, min 100, max 209"


def test_lock_contention(engine: str, tmp_path: Path) -> None:
    program = compiled(tmp_path, WAITING, "-O1", "-pthread")
    done = run("pthread/contended", engine, "--", str(program))
    (owner,) = re.findall(r"^HELD (\d+) ", done.stdout, re.MULTILINE)
    contended = [(*key.split(", "), count) for key, count in rows(done, "contended").items()]
    # The program has another mutex, whose waits it does not know.
    assert ("worker", owner, "3") in [(place.split("+")[0], *rest) for place, *rest in contended]
    assert int(re.findall(r"^@quick: (\d+)$", done.stdout, re.MULTILINE)[0]) >= 3  # and those of libraries


def test_python_functions_and_garbage(engine: str) -> None:
    needs_usdt(PYTHON, "function__return", "--with-dtrace")
    code = """
    import gc
    gc.disable()
    class Loop: pass
    def work(n):
        loop = Loop(); loop.self = loop
        return n if n == 0 else work(n - 1)
    [work(3) for _ in range(5)]
    gc.enable()
    print("freed", gc.collect())
    """
    done = run("python/functions", engine, "-D", f"PYTHON={Path(PYTHON).resolve()}", "--", *python(code))
    assert rows(done, "calls")["work, <string>"] == "20"
    (freed,) = re.findall(r"^freed (\d+)$", done.stdout, re.MULTILINE)
    assert int(freed) >= 20
    found = [re.findall(r"gc of generation (\d) took \d+ us, and freed (\d+)", each) for each in records(done)]
    assert [("2", freed)] in found


def test_sql_of_sqlite(engine: str) -> None:
    code = """
    import os, sqlite3
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.set_trace_callback(lambda text: os.write(1, f"TRACE {text}\\n".encode()))
    database.execute("create table t (n integer)")
    for n in range(COUNT):
        database.execute("insert into t values (?)", (n,))
    print("ROWS", len(database.execute("select n from t where n > 0").fetchall()))
    """
    results = []
    for count in (3, 13):
        done = run("sqlite/queries", engine, "--", *python(code.replace("COUNT", str(count))))
        if not records(done):
            pytest.skip("this python3 has another sqlite")
        traced = [re.sub(r"\(\d+\)", "(?)", text) for text in re.findall(r"^TRACE (.*)$", done.stdout, re.MULTILINE)]
        # What the library asks itself is prepared as well, but not traced.
        assert [text for text in dict.fromkeys(records(done)) if "sqlite_" not in text] == list(dict.fromkeys(traced))
        assert f"\nROWS {count - 1}\n" in done.stdout
        results.append({int(code): int(count) for code, count in rows(done, "results").items()})
    # Ten more rows, and ten more statements that end.
    assert {code: results[1][code] - results[0][code] for code in (100, 101)} == {100: 10, 101: 10}


def test_sql_of_postgres(engine: str, tmp_path: Path) -> None:
    with postgres("select 40+2 as answer;\nselect pg_sleep(0.1);\n", tmp_path) as server:
        done = run("postgres/queries", engine, "-D", f"POSTGRES={server.program}", "--", "sh", "-c", server.command)
    assert 'answer = "42"' in done.stdout
    found = [re.fullmatch(r"(\d+) us: (.*?);?(?:\\n)?", each) for each in records(done)]
    assert [match and match[2] for match in found] == ["select 40+2 as answer", "select pg_sleep(0.1)"]
    assert found[1] is not None
    assert int(found[1][1]) >= 100_000


def test_plaintext_of_tls(engine: str, tmp_path: Path) -> None:
    code = (
        tls_connection(tmp_path)
        + """
one.write(b"GET / HTTP/1.1")
print(other.read(100))
other.write(b"x" * 300)
print(len(one.read(1000)))
"""
    )
    done = run("openssl/plaintext", engine, "--", *python(code))
    assert records(done) == [
        "sends 14: GET / HTTP/1.1",
        "receives 14: GET / HTTP/1.1",
        f"sends 300: {'x' * 200}",
        f"receives 300: {'x' * 200}",
    ]
    assert "\n@sent: 314\n" in done.stdout
    assert "\n@received: 314\n" in done.stdout


def test_name_lookups(engine: str) -> None:
    code = """
    import socket
    for name in ("localhost", "no.such.host.invalid"):
        try: socket.getaddrinfo(name, 80); print("RESULT", name, 0)
        except socket.gaierror as error: print("RESULT", name, error.errno)
    """
    done = run("libc.dns/lookups", engine, "--", *python(code))
    results = re.findall(r"^RESULT (\S+) (-?\d+)$", done.stdout, re.MULTILINE)
    found = [re.fullmatch(r"(\S+): (-?\d+) after \d+ us", each) for each in records(done)]
    assert [match and (match[1], match[2]) for match in found] == results
    assert [name for name, _ in results] == ["localhost", "no.such.host.invalid"]
    assert results[0][1] == "0"
    assert results[1][1] != "0"


def test_signals(engine: str) -> None:
    code = """
    import os, signal
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    print("SELF", os.getpid(), seen)
    """
    done = run("signals", engine, "--", *python(code))
    ((self, seen),) = re.findall(r"^SELF (\d+) (.*)$", done.stdout, re.MULTILINE)
    assert seen == "[10, 10, 12]"
    found = records(done)
    assert [each for each in found if "handles" not in each] == [*[f"sends 10 to {self}"] * 2, "raises 12"]
    assert {"handles 10", "handles 12"} <= {each.split(" by ")[0] for each in found}
    assert not any(re.fullmatch(r"handles \d+ by 0x[01]", each) for each in found)
    assert rows(done, "sent") == {"12": "1", "10": "2"}


@pytest.mark.parametrize("lines", [[], ["-D", "LINES"]], ids=["counts", "lines"])
def test_redis_commands(engine: str, lines: list[str], tmp_path: Path) -> None:
    words = [*DPROBES, "run", "redis/commands", "--engine", engine, "-D", f"REDIS={redis_program()}", *lines]
    statistics, _, output, messages = redis_run(words, tmp_path)
    done = subprocess.CompletedProcess(words, 0, output, messages)
    expected = {name.upper(): calls for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", statistics)}
    found = rows(done, "commands")
    assert {name: found[name] for name in ("SET", "GET")} == expected == {"SET": "3", "GET": "1"}
    said = [re.sub(r", \d+ us$", "", each) for each in records(done)]
    assert said[:4] == ([*(f"SET user:{number}" for number in range(3)), "GET user:1"] if lines else [])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go_server(tmp_path_factory.mktemp("go"))


def test_requests_to_a_go_server(engine: str, server: Path) -> None:
    done = run("go/requests", engine, "-D", f"GO={server}", "--", str(server))
    assert "SERVED 3 404\n" in done.stdout
    # Go's runtime starts a function again if the stack was too small for it: two hits of one call.
    requests = [request for request, _ in itertools.groupby(records(done))]
    assert requests == ["GET /users/0", "GET /users/1", "GET /users/2", "POST /none"]


BRANCHING = """
    #include <stdio.h>
    static int small, even;
    __attribute__((noinline)) int classify(int n) {
        if (n < 10)
            small++;
        if (n % 2 == 0)
            even++;
        return n;
    }
    int main(void) {
        for (int n = 0; n < 37; n++) classify(n);
        printf("COUNTS %d %d\\n", small, even);
        return 0;
    }
"""


def test_branches_of_a_function(engine: str, tmp_path: Path) -> None:
    needs("gcov")
    program = compiled(tmp_path, BRANCHING, "-O0", "-g")
    source = (tmp_path / "program.c").read_text().splitlines()
    first, last = (number for number, text in enumerate(source, 1) if "int classify(" in text or "return n;" in text)
    # The truth is that of the compiler's own counters, in another build of the same source.
    subprocess.run(["gcc", "-O0", "--coverage", "-o", "counted", "program.c"], check=True, cwd=tmp_path)
    subprocess.run(["./counted"], check=True, cwd=tmp_path, capture_output=True)
    told = subprocess.run(
        ["gcov", "-t", "counted-program.gcda"], check=True, cwd=tmp_path, capture_output=True, text=True
    ).stdout
    counts = {int(line): count for count, line in re.findall(r"^ *(\d+)\*?: *(\d+):", told, re.MULTILINE)}
    done = run(
        "branches", engine, "-D", f"PROGRAM={program}", "-D", f"LINES=program.c:{first}-{last}", "--", str(program)
    )
    found = {int(line): count for line, count in rows(done, "executed").items()}
    assert found == {line: count for line, count in counts.items() if first <= line <= last}
    assert len(set(found.values())) == 3  # all hits, and those of the two branches


def test_a_variable_of_a_live_program_is_changed(engine: str) -> None:
    needs("bash")
    script = "echo first; for n in 1 2; do echo $n; done"
    command = ["--allow-write", "--", "bash", "--norc", "-c", script]
    if engine == "ebpf":
        done = run("feature-flag", engine, *command, status=2)
        assert "error: '*p = …' needs writing memory, which the ebpf engine lacks\n" in done.stderr
        return
    done = run("feature-flag", engine, *command)
    traced = subprocess.run(["bash", "--norc", "-xc", script], capture_output=True, text=True, check=True).stderr
    assert records(done) == ["was 0, is 1"]
    assert re.findall(r"^\+ .*$", done.stderr, re.MULTILINE) == traced.splitlines()
