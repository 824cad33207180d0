"""Names for addresses of the kernel: of code only, and none where the kernel shows none."""

from __future__ import annotations

from typing import ClassVar, cast

import pytest

from dprobes.errors import TargetError
from dprobes.formatters.address_names import KernelNames, is_of_kernel
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import LoadedModule, RunningKernel

LIST = b"""ffffffff81000000 T _text
ffffffff81000100 T vfs_read
ffffffff81000200 T vfs_write
ffffffff81000300 T _etext
ffffffff82000000 D jiffies
ffffffffc0101000 t dummy_xmit\t[dummy]
ffffffffc0200000 t bpf_prog_1\t[bpf]
"""


class Shown:
    """A kernel that shows these symbols."""

    symbols = Kallsyms(LIST)
    modules: ClassVar = {"dummy": LoadedModule("dummy", 0xFFFFFFFFC0101000, 0x1000)}


class Hidden:
    """A kernel that shows none."""

    @property
    def symbols(self) -> Kallsyms:
        raise TargetError("the kernel hides its addresses")


NAMES = KernelNames(cast("RunningKernel", Shown()))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (0xFFFFFFFF81000100, ("vfs_read", "vmlinux")),
        (0xFFFFFFFF810001FF, ("vfs_read+0xff", "vmlinux")),
        (0xFFFFFFFF81000300, None),  # behind the code
        (0xFFFFFFFF82000004, None),  # data
        (0xFFFF888000000000, None),  # memory of the kernel
        (0xFFFFFFFFC0101004, ("dummy_xmit+0x4", "dummy")),
        (0xFFFFFFFFC0102000, None),  # behind the module
        (0xFFFFFFFFC0200010, ("bpf_prog_1+0x10", "bpf")),
        (0xFFFFFFFFC0400000, None),
    ],
)
def test_an_address_of_code_has_a_name(address: int, name: tuple[str, str] | None) -> None:
    assert NAMES.name_of(address) == name


@pytest.mark.parametrize(
    ("address", "extent"),
    [
        (0xFFFFFFFF81000180, (0xFFFFFFFF81000100, 0xFFFFFFFF81000200)),
        (0xFFFFFFFF81000280, (0xFFFFFFFF81000200, 0xFFFFFFFF81000300)),
        (0xFFFFFFFFC0101004, (0xFFFFFFFFC0101000, 0xFFFFFFFFC0101005)),  # nothing follows: as far as is known
    ],
)
def test_a_function_ends_where_the_next_one_begins(address: int, extent: tuple[int, int]) -> None:
    located = NAMES.located(address)
    assert located is not None
    assert located.function is not None
    assert located.function[:2] == extent
    assert located.mapped[:3] == (*extent, extent[0])
    assert (located.pid, located.since) == (None, 0)


def test_a_kernel_that_hides_its_symbols_names_nothing() -> None:
    assert KernelNames(cast("RunningKernel", Hidden())).name_of(0xFFFFFFFF81000100) is None


def test_the_upper_half_is_the_kernels() -> None:
    assert is_of_kernel(0xFFFF800000000000)
    assert not is_of_kernel(0x00007FFFFFFFFFFF)
    assert not is_of_kernel(0xFFFFFFFF)
