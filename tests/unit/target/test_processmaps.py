# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target.processmaps import (
    Mapping,
    executable_mappings,
    file_offset_at,
    parse_maps,
    read_maps,
    run_time_address,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]

TEXT = """\
55d0c0a00000-55d0c0a02000 r--p 00000000 fe:00 1234                       /usr/bin/my prog
55d0c0a02000-55d0c0a05000 r-xp 00002000 fe:00 1234                       /usr/bin/my prog
55d0c0a05000-55d0c0a06000 rw-p 00004000 fe:00 1234                       /usr/bin/my prog
55d0c1000000-55d0c1021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000021000 rwxp 00000000 00:00 0\x20
7f1000000000-7f1000001000 r-xp 00000000 08:11 77                         /tmp/libold.so (deleted)
7f1000001000-7f1000002000 r-xs 00001000 00:2e 78                         /tmp/odd\\012name\twith  space
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_every_field_is_read() -> None:
    maps = parse_maps(TEXT)
    assert 9 == len(maps)
    expected = Mapping(
        0x55D0C0A02000, 0x55D0C0A05000, "r-xp", 0x2000, os.makedev(0xFE, 0), 1234, "/usr/bin/my prog", False
    )
    assert expected == maps[1]
    assert [False, True, False] == [m.executable for m in maps[:3]]


def test_special_paths_are_understood() -> None:
    maps = parse_maps(TEXT)
    assert ["[heap]", "", "/tmp/libold.so", "/tmp/odd\nname\twith  space", "[vdso]", "[vsyscall]"] == [
        m.path for m in maps[3:]
    ]
    assert [False, False, True, True, False, False] == [m.is_file for m in maps[3:]]
    assert [maps[5]] == [m for m in maps if m.deleted]


def test_executable_mappings_are_the_code_of_files() -> None:
    expected = [m for m in parse_maps(TEXT) if m.executable and m.path.startswith("/")]
    assert 3 == len(expected)
    assert expected == executable_mappings(TEXT)


def test_own_mappings_are_read_like_the_file_says() -> None:
    text = read_maps(os.getpid())
    maps = parse_maps(text)
    assert len(text.splitlines()) == len(maps)
    assert [m for m in maps if m.executable and m.is_file] == executable_mappings(text)
    program = next(m for m in maps if m.executable and m.is_file)
    assert Path(program.path).stat().st_ino == program.inode


def test_offsets_and_run_time_addresses_are_each_others_inverse() -> None:
    program = parse_maps(TEXT)[:3]
    assert 0x55D0C0A02010 == run_time_address(program, 0x2010)
    assert 0x55D0C0A04010 == run_time_address(program, 0x4010)  # in data too: code wins
    assert 0x55D0C0A00010 == run_time_address(program, 0x10)
    assert run_time_address(program, 0x5000) is None
    assert 0x2010 == file_offset_at(program, 0x55D0C0A02010)
    assert 0x4010 == file_offset_at(program, 0x55D0C0A05010)
    assert file_offset_at(program, 0x55D0C0A06000) is None


def test_line_of_another_kind_is_named(error_of: ErrorOf) -> None:
    assert ("'no map' is not a line of a process's memory map", None) == error_of(lambda: parse_maps("no map"))


def test_absent_process_and_kernel_thread_are_named(error_of: ErrorOf) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (f"process {child.pid} does not exist", None) == error_of(lambda: read_maps(child.pid))


def test_process_that_has_ended_but_is_not_reaped_is_named(error_of: ErrorOf) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        message = f"process {child.pid} has no memory: it is a kernel thread or has ended"
        assert (message, None) == error_of(lambda: read_maps(child.pid))
    finally:
        child.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_process_of_another_user_is_named() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            read_maps(os.getppid())
        except TargetError as e:
            os.write(writer, f"{e.message}|{e.hint}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    expected = "may not be inspected by this user|run as the user that owns the process, or as root"
    assert f"process {os.getpid()} {expected}" == said


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; import dprobes.target.processmaps; "
        "print([m for m in ('elftools', 'iced_x86', 'dataclasses', 'pathlib', 'inspect') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "[]" == done.stdout.strip()
