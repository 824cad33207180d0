"""
Much is probed at once in a process that runs: each place has a jump, or a breakpoint and a reason.

What is counted by method is also looked for in the process's memory. What is printed is in the table of
docs/explanation/measurements.md: of 11 821 functions 3 had a breakpoint, of 12 776 instructions 73.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dprobes.engines.engine_interface import Begun, Counts, Scope
from dprobes.engines.inline.inline_engine import InlineEngine, InlineHandlers
from dprobes.engines.ptrace.ptrace_engine import PtraceSession
from dprobes.resolve.probepoints import ProbeState
from dprobes.target.probed_module import Module
from integration.ebpf.insessions import compiled, followed
from integration.embedded_python import LIBRARIES, library, python_program
from integration.support import (
    PROGRAMS,
    TIMEOUT,
    await_line,
    await_true,
    code_is_original,
    load_bias,
    read_memory,
    running,
)
from support.attachments import job_of
from support.instruction_places import places_in, source_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.ebpf.insessions import Followed
    from integration.support import Builder

pytestmark = pytest.mark.torture

INT3 = 0xCC
SECONDS = 8 * TIMEOUT

CHOSEN = {
    "libc.so.6": (
        "malloc", "_int_malloc", "_int_free", "free", "calloc", "realloc", "_int_realloc", "qsort_r", "memcpy",
        "printf", "fork", "_IO_file_xsputn", "fwrite", "getenv", "pthread_mutex_lock", "__memmove_avx_unaligned_erms",
        "__memset_avx512_unaligned_erms", "__strlen_evex", "__memcmp_evex_movbe",
    ),
    "libpython3.11.so.1.0": (
        "PyObject_Malloc", "PyObject_Free", "PyDict_New", "PyDict_SetItem", "PyDict_GetItemWithError", "PyTuple_New",
        "PyList_Append", "PyObject_GetAttr", "_PyObject_GenericGetAttrWithDict", "_PyType_Lookup", "PyObject_Str",
        "PyObject_RichCompare", "PyNumber_Add", "_PyFunction_Vectorcall", "_PyObject_FastCallDictTstate",
        "PyEval_EvalCode", "PyUnicode_Compare", "PyUnicode_Decode", "PyUnicode_FromFormatV", "_PyUnicode_JoinArray",
        "PyLong_FromString", "_PyLong_Format",
    ),
    "libcrypto.so.3": (
        "EVP_DigestUpdate", "EVP_DigestFinal_ex", "EVP_MD_fetch", "SHA256_Update", "SHA256_Final", "CRYPTO_malloc",
        "CRYPTO_free", "CRYPTO_zalloc", "OPENSSL_sk_insert", "OPENSSL_LH_insert", "OPENSSL_LH_retrieve",
        "BN_mod_exp_mont", "BN_div", "BN_mul", "EVP_CipherUpdate", "RAND_bytes", "ASN1_item_d2i", "X509_verify_cert",
        "OPENSSL_LH_doall_arg", "MD5_Update", "MD5_Final", "SHA512_Update", "SHA512_Final",
    ),
    "libsqlite3.so.0": (
        "sqlite3BtreeInsert", "sqlite3BtreeNext", "sqlite3BtreeTableMoveto", "sqlite3BtreeIndexMoveto", "sqlite3_step",
        "sqlite3VdbeRecordCompareWithSkip", "sqlite3VdbeSerialGet", "sqlite3VdbeMemGrow", "sqlite3VdbeHalt",
        "sqlite3GetToken", "sqlite3RunParser",
    ),
}  # fmt: skip
"""Functions of which each instruction is probed, most of them hot."""


class Report(NamedTuple):
    """Say how many places have jumps, by method, and how many breakpoints, by reason."""

    jumps: Counter[str]
    breakpoints: Counter[str]

    def __str__(self) -> str:
        rows = [*self.jumps.most_common(), *((f"breakpoint: {why}", n) for why, n in self.breakpoints.most_common())]
        return "\n".join(f"{count:8} {what}" for what, count in rows)


class Process:
    """A process that does the same work again and again."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def work(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("work\n")
        self._process.stdin.flush()
        return await_line(self._process, SECONDS)

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(TIMEOUT)


