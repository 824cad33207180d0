"""Handlers of which a file has no eBPF, but a reason: nothing is as short."""

from __future__ import annotations

from dprobes.ppdf.build_facts import read_ebpf, write_ebpf
from dprobes.ppdf.ppdf_model import EbpfCode
from dprobes.ppdf.ppdf_sections import Reader, Strings, Writer


def test_a_file_with_nothing_but_reasons_is_read_again() -> None:
    codes = tuple(EbpfCode("x86_64", number, "may_goto", problem="only the module tells") for number in range(6))
    strings = Strings()
    writer = Writer(strings)
    write_ebpf(writer, codes)
    assert read_ebpf(Reader(memoryview(writer.data), 0, "section EBPF", strings.all), 6) == codes
