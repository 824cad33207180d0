"""Names of addresses: right ones, or none."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.formatters.address_names import AddressSymboliser
from dprobes.record.log_record import LogRecord
from dprobes.record.record_origin import Place, RecordSource
from dprobes.target.elf.elf_file import module_identity
from dprobes.target.module_lookup import find_module
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBC = Place("libc.so.6", "getpid")
BASE = 0x7F12_3456_7000


def address_of(function: str) -> int:
    """Return where a function of the C library is in this process."""
    address = ctypes.cast(getattr(ctypes.CDLL("libc.so.6"), function), ctypes.c_void_p).value
    assert address is not None
    return address


@pytest.fixture(scope="module")
def libc() -> Module:
    path = find_module("libc.so.6")
    assert path is not None
    return Module.load(path)


def here() -> LogRecord:
    """Return a record of this process, made now."""
    return LogRecord(pid=os.getpid(), ip=address_of("getpid"), time=time.monotonic_ns())


# Processes that are there


def test_a_process_that_runs_says_what_it_maps() -> None:
    symboliser = AddressSymboliser(None, live=True)
    assert symboliser.name_of(address_of("getppid"), here(), LIBC) == "getppid [libc.so.6]"
    assert symboliser.name_of(address_of("getppid") + 3, here(), LIBC) == "getppid+0x3 [libc.so.6]"
    assert symboliser.name_of(address_of("getppid") + 3, here(), None) == "getppid+0x3 [libc.so.6]"


def test_memory_that_shows_no_file_has_no_name() -> None:
    symboliser = AddressSymboliser(None, live=True)
    assert symboliser.name_of(ctypes.addressof(ctypes.create_string_buffer(8)), here(), LIBC) is None
    assert symboliser.name_of(0, here(), LIBC) is None
    assert symboliser.name_of(2**64 - 1, here(), LIBC) is None


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[int]:
    """Map a file into this process, and give the address."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as area:
        view = (ctypes.c_char * len(area)).from_buffer(area)
        try:
            yield ctypes.addressof(view)
        finally:
            del view


def test_what_is_mapped_later_is_found_and_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    symboliser = AddressSymboliser(None, live=True)
    assert symboliser.name_of(address_of("getppid"), here(), LIBC) is not None
    path = tmp_path / "some program"
    shutil.copy(os.path.realpath("/bin/true"), path)
    with mapped(path) as address:
        assert symboliser.name_of(address + 0x10, here(), LIBC) == "some program+0x10"
        path.unlink()
        another = AddressSymboliser(None, live=True)
        assert another.name_of(address + 0x20, here(), LIBC) == "some program+0x20"


def test_records_of_a_process_that_has_ended_are_named_by_what_was_read_before() -> None:
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) as child:
        start = None
        while start is None:  # until it has begun its program
            lines = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
            code = [line.split() for line in lines if "/sleep" in line and "r-xp" in line]
            start = int(code[0][0].partition("-")[0], 16) if code else None
        record = LogRecord(pid=child.pid, ip=start, time=time.monotonic_ns())
        symboliser = AddressSymboliser(None, live=True)
        place = Place("sleep", "0x1000")
        name = symboliser.name_of(start + 8, record, place)
        assert name is not None
        assert "sleep" in name
        child.kill()
        child.wait()
    assert symboliser.name_of(start + 8, record, place) == name
    assert symboliser.name_of(start + 9, record, place) is not None
    assert AddressSymboliser(None, live=True).name_of(start + 8, record, place) is None


def test_another_process_with_its_number_is_not_asked() -> None:
    symboliser = AddressSymboliser(None, live=True)
    assert symboliser.name_of(address_of("getppid"), here()._replace(time=1), LIBC) is None
    assert symboliser.name_of(address_of("getppid"), here()._replace(ip=0x1234), LIBC) is None


def test_processes_of_another_time_or_machine_are_not_asked() -> None:
    assert AddressSymboliser(None, live=False).name_of(address_of("getppid"), here(), LIBC) is None
    record = here()._replace(pid=None)
    assert AddressSymboliser(None, live=True).name_of(address_of("getppid"), record, LIBC) is None


