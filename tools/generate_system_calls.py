"""
Write ``target/kernel/systemcalls.txt``: the system calls of x86-64 and i386, with the parameters of each.

Numbers come from the C library's copy of the kernel's headers, parameters from the tracepoints of the running kernel
(``events/syscalls``). Run it as root on a recent kernel when either has new calls.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dprobes.target.kernel.tracefs import open_trace_files, parse_format

HEADERS = Path("/usr/include/x86_64-linux-gnu/asm")
OUTPUT = Path(__file__).parent.parent / "src/dprobes/target/kernel/systemcalls.txt"

KERNEL_NAMES = {
    "stat": "newstat", "fstat": "newfstat", "lstat": "newlstat", "newfstatat": "newfstatat", "uname": "newuname",
    "sendfile": "sendfile64", "umount2": "umount", "_newselect": "select", "_llseek": "llseek",
    "ugetrlimit": "getrlimit",
}  # fmt: skip
"""The kernel's names of system calls that have another name for programs."""

BUILT_WITHOUT = {
    "init_module": "void * umod, unsigned long len, const char * uargs",
    "finit_module": "int fd, const char * uargs, int flags",
    "delete_module": "const char * name_user, unsigned int flags",
    "kexec_load": "unsigned long entry, unsigned long nr_segments, struct kexec_segment * segments, "
    "unsigned long flags",
    "kexec_file_load": "int kernel_fd, int initrd_fd, unsigned long cmdline_len, const char * cmdline_ptr, "
    "unsigned long flags",
}
"""The parameters of system calls that a kernel may be built without (kernel/module/main.c, kernel/kexec.c)."""

NEWER = {
    "cachestat": 451, "fchmodat2": 452, "map_shadow_stack": 453, "futex_wake": 454, "futex_wait": 455,
    "futex_requeue": 456, "statmount": 457, "listmount": 458, "lsm_get_self_attr": 459, "lsm_set_self_attr": 460,
    "lsm_list_modules": 461, "mseal": 462, "setxattrat": 463, "getxattrat": 464, "listxattrat": 465,
    "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468, "file_setattr": 469,
}  # fmt: skip
"""System calls that Debian 12's headers lack, with their number on both (arch/x86/entry/syscalls/syscall_*.tbl)."""

NEWER_WIDE = {"uretprobe": 335, "uprobe": 336}
"""System calls of x86-64 alone that these headers lack."""

_NUMBER = "__syscall_nr"

HEADING = """\
# The system calls of Linux: name, number in x86-64 and in i386 (- where it has none), parameters.
# Written by tools/generate_system_calls.py.
"""


def numbers_of(header: str) -> dict[str, int]:
    """Return the numbers of system calls in one header of the C library, by name."""
    text = (HEADERS / header).read_text()
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", text, re.MULTILINE)}


def main() -> int:
    """Write the file."""
    wide = NEWER | NEWER_WIDE | numbers_of("unistd_64.h")
    narrow = NEWER | numbers_of("unistd_32.h")
    lines = []
    with open_trace_files() as files:
        known = set(files.names("events/syscalls"))
        for name in sorted({*wide, *narrow}, key=lambda name: (wide.get(name, 1 << 16), narrow.get(name, 0))):
            event = f"sys_enter_{KERNEL_NAMES.get(name, name)}"
            parameters = []
            # The calls of the same name differ in i386 now and then; the parameters are those of x86-64.
            if event in known and name in wide:
                fields = parse_format(files.read(f"events/syscalls/{event}/format")).fields
                parameters = [f"{each.type_name} {each.name}" for each in fields.values() if each.name != _NUMBER]
            listed = ", ".join(parameters) or BUILT_WITHOUT.get(name, "")
            columns = [name, *(str(table.get(name, "-")) for table in (wide, narrow)), listed]
            lines.append(" ".join(columns).rstrip())
    OUTPUT.write_text(HEADING + "".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
