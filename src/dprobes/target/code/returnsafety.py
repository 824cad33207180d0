"""
Whether the code of a file bears uretprobes: it does not if something besides the ``ret`` looks at return addresses.

A uretprobe replaces the return address of a running function by that of a page of the kernel's. Go's runtime meets
there what it does not know when it moves or walks a stack. An exception or a panic that is to pass through such a frame
finds the end of the stack there, and ends the program. When another stack comes into use, the kernel takes the probed
calls of the old one for abandoned, and a return from such a one gets SIGILL. A breakpoint at the function's return
instructions (``exits``) does none of this. ``tests/integration/ebpf/test_uretprobes.py`` shows what happens.

The marks are names that toolchains leave in a file, also when it is stripped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.target.elf.contents import Contents
    from dprobes.target.elf.file import ElfFile

__all__ = ["return_address_user", "stack_user"]

_GO_SECTIONS = frozenset((".go.buildinfo", ".gopclntab", ".note.go.buildid", ".go.pltinit"))
_GO_MARK = b"\xff Go buildinf:"
"""The beginning of what ``go version FILE`` reads."""

_ENDS_IT = "and what meets a uretprobe on its way up the stack ends the program"
_MARKS = (
    (b"__gxx_personality_v0\0", f"uses C++ exceptions, {_ENDS_IT}"),
    (b"St9exception\0", f"uses C++ exceptions, {_ENDS_IT}"),
    (b"rust_eh_personality\0", f"uses Rust panics, {_ENDS_IT}"),
    (b"/rustc/", f"uses Rust panics, {_ENDS_IT}"),
    (b"__objc_personality_v0\0", f"uses Objective-C exceptions, {_ENDS_IT}"),
    (b"__gnat_personality_v0\0", f"uses Ada exceptions, {_ENDS_IT}"),
    (b"_d_eh_personality\0", f"uses D exceptions, {_ENDS_IT}"),
    (b"__gdc_personality_v0\0", f"uses D exceptions, {_ENDS_IT}"),
    (b"swapcontext\0", "switches stacks, and a return by way of a uretprobe on another stack ends the program"),
    (b"jump_fcontext\0", "switches stacks, and a return by way of a uretprobe on another stack ends the program"),
)
_C_LIBRARY = "libc.so.6"
"""It defines ``swapcontext``, and does not use it."""


def return_address_user(elf: ElfFile) -> str | None:
    """Return what in the file looks at return addresses, as a clause about ``it``; None if nothing is known to."""
    if any(section.name in _GO_SECTIONS for section in elf.sections) or elf.data.find(_GO_MARK) >= 0:
        return "it is a Go program, and Go's runtime reads the return addresses on its stacks"
    if elf.soname == _C_LIBRARY:
        return None
    clause = stack_user(elf.data)
    return f"it {clause}" if clause else None


def stack_user(data: Contents) -> str | None:
    """Return what in the bytes of a file unwinds or switches stacks, as a predicate; None if nothing is known to."""
    return next((clause for mark, clause in _MARKS if data.find(mark) >= 0), None)
