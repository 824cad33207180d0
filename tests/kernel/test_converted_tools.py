"""bpftrace's tools for tracepoints, converted, beside bpftrace itself on the same command: both print the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guests.guest import Guest

TOOLS = Path("/usr/sbin")
pytestmark = [pytest.mark.machine(programs=("bpftrace",), memory=1500), pytest.mark.shared_guest]


def side_by_side(guest: Guest, tool: str, command: str) -> tuple[str, str]:
    """Run a tool and what it becomes on one run of a command; return what each prints."""
    if not (TOOLS / f"{tool}.bt").exists():
        pytest.skip("the tools of bpftrace are not installed")
    return both(guest, (TOOLS / f"{tool}.bt").read_text(), command)


def both(guest: Guest, script: str, command: str) -> tuple[str, str]:
    """Do the same with the text of a script."""
    guest.put("/tmp/tool.bt", script)
    guest.dprobes("convert", "/tmp/tool.bt", "-o", "/tmp/tool.dpc")
    peer = ("bpftrace", "-o", "/tmp/theirs", "-c", command, "/tmp/tool.bt")
    guest.dprobes("run", "/tmp/tool.dpc", "--engine", "ebpf", "-o", "/tmp/ours", "--", *peer)
    return guest.run("cat /tmp/theirs").stdout, guest.run("cat /tmp/ours").stdout


def lines_of(text: str, word: str) -> list[str]:
    """Return the lines with a word, without the time that they may begin with, and with single blanks."""
    lines = (re.sub(r"^\d\d:\d\d:\d\d(?:\.\d+)?  ", "", line) for line in text.splitlines())
    return sorted(" ".join(line.split()) for line in lines if word in line)


def test_opensnoop(guest: Guest) -> None:
    theirs, ours = side_by_side(guest, "opensnoop", "/bin/cat /proc/version /nowhere")
    expected = lines_of(theirs, " cat ")
    assert any(line.endswith(" -1 2 /nowhere") for line in expected)
    assert lines_of(ours, " cat ") == expected


def test_killsnoop(guest: Guest) -> None:
    guest.put("/tmp/kills", "kill -0 $$\nkill -0 $PPID\n")
    theirs, ours = side_by_side(guest, "killsnoop", "/bin/sh /tmp/kills")
    expected = lines_of(theirs, " sh ")
    assert len(expected) == 2
    assert lines_of(ours, " sh ") == expected


def test_execsnoop(guest: Guest) -> None:
    guest.put("/tmp/starts", "/bin/cat /proc/version /proc/uptime\n/bin/cat /proc/version\n")
    theirs, ours = side_by_side(guest, "execsnoop", "/bin/sh /tmp/starts")
    # The times before the process have another beginning.
    # bpftrace gives out what each processor has seen, one processor after the other.
    expected = sorted(re.findall(r"\d+ /bin/cat .*", "\n".join(lines_of(theirs, "/bin/cat"))))
    assert sorted(line.split(" ", 1)[1] for line in expected) == [
        "/bin/cat /proc/version",
        "/bin/cat /proc/version /proc/uptime",
    ]
    assert sorted(re.findall(r"\d+ /bin/cat .*", "\n".join(lines_of(ours, "/bin/cat")))) == expected


def test_parameters_by_their_names(guest: Guest) -> None:
    script = """
    kfunc:vfs_open /comm == "cat"/ { printf("opens %s\\n", str(args->path->dentry->d_name.name)); }
    kretfunc:vfs_read /comm == "cat" && retval > 0/ { printf("reads %d of %d\\n", retval, args->count); }
    """
    theirs, ours = both(guest, script, "/bin/cat /proc/version /proc/uptime")
    expected = sorted(re.findall(r"(?:opens|reads) .*", theirs))
    assert "opens version" in expected
    assert any(line.startswith("reads ") for line in expected)
    assert sorted(re.findall(r"(?:opens|reads) .*", ours)) == expected
