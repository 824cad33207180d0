"""Places in the kernel of a guest that does not show its memory, but has the files of its kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import libraries_of

if TYPE_CHECKING:
    import subprocess

    from guests.guest import Guest

KERNEL = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
MODULE = "name = dummy\nmodtype = kmod\nmajor = 7\n"
INSIDE = {"6.1": 5, "6.12": 9}
"""Where the first instruction of a system call's function starts that is not for ftrace."""


LINKED = 0xFFFFFFFF81000000
"""Where the text of a kernel for x86-64 is linked for."""
MOVED_LEAST = 0x200000
"""By how much it is moved at least (CONFIG_PHYSICAL_ALIGN)."""


def close_memory(guest: Guest) -> None:
    """Let /proc/kcore be empty, as it is closed under lockdown."""
    guest.run("mount --bind /dev/null /proc/kcore")


def run(guest: Guest, program: str, header: str = KERNEL, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    guest.put("/tmp/program.rpn", header + program)
    command = ("--", "/bin/sh", "-c", "ls /proc/$PPID >/dev/null; :")
    return guest.dprobes("run", "/tmp/program.rpn", "--format", "csv", *command, check=check)


def put_image(guest: Guest) -> str:
    """Put the kernel's image where distributions have it, and what unpacks it; return the image's path."""
    tools = [Path("/usr/bin/lz4"), Path("/usr/bin/zstd")]
    for file in (*tools, *(Path(library) for library in libraries_of(tools))):
        if guest.run(f"test -e {file}", check=False).returncode != 0:
            guest.put(str(file), file)
    return guest.put_kernel()


def opcode_at(guest: Guest, place: str) -> str:
    shown = guest.dprobes("locate", place).stdout
    (opcode,) = (line for line in shown.splitlines() if line.startswith("opcode = "))
    return opcode


def test_the_image_shows_what_memory_does_not(guest: Guest) -> None:
    inside = INSIDE[guest.machine.kernel]
    opcode = opcode_at(guest, f"kernel:vfs_read+{inside}")
    close_memory(guest)
    path = put_image(guest)
    by_file = guest.dprobes("locate", f"kernel:vfs_read+{inside}").stdout
    assert f"the instructions are from {path}\n" in by_file
    assert opcode in by_file.splitlines()
    definition = f"offset = vfs_read + {inside}\n{opcode}\nminor = 1\nexit\n"
    definition += f"offset = vfs_write + {inside}\nopcode = 0xf4\nminor = 2\nexit\n"
    definition += "offset = vfs_open\nopcode = 0xf4\nminor = 3\nexit\n"
    done = run(guest, definition)
    assert len(done.stdout.splitlines()) > 2
    assert done.stderr.count("MISMATCH: opcode") == 1
    assert done.stderr.count("the opcode is not verified: the kernel patches such code when it runs") == 1


@pytest.mark.machine(kaslr=True)
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_the_image_of_a_kernel_that_was_moved(guest: Guest) -> None:
    opcode = opcode_at(guest, "kernel:vfs_read+9")
    text, function = (
        int(guest.run(f"grep ' {name}$' /proc/kallsyms").stdout.split()[0], 16) for name in ("_text", "do_one_initcall")
    )
    assert function - text < MOVED_LEAST, "nothing of the kernel may be where the function was linked for"
    definition = f"address = {function - text + LINKED:#x}\nminor = 1\nexit\n"
    hint = f"this kernel runs {text - LINKED:#x} bytes above where it was linked for: write 'offset = do_one_initcall'"
    assert hint in run(guest, definition, check=False).stderr
    close_memory(guest)
    put_image(guest)
    assert opcode_at(guest, "kernel:vfs_read+9") == opcode
    assert hint in run(guest, definition, check=False).stderr


def test_the_file_of_a_module_shows_what_memory_does_not(guest: Guest) -> None:
    guest.load_module("dummy")
    inside = INSIDE[guest.machine.kernel]
    opcode = opcode_at(guest, f"dummy:dummy_xmit+{inside}")
    close_memory(guest)
    by_file = guest.dprobes("locate", f"dummy:dummy_xmit+{inside}").stdout
    assert opcode in by_file.splitlines()
    assert "/dummy.ko" in by_file
    program = f"offset = dummy_xmit + {inside}\nopcode = 0xf4\nminor = 1\nexit\n"
    assert "MISMATCH" in run(guest, program, MODULE, check=False).stderr


def test_without_files_either_the_kernel_checks_places(guest: Guest) -> None:
    close_memory(guest)
    inside = INSIDE[guest.machine.kernel]
    done = run(guest, f"offset = vfs_read + {inside}\nopcode = 0x41\nminor = 1\nexit\n")
    files = f"there is no file of the running kernel (/boot/vmlinuz-{guest.image.release})"
    assert f"the opcode is not verified: /proc/kcore is not a core file, and {files}\n" in done.stderr
    assert len(done.stdout.splitlines()) > 2
    refused = run(guest, f"offset = vfs_read + {inside + 1}\nminor = 1\nexit\n", check=False)
    assert refused.returncode != 0
    assert "is inside an instruction" in refused.stderr
