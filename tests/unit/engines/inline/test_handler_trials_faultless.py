"""Which instructions have completed once they were executed."""

from __future__ import annotations

import pytest

from dprobes.engines.inline.handler_trials import always_completes


@pytest.mark.parametrize(
    "raw",
    [
        "55",  # push rbp
        "f30f1efa",  # endbr64
        "4883ec08",  # sub rsp, 8
        "488b05d02e0000",  # mov rax, [rip+0x2ed0]
        "488b442408",  # mov rax, [rsp+8]
        "488d0437",  # lea rax, [rdi+rsi]
        "e800000000",  # call
        "7405",  # je
        "c3",  # ret
        "90",  # nop
    ],
)
def test_what_needs_no_memory_but_its_own(raw: str) -> None:
    assert always_completes(bytes.fromhex(raw))


@pytest.mark.parametrize(
    "raw",
    [
        "488b07",  # mov rax, [rdi]
        "488b45f8",  # mov rax, [rbp-8]: it need not be a frame pointer
        "488b0408",  # mov rax, [rax+rcx]
        "488b04cc",  # mov rax, [rsp+rcx*8]
        "64488b042528000000",  # mov rax, fs:[0x28]
        "ff17",  # call [rdi]
        "0f05",  # syscall
        "48f7f1",  # div rcx
        "f3a4",  # rep movsb
        "0f0b",  # ud2
        "f4",  # hlt
        "660f6f07",  # movdqa xmm0, [rdi]
        "8ed8",  # mov ds, eax
        "0f20c0",  # mov rax, cr0
    ],
)
def test_what_may_fault(raw: str) -> None:
    assert not always_completes(bytes.fromhex(raw))
