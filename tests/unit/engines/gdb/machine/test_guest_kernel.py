"""What a kernel in a machine's memory says of itself, by memory that is written down here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.gdb.machine.guest_kernel import GuestKernel
from dprobes.target.kernel import kernel_files
from dprobes.target.kernel.kernel_symbols import Kallsyms
from unit.target.conftest import Toolbox

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.engines.gdb.machine.machine_target import GuestMemory
    from dprobes.target.elf.elf_file import ElfFile

START, MOVED = 0xFFFF_FFFF_8100_0000, 0x1200_0000
BUILD = "0123456789abcdef"
NOTES = b"\4\0\0\0\10\0\0\0\3\0\0\0GNU\0" + bytes.fromhex(BUILD)
TWICE = "static __attribute__((noipa)) int twice(int n) { return n; }\nint NAME(int n) { return twice(n); }\n"


def guest_kernel(listing: str, notes: bytes) -> GuestKernel:
    """Return a kernel with a list of symbols and notes, as if it had been found in a machine."""
    place = START + MOVED - 0x1000
    lines = f"{place:016x} R __start_notes\n{place + len(notes):016x} R __stop_notes\n{listing}"
    kernel = GuestKernel.__new__(GuestKernel)
    kernel.__dict__ |= {"symbols": Kallsyms(lines.encode()), "_core": Kallsyms(lines.encode()), "_modules": {}}
    memory = SimpleNamespace(read=lambda address, size: notes[address - place :][:size])
    kernel.guest_memory = cast("GuestMemory", memory)
    return kernel


@pytest.fixture
def debug_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the file of the build into a debug package; return the symbols of the kernel that it is of, moved."""
    tools = Toolbox(tmp_path)
    sources = {
        "one.c": "int _text(void) { return 0; }\n" + TWICE.replace("NAME", "a"),
        "two.c": TWICE.replace("NAME", "b"),
    }
    options = (
        "-nostdlib",
        "-static",
        "-no-pie",
        "-mcmodel=kernel",
        "-fno-pic",
        "-fno-toplevel-reorder",
        "-Wl,-e,_text",
    )
    built = tools.build("vmlinux", sources, *options, f"-Wl,-Ttext={START:#x}", f"-Wl,--build-id=0x{BUILD}")
    place = tmp_path / "debug" / ".build-id" / BUILD[:2] / f"{BUILD[2:]}.debug"
    place.parent.mkdir(parents=True)
    built.rename(place)
    of_build = kernel_files.kernel_of_build

    def found(build_id: str) -> ElfFile | None:
        return of_build(build_id, tmp_path / "debug")

    monkeypatch.setattr(kernel_files, "kernel_of_build", found)
    rows = (line.split() for line in tools.run("nm", "-n", place).splitlines())
    return [f"{int(address, 16) + MOVED:016x} {letter} {name}\n" for address, letter, name in rows if letter in "tT"]


def test_source_files_are_those_of_the_build_that_the_notes_name(debug_file: list[str]) -> None:
    places = [int(line[:16], 16) for line in debug_file if line.endswith(" twice\n")]
    listing = "".join(debug_file)
    wanted = dict(zip(places, ("one.c", "two.c"), strict=True))
    assert guest_kernel(listing, NOTES).source_files("twice", "") == wanted
    assert guest_kernel(listing, NOTES).source_files("twice", "ext4") == {}
    assert guest_kernel(listing, NOTES[:-1] + b"\0").source_files("twice", "") == {}
    assert guest_kernel(listing, b"").source_files("twice", "") == {}
    assert guest_kernel(listing, NOTES * 4096).source_files("twice", "") == {}
