"""The kernels of guests have what ``guests.features`` says, and count each call with it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from guests.features import FEATURES, lack_of
from guests.images import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from guests.guest import Guest

pytestmark = [pytest.mark.each_kernel, pytest.mark.shared_guest]

CALLS = 1000
FUNCTION = "security_task_getsid"
"""Called by getsid(2) alone, once, from another file: no compiler inlines it."""

_TRACE_FENTRY = 24
_TRACE_KPROBE_MULTI = 42


def runs_of(attach: Callable[[], tuple[int, int]]) -> int:
    """Return how often a program ran that is attached while a system call is made."""
    from dprobes.platform.linux.bpf_calls import enable_statistics, program_info

    statistics = enable_statistics()
    program, link = attach()
    for _ in range(CALLS):
        os.getsid(os.getpid())
    runs = program_info(program).runs
    for descriptor in (link, program, statistics):
        os.close(descriptor)
    return runs


def nothing(**options: int) -> int:
    """Load a program that does nothing."""
    from dprobes.bpf.bpf_assembler import Assembler
    from dprobes.bpf.bpf_instructions import Register
    from dprobes.engines.ebpf.kernel.bpf_objects import load
    from dprobes.platform.linux.bpf_calls import ProgramType

    asm = Assembler()
    asm.mov(Register.R0, 0)
    asm.exit()
    kind = ProgramType(options.pop("kind", ProgramType.KPROBE))
    return load(asm.assemble(), {}, kind, name="nothing", **options)  # type: ignore[arg-type]


def attach_by_unit() -> tuple[int, int]:
    from dprobes.platform.linux import perf_calls
    from dprobes.platform.linux.bpf_calls import link_perf_event

    unit = perf_calls.ProbeUnit(int(Path("/sys/bus/event_source/devices/kprobe/type").read_text()), 0)
    program = nothing()
    event = perf_calls.open_uprobe(unit, FUNCTION, 0)
    link = link_perf_event(program, event)
    perf_calls.enable(event)
    return program, link


def attach_to_many() -> tuple[int, int]:
    from dprobes.platform.linux import bpf_calls

    program = nothing(attach_type=_TRACE_KPROBE_MULTI)
    name = ctypes.create_string_buffer(FUNCTION.encode())
    names = (ctypes.c_uint64 * 1)(ctypes.addressof(name))
    # include/uapi/linux/bpf.h, link_create: u32 prog_fd, target_fd, attach_type, flags;
    # kprobe_multi: u32 flags, cnt; u64 syms, addrs, cookies
    layout = struct.Struct("=IIIIIIQQQ")
    values = (program, 0, _TRACE_KPROBE_MULTI, 0, 0, 1, ctypes.addressof(names), 0, 0)
    return program, bpf_calls.call(bpf_calls.Command.LINK_CREATE, bpf_calls.attributes_of(layout, *values))


def attach_to_entry() -> tuple[int, int]:
    from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes
    from dprobes.platform.linux.bpf_calls import ProgramType, open_raw_tracepoint
    from dprobes.target.btf import Kind

    with KernelTypes() as types:
        number = types.find(Kind.FUNC, FUNCTION)
    program = nothing(kind=ProgramType.TRACING, attach_type=_TRACE_FENTRY, attach_btf_id=number)
    return program, open_raw_tracepoint(program)


ATTACH = {"kprobe_pmu": attach_by_unit, "kprobe_multi": attach_to_many, "fentry": attach_to_entry}


def runs_by(feature: str) -> int:
    return runs_of(ATTACH[feature])


def is_refused(feature: str) -> bool:
    with contextlib.suppress(OSError):
        runs_by(feature)
        return False
    return True


@pytest.mark.parametrize("feature", [pytest.param(name, marks=pytest.mark.requires_feature(name)) for name in ATTACH])
def test_each_call_of_a_kernel_function_is_counted(guest: Guest, feature: str) -> None:
    assert guest.call(runs_by, feature) == CALLS


def test_the_kernel_lacks_what_the_table_says(guest: Guest) -> None:
    """What it has is needed by the other tests."""
    lacking = [feature for feature in ATTACH if lack_of(feature, guest.image) is not None]
    assert lacking == {"6.1": ["kprobe_multi"], "6.12": []}[guest.machine.kernel]
    assert all(guest.call(is_refused, feature) for feature in lacking)


def test_the_kernel_describes_its_types(guest: Guest) -> None:
    assert lack_of("btf", guest.image) is None
    assert guest.run("head -c 2 /sys/kernel/btf/vmlinux | od -An -tx1").stdout == " 9f eb\n"  # BTF_MAGIC


def test_kprobes_are_placed_at_instructions_only(guest: Guest) -> None:
    assert guest.call(errors_inside, "vfs_read", 16) == {0: 0, 1: errno.EILSEQ}


def errors_inside(function: str, end: int) -> dict[int, int]:
    """Return the error numbers of kprobes at the first byte of a function and after it."""
    from dprobes.platform.linux import perf_calls

    unit = perf_calls.ProbeUnit(int(Path("/sys/bus/event_source/devices/kprobe/type").read_text()), 0)
    found = {}
    for offset in (0, 1):
        try:
            os.close(perf_calls.open_uprobe(unit, function, offset))
            found[offset] = 0
        except OSError as error:
            found[offset] = error.errno or -1
    return found


def test_why_a_kernel_need_not_have_something_cites_the_commit(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot" / "vmlinuz-6.1.0-9").touch()
    (tmp_path / "boot" / "config-6.1.0-9").write_text("# CONFIG_FPROBE is not set\nCONFIG_KPROBE_EVENTS=y\n")
    image = Image("6.1", tmp_path)
    assert lack_of("uprobe_multi", image) == (
        'uprobe_multi came with Linux 6.6, commit 89ae89f53d20 ("bpf: Add multi uprobe link")'
    )
    assert lack_of("kprobe_multi", image) == "kprobe_multi needs CONFIG_FPROBE, and 6.1.0-9 was built without"
    assert lack_of("kprobe_pmu", image) is None
    assert {feature for feature in FEATURES if lack_of(feature, Image("6.12", tmp_path)) is None} >= {"may_goto"}


SKIPPING = """
import pytest

@pytest.fixture
def missing():
    pytest.skip("no guest: qemu is not installed")

def test_without_guest(missing):
    pass

def test_that_decides():
    pytest.skip("this kernel has no kprobe_multi")
"""


def test_a_test_in_a_guest_that_skips_itself_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_skipping.py"
    file.write_text(SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"DPROBES_REQUIRE": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kernel.conftest", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "a test in a guest is skipped by requires_feature only" in done.stdout
    assert re.search(r"1 failed, 1 skipped", done.stdout.splitlines()[-1])
