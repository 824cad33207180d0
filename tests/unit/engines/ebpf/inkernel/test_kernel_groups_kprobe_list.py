"""What the kernel's list says of kprobes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ebpf.inkernel.kernel_groups import KprobeList, parse_kprobes

if TYPE_CHECKING:
    from pathlib import Path

LIST = """\
ffffffff81234560  k  vfs_read+0x0    [FTRACE]
ffffffff81234600  r  vfs_write+0x4    [FTRACE]
ffffffff81234700  k  vfs_open+0x11    [OPTIMIZED]
ffffffff81234800  k  do_exit+0x7
ffffffff81234900  k  do_gone+0x7    [GONE]
ffffffff81234a00  k  do_nothing+0x7    [DISABLED]
ffffffffc0001000  k  work+0x0  dummy [FTRACE]
"""


def test_flags_become_words() -> None:
    assert parse_kprobes(LIST) == {
        0xFFFFFFFF81234560: "ftrace",
        0xFFFFFFFF81234600: "ftrace",
        0xFFFFFFFF81234700: "jump",
        0xFFFFFFFF81234800: "breakpoint",
        0xFFFFFFFFC0001000: "ftrace",
    }


def test_a_kprobe_behind_a_landing_pad_is_that_of_the_function(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(LIST)
    kprobes = KprobeList(path)
    assert kprobes.way(0xFFFFFFFF812345FC) is None, "nobody has looked"
    kprobes.look()
    assert kprobes.way(0xFFFFFFFF812345FC) == "ftrace"
    assert kprobes.way(0xFFFFFFFF81234700) == "jump"
    assert kprobes.way(0xFFFFFFFF81234900) is None


def test_what_was_found_last_stays(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text(LIST)
    kprobes = KprobeList(path)
    kprobes.look(is_last=True)
    path.write_text("")
    kprobes.look()
    kprobes.look(is_last=True)
    assert kprobes.way(0xFFFFFFFF81234800) == "breakpoint"


def test_without_debugfs_nothing_is_known(tmp_path: Path) -> None:
    kprobes = KprobeList(tmp_path / "list")
    kprobes.look()
    assert kprobes.way(0xFFFFFFFF81234800) is None
