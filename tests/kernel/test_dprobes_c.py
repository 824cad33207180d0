"""DProbes C in kernels that have kprobes: functions, their returns, memory, tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guests.guest import Guest

READ = "dd if=/proc/version of=/dev/null bs=1 count=7 status=none"


def test_functions_of_the_kernel(guest: Guest) -> None:
    text = """
    kernel:vfs_read(struct file *file, buf, size_t size) when (comm == "dd" && size == 1) {
        @reads = count();
        @by[func, size] = sum(size);
        if (@reads == 3) printf("third read of %d by %s", size, comm);
    }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", *READ.split())
    lines = done.stdout.splitlines()
    assert "@reads: 7" in lines
    assert next(line for line in lines if "third" in line).endswith("third read of 1 by dd")
    assert next(line for line in lines if line.startswith("@by[")).endswith(", 1]: 7")


def test_returns_know_their_entry(guest: Guest) -> None:
    text = """
    return kernel:vfs_read(file, buf, size) when (comm == "dd" && size == 1) {
        @got[retval] = count();
        @ns = max(elapsed);
    }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", *READ.split())
    lines = done.stdout.splitlines()
    assert "@got[1]: 7" in lines
    (slowest,) = [line for line in lines if line.startswith("@ns: ")]
    assert slowest != "@ns: 0"
