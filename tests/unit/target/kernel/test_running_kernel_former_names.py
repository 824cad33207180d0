"""A former name leads to one present name at a time, and never to itself."""

from __future__ import annotations

import pytest

from dprobes.target.kernel.running_kernel import advice_on_data, has_same_arguments, present_names


@pytest.mark.parametrize(
    ("former", "present", "same"),
    [
        ("do_fork", "kernel_clone", False),
        ("do_page_fault", "exc_page_fault", True),
        ("do_general_protection", "exc_general_protection", True),
        ("scheduler_tick", "sched_tick", True),
        ("kmalloc", "__kmalloc_noprof", True),
        ("kill_proc", "kill_pid", False),
        ("sys_read", "__x64_sys_read", False),
    ],
)
def test_names_of_functions(former: str, present: str, same: bool) -> None:
    names = list(present_names(former))
    assert names[0] == present
    assert former not in names
    assert has_same_arguments(former, present) is same


@pytest.mark.parametrize("name", ["tcp_v4_rcv", "schedule", "do_softirq", "jiffies", "__wake_up", "asys_read"])
def test_names_that_have_stayed_lead_nowhere_else(name: str) -> None:
    assert list(present_names(name)) == []
    assert advice_on_data(name) is None