def test_a_sample_and_an_access_are_where_the_instruction_is_not_at_their_rate_or_variable() -> None:
    symboliser = AddressSymboliser(None, live=True)
    for place in (Place("*", "99hz", is_code=False), Place("libc.so.6", "environ", is_code=False)):
        record = here()
        assert record.ip is not None
        assert symboliser.name_of(record.ip, record, place) == "getpid [libc.so.6]"
        assert AddressSymboliser(None, live=False).name_of(record.ip, record, place) is None


# Processes that are not


def test_the_probepoint_itself_has_the_name_of_its_place() -> None:
    symboliser = AddressSymboliser(None, live=False)
    record = LogRecord(ip=0x1234)
    assert symboliser.name_of(0x1234, record, Place("app", "main+0x4")) == "main+0x4 [app]"
    assert symboliser.name_of(0x1234, record, Place("app", "main", "main", at_return=True)) is None
    assert symboliser.name_of(0x1235, record, Place("app", "main+0x4")) is None


def test_a_file_of_the_same_build_and_the_probepoint_give_the_addresses_of_its_module(libc: Module) -> None:
    source = RecordSource(1, "libc.so.6", "libc.so.6", build_ids=(module_identity(libc.elf),))
    symboliser = AddressSymboliser(source, live=False)
    malloc, free = libc.address_of("malloc"), libc.address_of("free")
    record = LogRecord(ip=BASE + malloc + 4)
    place = Place("libc.so.6", "malloc+0x4")
    assert symboliser.name_of(BASE + free + 1, record, place) == "free+0x1 [libc.so.6]"
    assert symboliser.name_of(BASE + libc.address_of("environ"), record, place) is None
    assert symboliser.name_of(BASE + 0x10, record, place) == "libc.so.6+0x10"
    assert symboliser.name_of(BASE - 8, record, place) is None
    another = LogRecord(ip=2 * BASE + malloc + 4)
    assert symboliser.name_of(2 * BASE + free, another, place) == "free [libc.so.6]"
    offset = libc.file_offset(malloc)
    assert symboliser.name_of(BASE + free, LogRecord(ip=BASE + malloc), Place("libc.so.6", hex(offset))) == (
        "free [libc.so.6]"
    )


def test_a_file_is_found_where_it_was_if_it_is_still_of_the_same_build(libc: Module, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    place, record = Place("nowhere.so", "malloc"), LogRecord(ip=BASE + libc.address_of("malloc"))
    os.mkfifo(tmp_path / "pipe")
    paths = (str(tmp_path / "gone"), str(tmp_path / "pipe"), "/dev/null", "a\0b", str(path))
    source = RecordSource(1, "nowhere.so", build_ids=(module_identity(libc.elf),), paths=paths)
    free = BASE + libc.address_of("free")
    shutil.copy(libc.path, path)
    assert AddressSymboliser(source, live=False).name_of(free, record, place) == "free [nowhere.so]"
    shutil.copy(os.path.realpath("/bin/true"), path)
    assert AddressSymboliser(source, live=False).name_of(free, record, place) is None


def test_without_certainty_there_is_no_name(libc: Module) -> None:
    right = (module_identity(libc.elf),)
    malloc, free = libc.address_of("malloc"), libc.address_of("free")
    record = LogRecord(ip=BASE + malloc)
    for builds, place, ip in (
        (("0" * 40,), Place("libc.so.6", "malloc"), BASE + malloc),
        ((), Place("libc.so.6", "malloc"), BASE + malloc),
        (right, Place("libc.so.6", "malloc"), BASE + malloc + 1),
        (right, Place("libc.so.6", "malloc", at_return=True), BASE + malloc),
        (right, Place("libc.so.6", "malloc", is_code=False), BASE + malloc),
        (right, Place("libc.so.6", "no_such_function"), BASE + malloc),
        (right, Place("no such module", "malloc"), BASE + malloc),
    ):
        symboliser = AddressSymboliser(RecordSource(1, "libc.so.6", build_ids=builds), live=False)
        assert symboliser.name_of(BASE + free, record._replace(ip=ip), place) is None
    symboliser = AddressSymboliser(RecordSource(1, "libc.so.6", build_ids=right), live=False)
    assert symboliser.name_of(BASE + free, record._replace(ip=None), Place("libc.so.6", "malloc")) is None
    assert symboliser.name_of(BASE + free, record, None) is None
