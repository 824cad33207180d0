"""Where the probepoints of a program are: in a module, in every process, or in the whole system."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.resolve.probepoints import EveryProcess, Space, space_of
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "*"\nsampler = 1hz\nexit\n', Space.SYSTEM),
        ("name = m\nsampler = 1hz\nexit\n", Space.MODULE),
        ('name = "*m"\nsampler = 1hz\nexit\n', Space.MODULE),
        ("name = m\naddress = 0x1000\nwatchpoint = w\nexit\n", Space.MODULE),
        ("name = vmlinux\nmodtype = kernel\naddress = 0x1000\nwatchpoint = w\nexit\n", Space.PROCESSES),
        ("name = vmlinux\nmodtype = kernel\naddress = jiffies\nwatchpoint = w\nexit\n", Space.KERNEL),
        ("name = vmlinux\nmodtype = kernel\noffset = do_exit\nexit\n", Space.KERNEL),
        ("name = ext4\nmodtype = kmod\noffset = ext4_sync_fs\nexit\n", Space.KERNEL),
    ],
)
def test_name_type_and_places_of_a_program_say_its_space(text: str, expected: Space) -> None:
    assert space_of(parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())) is expected


def test_symbols_have_no_address_in_every_process() -> None:
    with pytest.raises(TargetError, match="'jiffies' is not an address of every program"):
        EveryProcess(architecture("x86_64")).address_of("jiffies")
