"""Hypothesis strategies for log records."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from dprobes.record.log_record import LogRecord

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def optional(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | values


@st.composite
def records(draw: st.DrawFn) -> LogRecord:
    word_sizes: list[Literal[4, 8]] = [4, 8]
    word_size = draw(st.sampled_from(word_sizes))
    word = U64 if word_size == 8 else U32
    name = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=15)
    return LogRecord(
        major=draw(optional(U32)),
        minor=draw(optional(U32)),
        cpu=draw(optional(U32)),
        pid=draw(optional(U32)),
        uid=draw(optional(U32)),
        cs=draw(optional(U32)),
        ip=draw(optional(word)),
        ss=draw(optional(U32)),
        sp=draw(optional(word)),
        time=draw(optional(U64)),
        process_name=draw(st.none() | name),
        tid=draw(optional(U32)),
        data=draw(st.binary(max_size=100)),
        word_size=word_size,
        byte_order=draw(st.sampled_from(["little", "big"])),
        is_stack_trace=draw(st.booleans()),
    )
