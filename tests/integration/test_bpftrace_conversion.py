"""
bpftrace's own tools and the one-liners of its tutorial, converted: which can be, as docs/how-to/coming-from.md says.

Several are run side by side with bpftrace, on the same command, and print the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "coming-from.md").read_text()
DPROBES = [sys.executable, "-m", "dprobes"]
TOOLS = {path.stem: path for path in sorted(Path("/usr/sbin").glob("*.bt"))}
TABLE = dict(re.findall(r"^\| `([a-z-]+)\.bt` \| (.*?) \|$", GUIDE, re.MULTILINE))

_NOT_HERE = re.compile(
    r"has no symbol|matches no function of|there is no system call|there is no tracepoint|"
    r"no tracepoint of this machine|'struct cfs_rq' has no member 'nr_running'"
)
"""What is wrong about a program that is right for another kernel or library."""


def dprobes(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [*DPROBES, *(str(each) for each in arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=3 * TIMEOUT, check=False)


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"error: (.*)", done.stderr)


def require_tools() -> None:
    if not TOOLS:
        pytest.skip("the tools of bpftrace are not installed")


def require_both() -> None:
    require_bpf()
    require_initial_namespace()
    if shutil.which("bpftrace") is None:
        pytest.skip("bpftrace is not installed")


def test_the_table_of_the_guide_has_each_tool() -> None:
    require_tools()
    assert set(TOOLS) <= set(TABLE)
    converted = sum(text.startswith("yes") for text in TABLE.values())
    assert f"{converted} of {len(TABLE)}" in GUIDE


@pytest.mark.parametrize("tool", [tool for tool in TABLE if tool in TOOLS or not TOOLS])
def test_a_tool_is_converted_as_the_guide_says(tool: str, tmp_path: Path) -> None:
    require_tools()
    require_bpf()
    program = tmp_path / f"{tool}.dpc"
    done = dprobes("convert", TOOLS[tool], "-o", program)
    assert "Traceback" not in done.stderr
    _, _, lacks = TABLE[tool].partition("; in bpftrace 0.23 no: ")
    if lacks and done.returncode == 2:
        assert errors_of(done)[0] == lacks
        return
    if TABLE[tool].startswith("no"):
        assert (done.returncode, program.exists()) == (2, False)
        # The first thing that has no like is what the guide names.
        assert errors_of(done)[0] in TABLE[tool].replace("`", "'")
        return
    assert done.returncode == 0, done.stderr
    checked = dprobes("check", program)
    wrong = [each for each in errors_of(checked) if not _NOT_HERE.search(each)]
    assert wrong == []


TUTORIAL = [
    'BEGIN { printf("hello world\\n"); }',
    'tracepoint:syscalls:sys_enter_openat { printf("%s %s\\n", comm, str(args.filename)); }',
    "tracepoint:raw_syscalls:sys_enter { @[comm] = count(); }",
    "tracepoint:syscalls:sys_exit_read /pid == 18644/ { @bytes = hist(args.ret); }",
    "kretprobe:vfs_read { @bytes = lhist(retval, 0, 2000, 200); }",
    (
        "kprobe:vfs_read { @start[tid] = nsecs; } "
        "kretprobe:vfs_read /@start[tid]/ { @ns[comm] = hist(nsecs - @start[tid]); delete(@start, tid); }"
    ),
    "tracepoint:sched:sched* { @[probe] = count(); } interval:s:5 { exit(); }",
    "profile:hz:99 { @[kstack] = count(); }",
    "tracepoint:sched:sched_switch { @[kstack] = count(); }",
    "tracepoint:block:block_rq_issue { @ = hist(args.bytes); }",
    (
        "#include <linux/path.h>\n#include <linux/dcache.h>\nkprobe:vfs_open "
        '{ printf("open path: %s\\n", str(((struct path *)arg0)->dentry->d_name.name)); }'
    ),
]
"""Lessons 2 to 12 of docs/tutorial_one_liners.md; 1 lists probes."""


@pytest.mark.parametrize("script", TUTORIAL)
def test_the_tutorial_is_converted(script: str, tmp_path: Path) -> None:
    require_bpf()
    program = tmp_path / "lesson.dpc"
    done = dprobes("convert", "-e", script, "-o", program)
    assert done.returncode == 0, done.stderr
    assert [each for each in errors_of(dprobes("check", program)) if not _NOT_HERE.search(each)] == []


def side_by_side(directory: Path, script: str, command: str) -> tuple[str, str]:
    """Run a script and what it becomes on one run of a command; return what each prints."""
    require_both()
    file, program = directory / "script.bt", directory / "script.dpc"
    file.write_text(script)
    done = dprobes("convert", file, "-o", program)
    assert done.returncode == 0, done.stderr
    theirs, ours = directory / "theirs", directory / "ours"
    done = subprocess.run(
        [*DPROBES, "run", program, "--engine", "ebpf", "-o", ours, "--rows", "100", "--",
         "bpftrace", "-o", theirs, "-c", command, file],
        capture_output=True, text=True, timeout=5 * TIMEOUT, check=False, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return theirs.read_text(), ours.read_text() + done.stdout


def of_command(text: str, word: str) -> list[str]:
    """Return the lines about a process, without the time that they begin with, and with single blanks."""
    lines = re.findall(r"^\d\d:\d\d:\d\d(?:\.\d+  |  )(.*)$", text, re.MULTILINE)
    return sorted(" ".join(line.split()) for line in lines if word in line)


@pytest.mark.alone
def test_gethostlatency_prints_the_same(tmp_path: Path) -> None:
    require_tools()
    theirs, ours = side_by_side(tmp_path, TOOLS["gethostlatency"].read_text(), "/usr/bin/getent ahosts localhost")
    expected = [re.sub(r" \d+ localhost$", "", line) for line in of_command(theirs, "localhost")]
    assert len(expected) == 1
    assert [re.sub(r" \d+ localhost$", "", line) for line in of_command(ours, "localhost")] == expected


SUMS = """
uprobe:/lib/x86_64-linux-gnu/libz.so.1:crc32 /comm == "python3"/ {
    @calls = count();
    @bytes[pid > 0] = sum(arg2);
    @largest = max(arg2);
}
"""


@pytest.mark.alone
def test_tables_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "summing"
    script.write_text("import zlib\nfor n in (10, 700, 90): zlib.crc32(bytes(n))\n")
    theirs, ours = side_by_side(tmp_path, SUMS, f"/usr/bin/python3 -S {script}")
    expected = {"@calls: 3", "@bytes[1]: 800", "@largest: 700"}
    assert expected <= set(theirs.splitlines())
    assert expected <= set(ours.splitlines())
