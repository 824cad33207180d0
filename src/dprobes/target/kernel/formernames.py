"""
Names that functions of the kernel had in 2000 to 2004, and what they are called today.

Programs of that time go on working: a former name that the kernel has no symbol for stands for the present one. Each
row names the commit that renamed, split or replaced the function, as far as one did.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["present_names"]

_FORMER = {
    "do_fork": ("kernel_clone",),  # cad6967ac108 (v5.10); _do_fork since 3033f14ab78c (v4.2)
    "_do_fork": ("kernel_clone",),
    "do_execve": ("do_execveat_common", "bprm_execve"),  # 51f39a1f0cea (v3.19): inlined into its callers
    "do_page_fault": ("exc_page_fault", "handle_mm_fault"),  # 91eeafea1e4b (v5.8)
    "kill_proc": ("kill_pid", "kill_pid_info"),
    "kill_proc_info": ("kill_pid_info",),
    "ret_from_sys_call": ("syscall_return_via_sysret", "entry_SYSRETQ_unsafe_stack"),
    "system_call": ("entry_SYSCALL_64",),  # b2502b418e63 (v4.2)
    "do_IRQ": ("common_interrupt",),  # fa5e5c409213 (v5.8)
    "do_timer_interrupt": ("tick_periodic", "tick_handle_periodic"),
    "timer_interrupt": ("tick_handle_periodic", "hrtimer_interrupt"),
    "switch_to": ("__switch_to",),
    "generic_make_request": ("submit_bio_noacct",),  # ed00aabd5eb9 (v5.9)
    "ll_rw_block": ("submit_bh",),  # 79f597842069 (v6.2)
    "path_lookup": ("filename_lookup", "kern_path"),  # c9c6cac0c2bd (v2.6.39)
    "kmem_cache_alloc": ("kmem_cache_alloc_noprof", "kmem_cache_alloc"),  # 7bd230a26648 (v6.10)
    "__kmalloc": ("__kmalloc_noprof", "__kmalloc"),  # 7bd230a26648 (v6.10)
    "kmalloc": ("__kmalloc_noprof", "__kmalloc"),
    "alloc_pages": ("__alloc_pages_noprof", "__alloc_pages"),  # b951aaff5035 (v6.10)
    "__alloc_pages": ("__alloc_pages_noprof",),
    "__free_pages_ok": ("__free_pages",),
}
"""From a former name to those that may be there today, the likeliest first."""

_SYSTEM_CALL = re.compile(r"sys_(\w+)\Z")


def present_names(former: str) -> Iterator[str]:
    """Give the names that a former name may have today, the likeliest first; on x86-64."""
    yield from (name for name in _FORMER.get(former, ()) if name != former)
    if (match := _SYSTEM_CALL.match(former)) is not None:
        # d5a00528b58c ("syscalls/core, syscalls/x86: Rename struct pt_regs-based sys_*() to __x64_sys_*()") (v4.17)
        yield f"__x64_sys_{match[1]}"
