"""Names by the mappings of processes: where an address is, and since when."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.target.module_lookup import find_module
from dprobes.target.probed_module import Module
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import executable_mappings, read_maps
from dprobes.target.process_names import PROCESSES_MAX, ProcessNames

if TYPE_CHECKING:
    from collections.abc import Iterator

SECOND = 1_000_000_000


def address_of(function: str) -> int:
    address = ctypes.cast(getattr(ctypes.CDLL("libc.so.6"), function), ctypes.c_void_p).value
    assert address is not None
    return address


def test_an_address_is_located_with_module_build_and_function() -> None:
    process = ProcessNames().process(os.getpid(), "python3", None)
    assert process is not None
    address = address_of("getpid")
    located = process.located(address + 1)
    path = find_module("libc.so.6")
    assert path is not None
    module = Module.load(path)
    assert located is not None
    assert located.function is not None
    assert located.function.name == "getpid"
    assert (located.pid, located.mapped.module, located.mapped.build) == (os.getpid(), "libc.so.6", module.elf.build_id)
    assert located.mapped.start <= address < located.mapped.end
    assert address - located.mapped.start + located.mapped.offset == located.function.start
    assert located.since < time.monotonic_ns()
    assert process.located(8) is None


@pytest.fixture
def executing() -> Iterator[subprocess.Popen[str]]:
    """Give a process that says "first", then at our word executes another program, which says "second"."""
    second = "import sys\nprint('second', flush=True)\nsys.stdin.read()"
    first = (
        "import os, sys\nprint('first', flush=True)\nsys.stdin.readline()\n"
        f"os.execv({sys.executable!r}, ['python', '-c', {second!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", first], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "first\n"
        yield child
        assert child.stdin is not None
        child.stdin.close()


def code_of(pid: int) -> int:
    """Return an address of the C library in a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    line = next(line for line in lines if "r-xp" in line and "libc.so" in line)
    return int(line.partition("-")[0], 16)


def test_what_a_process_maps_holds_from_its_start_or_its_last_exec_on(executing: subprocess.Popen[str]) -> None:
    names = ProcessNames()
    pid = executing.pid
    before = time.monotonic_ns()
    first, thread = names.process(pid, "python3", before), names.process(pid, "a thread", before)
    assert first is not None
    assert thread is first
    old = first.located(code_of(pid))
    assert old is not None
    assert before - 10 * SECOND < old.since <= before
    assert executing.stdin is not None
    assert executing.stdout is not None
    executing.stdin.write("\n")
    executing.stdin.flush()
    assert executing.stdout.readline() == "second\n"
    now = time.monotonic_ns()
    second = names.process(pid, "another", now)
    assert second is not None
    assert second is not first
    new = second.located(code_of(pid))
    assert new is not None
    assert new.since == now
    assert new.mapped.start != old.mapped.start
    assert first.located(old.mapped.start) == old


def test_processes_that_are_gone_and_kernel_threads_are_none() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    names = ProcessNames()
    assert names.process(child.pid, "true", None) is None
    assert names.process(2, "kthreadd", None) is None


def test_no_more_processes_are_kept_than_there_may_be() -> None:
    names = ProcessNames()
    first = names.process(os.getpid(), "0", None)
    for number in range(1, PROCESSES_MAX + 1):
        assert names.process(os.getpid(), str(number), None) is first
    assert len(names._processes) == PROCESSES_MAX


def test_a_process_that_has_ended_is_named_by_what_it_had_mapped() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    images = ProcessImages()
    images.began(child.pid, 100, executable_mappings(read_maps(os.getpid())))
    names = ProcessNames(images)
    process = names.process(child.pid, "true", 150)
    assert process is not None
    assert names.process(child.pid, "a thread", 160) is process
    located = process.located(address_of("getpid"))
    assert located is not None
    assert located.function is not None
    assert (located.pid, located.since, located.function.name) == (child.pid, 100, "getpid")
    assert process.located(8) is None
    images.began(child.pid, 200)
    assert names.process(child.pid, "true", 199) is process
    later = names.process(child.pid, "true", 200)
    assert later is not None
    assert later.located(address_of("getpid")) is None


def test_what_runs_is_asked_for_what_is_no_code() -> None:
    images = ProcessImages()
    images.began(os.getpid(), 0, executable_mappings(read_maps(os.getpid())))
    process = ProcessNames(images).process(os.getpid(), "python3", None)
    assert process is not None
    data = Path("/proc/self/maps").read_text().splitlines()
    start = next(int(line.partition("-")[0], 16) for line in data if " r--p 00000000" in line and "libc.so" in line)
    assert process.maps_file_at(start)


def test_code_of_the_kernel_in_processes_has_names() -> None:
    process = ProcessNames().process(os.getpid(), "python3", None)
    assert process is not None
    (line,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[vdso]"))
    start, end = (int(text, 16) for text in line.split()[0].split("-"))
    names = {
        found.function.name: found.mapped.module
        for address in range(start, end, 16)
        if (found := process.located(address)) is not None and found.function is not None
    }
    assert names["clock_gettime"] == "[vdso]"


def test_what_a_compiler_has_made_is_named_by_its_list() -> None:
    script = (
        "import ctypes, mmap, os, sys\n"
        "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
        "area = mmap.mmap(-1, 4096, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(area))\n"
        "open(f'/tmp/perf-{os.getpid()}.map', 'w').write(f'{address + 16:x} 20 py::made\\n')\n"
        "print(address, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        process = ProcessNames().process(child.pid, "python", None)
        assert process is not None
        located = process.located(address + 18)
        assert process.located(address) is None
        Path(f"/tmp/perf-{child.pid}.map").unlink()
        child.communicate()
    assert located is not None
    assert located.name_of(address + 18).text == "py::made+0x2 [JIT]"


def test_names_of_cpp_are_those_that_people_write() -> None:
    library = ctypes.CDLL("libstdc++.so.6")
    address = ctypes.cast(library._ZNSo5flushEv, ctypes.c_void_p).value
    assert address is not None
    process = ProcessNames().process(os.getpid(), "python3", None)
    assert process is not None
    located = process.located(address)
    assert located is not None
    assert located.name_of(address).text == "std::ostream::flush() [libstdc++.so.6]"