@contextmanager
def at_work(build: Builder) -> Iterator[Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with running(python_program(build), PROGRAMS / "steady_work.py", stdin=subprocess.PIPE, env=environment) as target:
        assert await_line(target) == "ready\n"
        yield Process(target)


def native_of(following: Followed) -> InlineHandlers:
    assert isinstance(following.session, PtraceSession)
    assert isinstance(following.session.native, InlineHandlers)
    return following.session.native


def are_settled(following: Followed) -> bool:
    """Return whether it is known of each probepoint by what it is probed."""
    native = native_of(following)
    known = native.jumps.keys() | native.refused.keys()
    return Begun() in following.events and len(known) == len(following.session.probes)


def report_of(following: Followed, pid: int, path: Path) -> Report:
    """Return what has become of each probepoint, as the engine says and the memory shows it."""
    session, report = following.session, Report(Counter(), Counter())
    native, bias = native_of(following), load_bias(pid, path)
    counts = session.counts()
    assert len(counts) == len(session.probes)
    for number, (probe, count) in enumerate(zip(session.probes, counts, strict=True)):
        assert isinstance(count, Counts)
        methods = native.jumps.get(number)
        has_breakpoint = read_memory(pid, bias + probe.instruction.address, 1)[0] == INT3
        if methods:
            assert len(methods) == 1
            report.jumps.update(methods)
            assert f"inline ({next(iter(methods))})" in count.executed
            assert not has_breakpoint, f"{probe.where} is to have a jump"
        else:
            report.breakpoints[native.refused[number]] += 1
            assert has_breakpoint, f"{probe.where} is to have a breakpoint"
    assert report.jumps.total() + report.breakpoints.total() == len(session.probes)
    return report


def probed_at_once(build: Builder, path: Path, text: str) -> tuple[Followed, Report, int]:
    """Let a process work without and with a program, and return its session and what was reported."""
    with at_work(build) as target:
        unprobed = target.work()
        assert unprobed.endswith(" 3\n")
        assert len(unprobed.split()) == 2
        with followed(InlineEngine(), job_of(compiled(text), Scope(pid=target.pid))) as following:
            await_true(lambda: are_settled(following), "a jump or a reason for each", SECONDS)
            assert len(following.probes_in(ProbeState.ACTIVE)) == len(following.session.probes)
            report = report_of(following, target.pid, path)
            assert target.work() == unprobed
            hits = sum(following.hits)
        assert code_is_original(target.pid, path)
        assert target.work() == unprobed
        assert target.end() == 0
    return following, report, hits


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_function_has_a_jump_or_a_reason(build: Builder, name: str) -> None:
    path = library(name)
    following, report, hits = probed_at_once(build, path, f'name = "{path}"\noffset = *\nabort\n')
    session = following.session
    print(f"\n{name}: {len(session.probes)} functions, {hits} hits\n{report}")
    assert isinstance(session, PtraceSession)
    left_out = {each.name for each in session.left_out}
    places = {probe.instruction.address for probe in session.probes}
    missing = {
        symbol for symbol, address in exported_functions(path) if address not in places and symbol not in left_out
    }
    assert missing == set()
    assert hits > 10_000


def exported_functions(path: Path) -> list[tuple[str, int]]:
    """Return names and addresses of the functions that a library exports, as readelf sees them."""
    command = ["readelf", "--dyn-syms", "-W", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout
    rows = [line.split() for line in text.splitlines()]
    return [
        (row[7].partition("@")[0], int(row[1], 16))
        for row in rows
        if len(row) >= 8 and row[3] in ("FUNC", "IFUNC") and row[6] != "UND"
    ]


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_instruction_of_functions_has_a_jump_or_a_reason(build: Builder, name: str) -> None:
    path = library(name)
    functions = {
        symbol.name: (symbol.address, symbol.size)
        for symbol in Module.load(path).symbols.functions()
        if symbol.name in CHOSEN[name] and symbol.size
    }
    places = places_in(path, sorted(set(functions.values())))
    following, report, hits = probed_at_once(build, path, source_of(path, places))
    print(f"\n{name}: {len(places)} instructions of {len(functions)} functions, {hits} hits\n{report}")
    assert len(following.session.probes) == len(places) > 1000
    assert hits > 10_000
