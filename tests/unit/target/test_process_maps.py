# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import TargetError
from dprobes.target import process_maps
from dprobes.target.process_maps import (
    PAGE_SIZE,
    Growth,
    Mapping,
    code_mappings,
    executable_mappings,
    free_ranges,
    mapping_at,
    mappings_of,
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


@pytest.mark.parametrize(
    ("limits", "stack"),
    [((8 << 20, 64 << 20), 16 << 30), ((20 << 30, 30 << 30), 30 << 30), ((-1, -1), None)],
    ids=["small", "large", "none"],
)
def test_how_far_a_process_may_grow_is_known(limits: tuple[int, int], stack: int | None) -> None:
    code = (
        "import os, resource\n"
        "from dprobes.target.process_maps import growth_of, parse_maps, read_maps\n"
        f"resource.setrlimit(resource.RLIMIT_STACK, {limits})\n"
        "heap = next(m for m in parse_maps(read_maps(os.getpid())) if m.path == '[heap]')\n"
        "found = growth_of(os.getpid())\n"
        "print(found.heap == heap.start, found.stack)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert f"True {stack}\n" == done.stdout


def test_what_is_free_is_neither_mapped_nor_where_memory_grows() -> None:
    maps = parse_maps(TEXT)[:5]
    heap = maps[3].start
    free = free_ranges(maps, Growth(heap, None), 0x1000, 1 << 47)
    limit = heap + (1 << 40)
    assert [
        (0x1000, maps[0].start), (maps[2].end, heap), (limit, maps[4].start), (maps[4].end, 1 << 47)
    ] == free  # fmt: skip


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


@pytest.fixture(params=["asked", "read"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel that can be asked about mappings, and one that cannot."""
    if request.param == "read":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

        monkeypatch.setattr(process_maps, "ioctl", refuse)
    return str(request.param)


@pytest.mark.usefixtures("kernel")
def test_the_kernel_is_asked_for_what_its_text_says(tmp_path: Path) -> None:
    path = tmp_path / "a\nfile (deleted) named\\so"
    path.write_bytes(bytes(3 * PAGE_SIZE))
    with path.open("rb") as file:
        parts = [
            mmap.mmap(file.fileno(), PAGE_SIZE, flags=mmap.MAP_PRIVATE, prot=protection, offset=PAGE_SIZE)
            for protection in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_EXEC, mmap.PROT_READ | mmap.PROT_WRITE)
        ]
        path.unlink()
        maps = mappings_of(os.getpid())
        code = [each for each in maps if each.executable and each.is_file]
        assert (code, True) == code_mappings(os.getpid())
        assert (code[:2], False) == code_mappings(os.getpid(), 2)
        assert str(path) in [each.path for each in code if each.deleted]
        for each in maps:
            # The heap may have grown since.
            if each.path not in ("[heap]", "") and each.path != "[vsyscall]":
                assert each == mapping_at(os.getpid(), each.start) == mapping_at(os.getpid(), each.end - 1)
        assert mapping_at(os.getpid(), 0) is None
        for part in parts:
            part.close()


@pytest.mark.usefixtures("kernel")
def test_what_maps_nothing_is_named_by_each(error_of: ErrorOf) -> None:
    said = ("process 2 has no memory: it is a kernel thread or has ended", None)
    if b"kthreadd" not in Path("/proc/2/comm").read_bytes():
        pytest.skip("there are no kernel threads in this namespace")
    assert said == error_of(lambda: mappings_of(2))
    assert said == error_of(lambda: code_mappings(2))
    assert said == error_of(lambda: mapping_at(2, 4096))


def test_only_lines_that_are_new_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse_line = process_maps._parse_line

    def parse(line: str) -> Mapping:
        parsed.append(line)
        return parse_line(line)

    monkeypatch.setattr(process_maps, "_parse_line", parse)
    process_maps._parsed.cache_clear()
    text = TEXT + "".join(
        f"{n << 13:x}-{(n << 13) + 4096:x} rw-p 00000000 00:00 0 \n" for n in range(1 << 34, (1 << 34) + 1000)
    )
    assert parse_maps(text) == [parse_line(line) for line in text.splitlines()]
    parsed.clear()
    changed = text.replace("rw-p", "r--p", 1)
    assert len(parse_maps(changed)) == len(text.splitlines())
    assert len(parsed) == 1
    parse_maps(changed + f"10000000-10001000 r-xp 00000000 00:00 1 /{'d' * PAGE_SIZE}\n" * 2)
    assert len(parsed) == 3  # long ones are not kept


def test_a_process_that_maps_too_much_is_refused(monkeypatch: pytest.MonkeyPatch, error_of: ErrorOf) -> None:
    monkeypatch.setattr(process_maps, "MAPS_MAX", PAGE_SIZE)
    pid = os.getpid()
    said = f"process {pid} maps more than can be looked at (0 MiB of text)"
    assert (said, None) == error_of(lambda: mappings_of(pid))


def test_an_offset_has_a_run_time_address() -> None:
    program = parse_maps(TEXT)[:3]
    assert 0x55D0C0A02010 == run_time_address(program, 0x2010)
    assert 0x55D0C0A04010 == run_time_address(program, 0x4010)  # in data too: code wins
    assert 0x55D0C0A00010 == run_time_address(program, 0x10)
    assert run_time_address(program, 0x5000) is None


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
        "import sys; import dprobes.target.process_maps; "
        "print([m for m in ('elftools', 'iced_x86', 'dataclasses', 'pathlib', 'inspect') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "[]" == done.stdout.strip()
