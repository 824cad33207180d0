"""
Real programs print the same with probes on their hottest functions as without.

The places are the first instructions of the functions that are called from most places in a module, as objdump sees it,
or of functions that are known to be hot. ``maxhits`` bounds the time, not what is probed.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, await_true, executable_segments, read_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from integration.support import Result, Runner

FUNCTIONS = 150
INSTRUCTIONS = 4  # probed ones of each function that is named, else 2
HITS = 200  # of each
REFUSED = ("int3", "fwait", "(bad)")
RUN_TIMEOUT = 180

PYTHON_FUNCTIONS = (
    "_PyEval_EvalFrameDefault", "_Py_Dealloc", "PyObject_GetAttr", "PyDict_GetItemWithError", "PyObject_Malloc",
    "PyObject_Free", "PyUnicode_New", "PyTuple_New", "_PyType_Lookup", "PyObject_RichCompare",
)  # fmt: skip
BASH_FUNCTIONS = (
    "xmalloc", "xfree", "execute_command_internal", "hash_search", "make_child", "find_variable", "expand_string",
    "waitchld", "make_bare_word", "copy_word",
)  # fmt: skip
REDIS_FUNCTIONS = (
    "processCommand", "call", "dictFind", "lookupKeyReadWithFlags", "readQueryFromClient", "sdsfree", "zfree",
    "writeToClient", "processInputBuffer", "aeProcessEvents",
)  # fmt: skip
REDIS_LOAD = "-q -n 2000 -c 8 --threads 2 -t set,get,incr,lpush,sadd"


def tool(name: str, package: str = "") -> Path:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (package {package or name})")
    return Path(found).resolve()


def library_of(program: Path, name: str) -> Path:
    """Return the file of a library that a program is linked with."""
    text = subprocess.run(["ldd", program], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    found = re.search(rf"{re.escape(name)} => (\S+)", text)
    if found is None:
        pytest.skip(f"{program} is not linked with {name}")
    return Path(found[1]).resolve()


@functools.cache
def disassembly(path: Path) -> list[tuple[int, str]]:
    """Return link address and text of each instruction in a file's text section."""
    command = ["objdump", "-d", "-j", ".text", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    return [(int(a, 16), t) for a, t in re.findall(r"^ +([0-9a-f]+):\t(.+)$", text, re.MULTILINE)]


def called_functions(path: Path, count: int = FUNCTIONS) -> list[int]:
    """Return the addresses of the functions that are called from most places in a file's own text."""
    code = disassembly(path)
    own = {address for address, _ in code}
    calls = Counter(int(found[1], 16) for _, text in code if (found := re.match(r"call +([0-9a-f]+) <", text)))
    return [address for address, _ in calls.most_common() if address in own][:count]


def exported(path: Path, names: Sequence[str]) -> list[int]:
    """Return the addresses of those functions that a file exports."""
    text = subprocess.run(["nm", "-D", path], check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    symbols = {row[2].partition("@")[0]: int(row[0], 16) for row in map(str.split, text.splitlines()) if len(row) == 3}
    return [symbols[name] for name in names if name in symbols]


def program_for(path: Path, functions: Sequence[int], instructions: int = INSTRUCTIONS, hits: int = HITS) -> str:
    """Return a probe program for the first instructions of functions, each hit no more than ``hits`` times."""
    code = disassembly(path)
    index = {address: n for n, (address, _) in enumerate(code)}
    places: list[int] = []
    for function in functions:
        found = code[index[function] : index[function] + instructions]
        places += [address for address, text in found if text.split()[0] not in REFUSED and address not in places]
    segment = next(s for s in executable_segments(path) if s[1] <= places[0] < s[1] + s[2])
    offsets = [address - segment[1] + segment[0] for address in places]
    data = path.read_bytes()
    # Where no function is known, as in parts of stripped files, the opcode says that there is code.
    return f'name = "{path}"\n' + "".join(
        f"offset = {offset:#x}\nopcode = {data[offset]:#x}\nmaxhits = {hits}\nminor = {n}\npush r, eip\nlog 1\nexit\n"
        for n, offset in enumerate(offsets)
    )


def checked(result: Result) -> Result:
    """Assert what holds of each run: it went well, and every hit that was counted left its record."""
    assert result.status == 0, result.stderr[-1000:]
    hits = sum(counts.hits for counts in result.counts.values())
    assert len(result.records) == hits >= 2000
    # A definition is one place: all its records were made at one address in a process, and pages agree in all.
    seen = {(r["minor"], bytes.fromhex(r["data"])[:2]) for r in result.records}
    pages = {minor: {low[0] | (low[1] & 15) << 8 for m, low in seen if m == minor} for minor, _ in seen}
    assert all(len(addresses) == 1 for addresses in pages.values())
    return result


def both(run: Runner, source: str, command: Sequence[str], text: str | None = None) -> tuple[str, str]:
    """Return what a command prints without and with probes."""
    plain = subprocess.run(
        command, check=True, capture_output=True, text=True, input=text, timeout=TIMEOUT, errors="replace"
    )
    if text is None:
        result = run(source, ["--exit-status", "--", *command], timeout=RUN_TIMEOUT)
    else:
        process, output = run.start(source, ["--exit-status", "--", *command], stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
        result = read_result(process, output, RUN_TIMEOUT)
    return plain.stdout, checked(result).stdout


def words(size: int) -> bytes:
    """Return so many bytes of something like text, the same each time."""
    source = random.Random(1)
    vocabulary = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 9))) for _ in range(3000)]
    return " ".join(source.choices(vocabulary, k=size // 4)).encode()[:size]


def test_sqlite_with_100_000_inserts(run: Runner) -> None:
    program = tool("sqlite3")
    library = library_of(program, "libsqlite3.so.0")
    script = (
        "create table t(a integer primary key, b text, c real);\n"
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 100000)\n"
        "  insert into t select i, 'row ' || (i * 7919 % 100003), i / 3.0 from n;\n"
        "create index by_b on t(b);\n"
        "select count(*), sum(a), min(b), max(b), round(sum(c), 3) from t;\n"
        "select * from t where b like 'row 123%' order by b limit 20;\n"
        "pragma integrity_check;\n"
    )
    plain, probed = both(run, program_for(library, called_functions(library), 2), [str(program), ":memory:"], script)
    assert probed == plain
    assert "100000|5000050000|" in plain


def test_pythons_own_tests(run: Runner) -> None:
    for program in (Path(sys.executable).resolve(), Path("/usr/bin/python3").resolve()):
        found = subprocess.run(
            [program, "-c", "import test.test_json, test.test_dict"], check=False, capture_output=True
        )
        functions = exported(program, PYTHON_FUNCTIONS) if found.returncode == 0 else []
        if functions:
            break
    else:
        pytest.skip("no Python has its own tests and its code in its program (package libpython3.11-testsuite)")
    command = [str(program), "-m", "test", "-v", "test_json", "test_dict"]
    plain, probed = both(run, program_for(program, functions), command)
    assert verdicts(probed) == verdicts(plain)
    assert len(verdicts(plain)) > 200


def verdicts(output: str) -> list[str]:
    """Return which tests ended how, without the times."""
    return sorted(
        re.findall(r"^test\w+ \(.*?\).*(?:ok|FAIL|ERROR|skipped.*)$|^Ran \d+ tests|^Result: .*", output, re.MULTILINE)
    )


def test_gzip(run: Runner, tmp_path: Path) -> None:
    program, data = tool("gzip"), tmp_path / "data"
    data.write_bytes(words(1 << 20))
    source = program_for(program, called_functions(program), 2)
    plain, probed = both(run, source, ["sh", "-c", f"{program} -9nc <{data} | od -v -tx1 | sha256sum"])
    assert probed == plain
    command = ["sh", "-c", f"{program} -9nc <{data} >{data}.gz; {program} -dc <{data}.gz | sha256sum"]
    assert both(run, source, command)[1].split()[0] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_xz_with_two_threads(run: Runner, tmp_path: Path) -> None:
    program, data = tool("xz", "xz-utils"), tmp_path / "data"
    library = library_of(program, "liblzma.so.5")
    data.write_bytes(words(2 << 20))
    source = program_for(library, called_functions(library), 2)
    command = ["sh", "-c", f"{program} -T2 -3 --block-size=300KiB -c <{data} >{data}.xz; sha256sum <{data}.xz"]
    plain, probed = both(run, source, command)
    assert probed == plain
    assert subprocess.run([program, "-dc", f"{data}.xz"], check=True, capture_output=True).stdout == data.read_bytes()


def test_bash_with_500_forks(run: Runner, tmp_path: Path) -> None:
    program = tool("bash")
    script = tmp_path / "forks.sh"
    script.write_text(
        "total=0\nfor i in {1..250}; do\n  x=$(echo $((i * i)))\n  total=$((total + x))\n  (exit $((i % 256)))\n"
        "  echo $i $? $x $total\ndone\n"
    )
    plain, probed = both(run, program_for(program, exported(program, BASH_FUNCTIONS)), [str(program), str(script)])
    assert probed == plain
    assert plain.splitlines()[-1] == "250 250 62500 5239625"


def redis_results(run_server: subprocess.Popen[str], directory: Path) -> tuple[str, str]:
    """Let the benchmark work on a server, stop it, and return the calls it served and what it holds."""
    address = ["-s", str(directory / "socket")]
    await_true(lambda: (directory / "socket").exists() or run_server.poll() is not None, "the server's socket", TIMEOUT)
    assert run_server.poll() is None, "the server ended"
    client = ["redis-cli", *address]
    load = ["redis-benchmark", *address, *REDIS_LOAD.split()]
    subprocess.run(load, check=True, capture_output=True, timeout=RUN_TIMEOUT)
    statistics = subprocess.run([*client, "info", "commandstats"], check=True, capture_output=True, text=True).stdout
    calls = re.findall(
        r"cmdstat_(set|get|incr|lpush|sadd):calls=(\d+),.*?rejected_calls=(\d+),failed_calls=(\d+)", statistics
    )
    held = subprocess.run(
        client, input="get counter:__rand_int__\nllen mylist\nscard myset\ndbsize\n", check=True, capture_output=True,
        text=True,
    ).stdout  # fmt: skip
    subprocess.run([*client, "shutdown", "nosave"], check=False, capture_output=True)
    return str(sorted(calls)), held


def test_a_redis_server_with_threads(run: Runner, tmp_path: Path) -> None:
    tool("redis-benchmark", "redis-tools")
    # Debian has the server's program, under another name, in the package of the tools.
    program = tool("redis-server" if shutil.which("redis-server") else "redis-check-rdb", "redis-tools")
    results = []
    source = program_for(program, exported(program, REDIS_FUNCTIONS), hits=100)
    for probed in (False, True):
        directory = tmp_path / str(probed)
        directory.mkdir()
        server = directory / "redis-server"
        server.symlink_to(program)
        command = [str(server), "--port", "0", "--unixsocket", str(directory / "socket"), "--save", "", "--dir"]
        command += [str(directory), "--io-threads", "2", "--io-threads-do-reads", "yes", "--loglevel", "warning"]
        if not probed:
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True) as process:
                try:
                    results.append(redis_results(process, directory))
                finally:
                    process.kill()
        else:
            process, output = run.start(source, ["--exit-status", "--", *command])
            results.append(redis_results(process, directory))
            checked(read_result(process, output))
    assert results[0] == results[1]
    assert "('set', '2000', '0', '0')" in results[0][0]
