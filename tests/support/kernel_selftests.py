"""
The kernel's selftests for x86, built as their own Makefile does: programs that look closely at what happens to them.

Their sources are not ours and not in this repository: ``tools/setup.sh selftests`` unpacks them from Debian's package.
What a run prints is compared without addresses and process ids; where it differs from run to run, with several runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from integration.support import I386_COMPILER, I386_FLAGS, TIMEOUT, symbols_of
from support.instruction_places import all_places

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.instruction_places import Place

__all__ = ["SELFTESTS", "Outcome", "Selftest", "UnavailableError", "outcome_of", "sources"]

_BOTH = (
    "single_step_syscall", "sysret_ss_attrs", "syscall_nt", "test_mremap_vdso", "check_initial_reg_state", "sigreturn",
    "iopl", "ioperm", "test_vsyscall", "mov_ss_trap", "sigtrap_loop", "syscall_arg_fault", "fsgsbase_restore",
    "sigaltstack", "ldt_gdt", "ptrace_syscall",
)  # fmt: skip
_ONLY_32 = (
    "entry_from_vm86", "test_syscall_vdso", "unwind_vdso", "test_FCMOV", "test_FCOMI", "test_FISTTP", "vdso_restorer",
)  # fmt: skip
_ONLY_64 = ("fsgsbase", "sysret_rip", "syscall_numbering", "corrupt_xstate_header", "amx")

_FLAGS = ("-O2", "-g", "-std=gnu99", "-pthread", "-no-pie", "-w", "-DCAN_BUILD_32", "-DCAN_BUILD_64")
_MORE = {
    "sysret_ss_attrs_64": ("thunks.S",),
    "ptrace_syscall_32": ("raw_syscall_helper_32.S",),
    "test_syscall_vdso_32": ("thunks_32.S",),
    "check_initial_reg_state_32": ("-Wl,-ereal_start", "-static"),
    "check_initial_reg_state_64": ("-Wl,-ereal_start", "-static"),
}
"""Further source files with which the Makefile builds these."""

_OWN = {"check_initial_reg_state": ("real_start", "main")}
"""The functions of the statically linked selftests that are not the C library's."""

_OTHER_MODE = ("get_regs64", "poison_regs64", "call64_from_32", "call32_from_64")
"""Functions with code for the other word size, according to the sources."""

_NUMBER = re.compile(r"\b(?:0x)+[0-9a-f]+\b|\b[0-9a-f]{6,}\b|(?<=NR = )\d+|\d+\.\d+|(?<=CPU )\d+", re.IGNORECASE)


class UnavailableError(Exception):
    """There are no selftests on this machine; the message is the reason of a skip."""


class Outcome(NamedTuple):
    """The exit status of a run and its output lines, without addresses, process ids and other variable parts."""

    status: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Selftest:
    """A selftest of the kernel, compiled with words of ``word_size`` bytes."""

    source: str
    word_size: int

    @property
    def name(self) -> str:
        return f"{self.source}_{8 * self.word_size}"

    def build(self, directory: Path) -> Path:
        compiler = "gcc" if self.word_size == 8 else I386_COMPILER
        if shutil.which(compiler) is None:
            raise UnavailableError(f"{compiler} is not installed")
        where, output = sources() / "tools/testing/selftests/x86", directory / self.name
        more = [str(where / word) if word.endswith(".S") else word for word in _MORE.get(self.name, ())]
        if self.word_size == 4 and "-static" not in more:
            more += I386_FLAGS
        command = [compiler, *_FLAGS, "-o", str(output), str(where / f"{self.source}.c"), *more, "-lrt", "-ldl", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert done.returncode == 0, done.stderr
        return output

    def places(self, program: Path) -> list[Place]:
        """Return the instructions of the program's own code except nops, most of which fill pages."""
        symbols = symbols_of(program)
        later = sorted({*symbols.values(), 1 << 64})

        def ranges(names: Iterable[str]) -> list[range]:
            return [range(symbols[n], later[bisect_right(later, symbols[n])]) for n in names if n in symbols]

        found = all_places(program)
        if self.source in _OWN:
            own = ranges(_OWN[self.source])
            return [place for place in found if any(place.address in function for function in own)]
        other = ranges(_OTHER_MODE)
        return [place for place in found if not any(place.address in function for function in other)]


SELFTESTS = tuple(
    Selftest(source, word_size)
    for word_size, names in ((8, (*_BOTH, *_ONLY_64)), (4, (*_BOTH, *_ONLY_32)))
    for source in names
)


def sources() -> Path:
    """Return the directory with the selftests in the kernel's sources; raise ``UnavailableError`` without it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "dprobes" / "selftests"
    if not (directory / "sources").is_dir():
        reason = directory / "reason"
        said = reason.read_text().strip() if reason.exists() else "'tools/setup.sh selftests' fetches them"
        raise UnavailableError(f"the sources of the kernel's selftests are not here: {said}")
    return directory / "sources"


def outcome_of(status: int, text: str) -> Outcome:
    lines = (_NUMBER.sub("#", line).rstrip() for line in text.splitlines())
    return Outcome(status, tuple(line for line in lines if line))
