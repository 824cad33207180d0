"""
Build a kernel for guests with CONFIG_BPF_KPROBE_OVERRIDE, which Debian's kernels lack.

``make guest-kernel`` runs it. It takes some minutes on two processors, and 2 GB below ``--directory`` meanwhile. The
source is Debian's package, downloaded with apt; flex, bison, bc and libelf-dev are needed. The kernel is stored with
the others of guests (``tests/guests/images.py``), which run the tests that need it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from guests.images import BUILT, SOURCE_PACKAGE, built_directory

__all__ = ["main"]

_ON = """
64BIT SMP MULTIUSER EXPERT HYPERVISOR_GUEST PVH PCI ACPI TTY SERIAL_8250 SERIAL_8250_CONSOLE PRINTK BLK_DEV_INITRD
BINFMT_ELF BINFMT_SCRIPT PROC_FS PROC_SYSCTL PROC_KCORE PROC_PAGE_MONITOR SYSFS TMPFS DEVTMPFS DEBUG_FS SHMEM
FUTEX EPOLL SIGNALFD TIMERFD EVENTFD POSIX_TIMERS FILE_LOCKING ADVISE_SYSCALLS MEMBARRIER RSEQ AIO SYSVIPC
CROSS_MEMORY_ATTACH COREDUMP ELF_CORE MMU BUG HIGH_RES_TIMERS NO_HZ_IDLE CGROUPS NAMESPACES SECURITY SECURITYFS
NET UNIX INET VIRTIO_MENU VIRTIO_PCI VIRTIO_CONSOLE X86_TSC MODULES MODULE_UNLOAD KALLSYMS KALLSYMS_ALL
BPF_SYSCALL BPF_JIT PERF_EVENTS KPROBES UPROBES FTRACE FUNCTION_TRACER FUNCTION_GRAPH_TRACER DYNAMIC_FTRACE
KPROBE_EVENTS UPROBE_EVENTS BPF_EVENTS FPROBE UNWINDER_FRAME_POINTER DEBUG_INFO_NONE
FUNCTION_ERROR_INJECTION BPF_KPROBE_OVERRIDE
"""
_OFF = "VT IA32_EMULATION X86_KERNEL_IBT CPU_MITIGATIONS IO_URING KEYS HW_RANDOM MODVERSIONS"
"""Options that are disabled, because the kernel would be larger or slower on an emulated processor."""


def main() -> None:
    """Download, unpack, configure and compile the kernel, and store it with the kernels of guests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where to unpack and compile; a temporary one if it is not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes compile at once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="guest-kernel-") as name:
        _keep(_compiled(_unpacked(Path(name)), options.jobs))
    print(f"the kernel '{BUILT}' of guests is in {built_directory()}")


def _run(directory: Path, *command: str) -> None:
    subprocess.run(command, cwd=directory, check=True)


def _unpacked(directory: Path) -> Path:
    _run(directory, "apt-get", "download", SOURCE_PACKAGE)
    (package,) = directory.glob("*.deb")
    _run(directory, "dpkg", "-x", str(package), "package")
    (archive,) = directory.glob("package/usr/src/*.tar.xz")
    _run(directory, "tar", "-xf", str(archive))
    return directory / archive.name.removesuffix(".tar.xz")


def _compiled(source: Path, jobs: int) -> Path:
    fragment = source / "guest.config"
    lines = [f"CONFIG_{name}=y" for name in _ON.split()] + [f"CONFIG_{name}=n" for name in _OFF.split()]
    fragment.write_text("\n".join(lines) + "\n")
    _run(source, "make", "-s", "tinyconfig")
    _run(source, "scripts/kconfig/merge_config.sh", "-m", ".config", str(fragment))
    _run(source, "make", "-s", "olddefconfig")
    _run(source, "make", "-s", f"-j{jobs}", "vmlinux", "bzImage")
    return source


def _keep(source: Path) -> None:
    release = (source / "include/config/kernel.release").read_text().strip()
    output = built_directory()
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        boot = Path(name, "kernel", "boot")
        boot.mkdir(parents=True)
        shutil.copy(source / "arch/x86/boot/bzImage", boot / f"vmlinuz-{release}")
        shutil.copy(source / ".config", boot / f"config-{release}")
        shutil.copy(source / "vmlinux", boot.parent / "vmlinux")
        shutil.rmtree(output, ignore_errors=True)
        boot.parent.rename(output)


if __name__ == "__main__":
    main()
