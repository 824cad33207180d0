"""
Names that the kernel's functions had in 2000 to 2004, and what they are called today.

Programs of that time go on working: a former name that the kernel has no symbol for stands for the present one, in code
only. Data that is no more has no name that stands for it, because another thing is there: programs get advice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["advice_on_data", "has_same_arguments", "present_names"]

_RENAMED = {
    # "x86/entry: Switch page fault exception to IDTENTRY_RAW" 91eeafea1e4b (v5.8), and others of that series
    "do_page_fault": ("exc_page_fault",),
    "do_general_protection": ("exc_general_protection",),  # be4c11afbb6d
    "smp_apic_timer_interrupt": ("sysvec_apic_timer_interrupt",),  # db0338eec583
    "scheduler_tick": ("sched_tick",),  # 86dd6c04ef9f (v6.10)
    "generic_make_request": ("submit_bio_noacct",),  # ed00aabd5eb9 (v5.9)
    "switch_to": ("__switch_to",),
    # "mm/slab: enable slab allocation tagging for kmalloc and friends" 7bd230a26648 (v6.10)
    "kmem_cache_alloc": ("kmem_cache_alloc_noprof",),
    "__kmalloc": ("__kmalloc_noprof",),
    "kmalloc": ("__kmalloc_noprof", "__kmalloc"),
}
"""From a former name to those of the same function that may be there today, the likeliest first."""

_REPLACED = {
    # "clone: support passing tls argument via C" 3033f14ab78c (v4.2); "fork: introduce kernel_clone()" cad6967ac108
    "do_fork": ("kernel_clone", "_do_fork"),
    "_do_fork": ("kernel_clone",),
    "do_execve": ("do_execveat_common", "bprm_execve"),  # 51f39a1f0cea (v3.19)
    "kill_proc": ("kill_pid",),
    "kill_proc_info": ("kill_pid_info",),
    "do_IRQ": ("common_interrupt",),  # "x86/entry: Use idtentry for interrupts" fa5e5c409213 (v5.8)
    "do_timer_interrupt": ("tick_periodic", "tick_handle_periodic"),
    "timer_interrupt": ("tick_handle_periodic", "hrtimer_interrupt"),
    "ll_rw_block": ("submit_bh",),  # "fs/buffer: remove ll_rw_block() helper" 79f597842069
    "path_lookup": ("filename_lookup",),  # "kill path_lookup()" c9c6cac0c2bd
    # "mm: enable page allocation tagging" b951aaff5035 (v6.10)
    "alloc_pages": ("__alloc_pages_noprof", "__alloc_pages"),
    "__alloc_pages": ("__alloc_pages_noprof",),
    "__free_pages_ok": ("__free_pages",),
    # labels of arch/x86/entry/entry_64.S, where no handler may run
    "system_call": ("entry_SYSCALL_64",),
    "ret_from_sys_call": ("syscall_return_via_sysret", "entry_SYSRETQ_unsafe_stack"),
}
"""From a former name to functions that do its work today, with other arguments; the likeliest first."""

_COUNTED = "pages are counted in arrays today: '{}' has the sums, less what each CPU has not added yet"
# "mm, vmstat: add infrastructure for per-node vmstats" 75ef71840539 (v4.8)
_DATA = {
    "nr_free_pages": _COUNTED.format("vm_zone_stat") + ", and begins with the free pages",
    "nr_active_pages": _COUNTED.format("vm_node_stat"),
    "nr_inactive_pages": _COUNTED.format("vm_node_stat"),
    "xtime": "the kernel's clocks are in 'tk_core'; 'push time' gives the time of a hit",
}
"""What became of data, as a hint."""

_SYSTEM_CALL = lazy_pattern(r"sys_(\w+)\Z")


def present_names(former: str) -> Iterator[str]:
    """Give the names that a former name may have today, the likeliest first; on x86-64."""
    yield from _RENAMED.get(former, ())
    yield from _REPLACED.get(former, ())
    if (match := _SYSTEM_CALL.match(former)) is not None:
        # d5a00528b58c ("syscalls/core, syscalls/x86: Rename struct pt_regs-based sys_*() to __x64_sys_*()") (v4.17)
        yield f"__x64_sys_{match[1]}"


def has_same_arguments(former: str, present: str) -> bool:
    """Return whether a function has kept its arguments under another name."""
    return present in _RENAMED.get(former, ())


def advice_on_data(former: str) -> str | None:
    """Return a hint on what became of data that the kernel had; None if it is not known."""
    return _DATA.get(former)
