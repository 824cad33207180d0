"""Carried symbols lie where the running kernel lies, as far as that shows it."""

from __future__ import annotations

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_image import moved_kernel
from dprobes.target.kernel.kernel_symbols import CarriedKernel, Kallsyms, KernelArea, KernelPlace, KernelSymbol
from dprobes.target.kernel.running_kernel import KernelText, RunningKernel, Segment

LINKED, SLIDE = 0xFFFFFFFF81000000, 0x1F400000
CARRIED = CarriedKernel(
    "1234",
    "vmlinux",
    "",
    (KernelArea("_text", LINKED, 0x1000),),
    (
        KernelSymbol("per_cpu_count", 0x1F000, "A"),
        KernelSymbol("_text", LINKED, "T"),
        KernelSymbol("vfs_read", LINKED + 0x40, "T"),
        KernelSymbol("beyond", LINKED + 0x1000, "D"),
    ),
    (KernelPlace(0, LINKED + 0x44, b"\x55", "vfs_read+0x4"), KernelPlace(1, LINKED + 0x50, b"", "vfs_read+0x10")),
)
HIDDEN = Kallsyms(b"0000000000000000 T _text\n")
NO_MEMORY = "/proc/kcore cannot be opened: operation not permitted"


def addresses(kernel: RunningKernel) -> dict[str, int]:
    return {symbol.name: symbol.address for symbol in kernel.symbols.all()}


MOVED = {
    "per_cpu_count": 0x1F000,
    "_text": LINKED + SLIDE,
    "vfs_read": LINKED + SLIDE + 0x40,
    "beyond": LINKED + 0x1000,
}


@pytest.mark.parametrize(
    "running",
    [
        RunningKernel(Kallsyms(b"%x T _text\n" % (LINKED + SLIDE)), KernelText(None, problem=NO_MEMORY)),
        RunningKernel(
            HIDDEN,
            KernelText(None, (Segment(0xFFFF888000000000, 1 << 30, 0), Segment(LINKED + SLIDE, 0x1000, 4096))),
        ),
    ],
    ids=["kallsyms", "kcore"],
)
def test_the_image_moves_as_one(running: RunningKernel) -> None:
    kernel = moved_kernel(CARRIED, running)
    assert addresses(kernel) == MOVED
    assert kernel.expected == {LINKED + SLIDE + 0x44: b"\x55"}
    assert kernel.symbol("vfs_read", "").address == MOVED["vfs_read"]


def test_a_kernel_that_shows_nothing_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        moved_kernel(CARRIED, RunningKernel(HIDDEN, KernelText(None, problem=NO_MEMORY)))
    assert caught.value.message == (
        "the address of the kernel is unknown: the kernel hides its addresses: /proc/kallsyms shows 0 for all "
        "of them; /proc/kcore cannot be opened: operation not permitted"
    )
    assert caught.value.hint == (
        "run dprobes as root; /proc/kallsyms (kernel.kptr_restrict 0 or 1) or /proc/kcore must be readable"
    )


def test_a_module_that_shows_nothing_is_refused() -> None:
    carried = CarriedKernel("77", "dummy.ko", "no_such_module", (KernelArea(".text", 64, 32),))
    with pytest.raises(TargetError) as caught:
        moved_kernel(carried, RunningKernel(HIDDEN))
    assert caught.value.message == (
        "the address of the module 'no_such_module' is unknown: /sys/module/no_such_module/sections: "
        "no such file or directory"
    )
