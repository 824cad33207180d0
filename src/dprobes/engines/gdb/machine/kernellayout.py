"""Where the kernel keeps what is asked of it: members of its structures, by its own type information (BTF)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.stacks.orctables import OrcLayout
from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.target.btf import Btf

__all__ = ["KernelLayout", "layout_of"]

_MODULE_TABLES = ("orc_unwind_ip", "orc_unwind", "num_orcs")


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """
    Hold where members begin in their structures.

    ``tgid``, ``pid``, ``comm``, ``cred``, ``mm``, ``parent`` and ``stack`` are those of a task, ``uid`` that of its
    credentials, ``pgd`` that of an address space. A loaded module has its place in the list at ``module_list``, its
    state, its name, its code at ``module_base`` and the size of that, and what its symbols are at ``module_symbols``;
    ``symtab``, ``symbol_count``, ``strtab`` and ``typetab`` are the members of these. ``orc`` is how unwind
    tables are, and ``module_orc`` where a module has the places of its own, and how many elements they have; None in a
    kernel without them.
    """

    tgid: int
    pid: int
    comm: int
    cred: int
    mm: int
    parent: int
    stack: int
    uid: int
    pgd: int
    module_list: int
    module_state: int
    module_name: int
    module_base: int
    module_size: int
    module_symbols: int
    symtab: int
    symbol_count: int
    strtab: int
    typetab: int
    orc: OrcLayout | None
    module_orc: tuple[int, int, int] | None


def layout_of(types: Btf) -> KernelLayout:
    """Return where the members are; raise ``TargetError`` if a structure is another one than is known here."""
    task, module = "task_struct", "module"
    base, size = _module_memory(types)
    return KernelLayout(
        tgid=types.member_offset(task, "tgid"),
        pid=types.member_offset(task, "pid"),
        comm=types.member_offset(task, "comm"),
        cred=types.member_offset(task, "real_cred"),
        mm=types.member_offset(task, "mm"),
        parent=types.member_offset(task, "real_parent"),
        stack=types.member_offset(task, "stack"),
        uid=types.member_offset("cred", "uid"),
        pgd=types.member_offset("mm_struct", "pgd"),
        module_list=types.member_offset(module, "list"),
        module_state=types.member_offset(module, "state"),
        module_name=types.member_offset(module, "name"),
        module_base=base,
        module_size=size,
        module_symbols=types.member_offset(module, "kallsyms"),
        symtab=types.member_offset("mod_kallsyms", "symtab"),
        symbol_count=types.member_offset("mod_kallsyms", "num_symtab"),
        strtab=types.member_offset("mod_kallsyms", "strtab"),
        typetab=types.member_offset("mod_kallsyms", "typetab"),
        orc=OrcLayout.of(types),
        module_orc=_module_tables(types),
    )


def _module_tables(types: Btf) -> tuple[int, int, int] | None:
    """Return where a module has the addresses of its unwind tables, and their length."""
    try:
        found = [types.member_offset("module", f"arch.{member}") for member in _MODULE_TABLES]
    except TargetError:
        return None
    return found[0], found[1], found[2]


def _module_memory(types: Btf) -> tuple[int, int]:
    """Return where a module has the address and the size of its code."""
    # Since Linux kernel commit ac3b43283923 ("module: replace module_layout with module_memory") (in v6.4).
    try:
        start = types.member_offset("module", "mem")
        base, size = (types.member_offset("module_memory", member) for member in ("base", "size"))
        return start + base, start + size
    except TargetError:
        return types.member_offset("module", "core_layout.base"), types.member_offset("module", "core_layout.size")
