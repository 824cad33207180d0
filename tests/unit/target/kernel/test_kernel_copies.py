"""Functions of the kernel that have one name: how they are written, listed and refused."""

from __future__ import annotations

import pytest

from dprobes.errors import TargetError
from dprobes.target.kernel.kernel_copies import copies_of, matching_copies, source_of_copy
from dprobes.target.kernel.kernel_symbols import Kallsyms
from dprobes.target.kernel.running_kernel import LoadedModule, RunningKernel

LISTED = b"""ffffffff81000000 T _text
ffffffff81000040 t helper
ffffffff81000100 T kernel_clone
ffffffff81000180 t helper
ffffffff81000200 t only
ffffffff81000300 t helper
ffffffff82000000 d helper
ffffffffc0001010 t helper\t[dummy]
ffffffffc0001080 t dummy_xmit\t[dummy]
"""
FILES = {0xFFFFFFFF81000040: "slub.c", 0xFFFFFFFF81000180: "fork.c", 0xFFFFFFFF81000300: "slub.c"}


class Described(RunningKernel):
    """A kernel whose source files are known, or not."""

    def __init__(self, files: dict[int, str]) -> None:
        modules = {"dummy": LoadedModule("dummy", 0xFFFFFFFFC0001000, 0x1000)}
        super().__init__(Kallsyms(LISTED), modules=modules)
        self._files = files

    def source_files(self, name: str, module: str) -> dict[int, str]:
        return self._files if name == "helper" and not module else {}


BARE, DESCRIBED = Described({}), Described(FILES)


def refused(kernel: RunningKernel, name: str) -> tuple[str, str | None]:
    with pytest.raises(TargetError) as caught:
        kernel.symbol(name, "", is_code=True)
    return caught.value.message, caught.value.hint


def test_copies_are_numbered_by_address() -> None:
    assert [copy.name for copy in copies_of(BARE, "helper", "")] == ["helper,1", "helper,2", "helper,3"]
    assert [BARE.symbol(f"helper,{n}", "", is_code=True).address & 0xFFF for n in (1, 2, 3)] == [0x40, 0x180, 0x300]
    assert [copy.name for copy in copies_of(BARE, "helper", "dummy")] == ["helper"]
    assert BARE.symbol("only,1", "", is_code=True).address == 0xFFFFFFFF81000200


def test_copies_have_their_files_if_these_tell_them_apart() -> None:
    assert [copy.name for copy in copies_of(DESCRIBED, "helper", "")] == ["helper,1", "fork.c:helper", "helper,3"]
    assert DESCRIBED.symbol("fork.c:helper", "", is_code=True).address == 0xFFFFFFFF81000180
    assert [source_of_copy(DESCRIBED, copy) for copy in copies_of(DESCRIBED, "helper", "")] == [
        "slub.c, after '_text'",
        "fork.c, after 'kernel_clone'",
        "slub.c, after 'kernel_clone'",
    ]


def test_places_are_named_by_copies() -> None:
    assert BARE.name_of(0xFFFFFFFF81000184) == "helper,2+0x4"
    assert DESCRIBED.name_of(0xFFFFFFFF81000180) == "fork.c:helper"
    assert BARE.name_of(0xFFFFFFFF81000200) == "only"


@pytest.mark.parametrize(
    ("kernel", "pattern", "names"),
    [
        (BARE, "*:helper", ["helper,1", "helper,2", "helper,3"]),
        (BARE, "helpe[r]", ["helper,1", "helper,2", "helper,3"]),
        (BARE, "slub.c:helper", []),
        (DESCRIBED, "slub.c:helper", ["helper,1", "helper,3"]),
        (DESCRIBED, "f*.c:*", ["fork.c:helper"]),
        (DESCRIBED, "*:only", ["only"]),
    ],
)
def test_patterns_match_copies(kernel: RunningKernel, pattern: str, names: list[str]) -> None:
    assert [copy.name for copy in matching_copies(kernel, pattern, "")] == names


def test_copies_that_do_not_exist() -> None:
    assert refused(BARE, "helper,4") == (
        "'helper' is the name of 3 places in the kernel: there is no number 4",
        "the number counts them by address, from 1",
    )
    assert refused(BARE, "only,2")[0] == "'only' is the name of 1 place in the kernel: there is no number 2"
    assert refused(BARE, "absent,1")[0] == "the kernel has no symbol 'absent'"
    assert refused(BARE, "slub.c:absent")[0] == "the kernel has no symbol 'absent'"
    places = "0x40 (after '_text'), 0x180 (after 'kernel_clone'), 0x300 (after 'kernel_clone')"
    assert refused(BARE, "slub.c:helper") == (
        "the source files of the places called 'helper' in the kernel are unknown",
        "install debug information of the kernel, or write 'offset = \"helper,1\"'; the places are at offsets "
        + places,
    )
    places = "0x40 (slub.c, after '_text'), 0x180 (fork.c, after 'kernel_clone'), 0x300 (slub.c, after 'kernel_clone')"
    assert refused(DESCRIBED, "exec.c:helper") == (
        "'helper' is the name of no place in 'exec.c' of the kernel",
        f"it is at offsets {places}",
    )
    assert refused(DESCRIBED, "slub.c:helper") == (
        "'helper' is the name of 2 places in 'slub.c' of the kernel",
        f"it is at offsets {places}",
    )
