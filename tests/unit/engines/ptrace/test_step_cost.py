"""What people are told of the cost of a place."""

from __future__ import annotations

import pytest

from dprobes.engines.ptrace.step_cost import Execution, execution_of


@pytest.mark.parametrize(
    ("code", "word_size", "expected", "is_cheap"),
    [
        ("55", 8, Execution.EMULATED, True),  # push rbp
        ("488b07", 8, Execution.RUN_ON, True),  # mov rax, [rdi]
        ("31c0", 4, Execution.RUN_ON, True),  # xor eax, eax
        ("0f05", 8, Execution.STOPPED, False),  # syscall
        ("f3a4", 8, Execution.STOPPED, False),  # rep movsb
        ("ff10", 8, Execution.STOPPED, False),  # call [rax]
        ("9d", 8, Execution.STOPPED, False),  # popf
        ("d9c0", 8, Execution.IN_PLACE, False),  # fld st(0)
    ],
)
def test_the_execution_of_an_instruction(code: str, word_size: int, expected: Execution, is_cheap: bool) -> None:
    found = execution_of(bytes.fromhex(code), word_size)
    assert found is expected
    assert found.is_cheap is is_cheap
