"""Filters in front of handlers: a hit makes a record where the filter holds for the record that it would make."""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.filters.filter_language import (
    And,
    Comparison,
    Condition,
    Membership,
    Memory,
    Name,
    Not,
    Number,
    Or,
    StringAt,
    Sum,
    parse,
)
from dprobes.filters.handler_filter import check_words, with_filters
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.program_checker import check
from dprobes.rpn.program_text import print_program
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_content import RecordBlock, TraceOrigin, TraceProgram
from dprobes.trace.trace_filter import compile_filter
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from dprobes.vm.interpreter import Interpreter
from dprobes.vm.rpn_machine import Ending
from support.ebpf_abilities import loop_forms
from support.ebpf_backend import EbpfRunner, obstacle

if TYPE_CHECKING:
    from dprobes.filters.filter_language import Value
    from dprobes.rpn.rpn_program import Program
    from dprobes.vm.rpn_machine import Outcome

STRINGS = 0x1000
"""Where strings are, each in 32 bytes."""
NUMBERS = 0x2000
"""Where numbers are, each in 8 bytes."""
TEXTS = ("", "/etc", "/etc/passwd", "redis-server", "redis", "abcabd", "a")
VALUES = (0, 1, 5, 255, 256, 1 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
PER_NAME = ("x86_64", "i386")

LOGGED = """
name = case
major = 3
offset = 0
minor = 7
    push r, ebx; push r, ecx; push r, edx
    push 0x2018; push mem, u32; push 0x2010; push mem, u32; push 0x2008; push mem, u32; push 0x2000; push mem, u32
    log 7
"""


def program_of(text: str) -> Program:
    return parse_source(SourceFile("case.rpn", text), Diagnostics())


def checked(program: Program, filters: list[str], name: str) -> Program:
    diagnostics = Diagnostics()
    filtered = with_filters(program, filters, diagnostics)
    check(filtered, architecture(name), diagnostics)
    diagnostics.raise_if_errors()
    return filtered


def outcome_of(program: Program, context: FakeContext) -> Outcome:
    image = encode(program, context.architecture)
    return Interpreter(image, context.architecture).run(image.handlers[0], prepare(program, 0, context), context)


def random_world(random: Random, name: str) -> FakeContext:
    memory = {STRINGS + 32 * n: text.encode() + b"\0" for n, text in enumerate(TEXTS)}
    memory[NUMBERS] = b"".join(random.choice(VALUES).to_bytes(8, "little") for _ in range(4))
    word = architecture(name).word_mask
    values = [*VALUES, -1 & word, 1 << 31 & word, word >> 1, (word >> 1) + 1]
    registers = {each: random.choice(values) for each in ("ebx", "ecx", "edx")}
    registers["esi"] = STRINGS + 32 * random.randrange(len(TEXTS))
    registers["edi"] = 0x9000  # where nothing is
    return FakeContext(
        name, registers=registers, memory=memory, pid=random.randrange(3), tid=random.randrange(3), uid=1000, cpu=2,
        comm=random.choice(("redis-server", "redis", "a")),
    )  # fmt: skip


# Conditions: a text, and what it means for a record


def random_condition(random: Random, depth: int = 0) -> str:
    choice = random.randrange(7 if depth < 3 else 4)
    if choice >= 4:
        parts = [random_condition(random, depth + 1) for _ in range(random.randrange(1, 4))]
        joined = f" {random.choice(('and', 'or'))} ".join(parts)
        return f"not ({joined})" if choice == 4 else f"({joined})"
    if choice == 3:
        text = f'"{random.choice(TEXTS)}"'
        if random.random() < 0.4:
            operator = random.choice(("==", "!=", "startswith", "=~", "!~"))
            return f"comm {operator} {text}"
        left = random.choice(("str(esi)", f"str({STRINGS + 32 * random.randrange(7):#x})", "str(esi + 1)"))
        if random.random() < 0.2:
            return f'{left} in ({text}, "a")'
        operator = random.choice(("==", "!=", "startswith", "contains" if text != '""' else "=="))
        return f"{left} {operator} {text}"
    left, right = random_number(random), random_number(random, constant=True)
    if random.random() < 0.2:
        return f"{left} {random.choice(('in', 'not in'))} ({right}, 5)"
    operator = random.choice(("==", "!=", "<", "<=", ">", ">="))
    if right == "0" and operator not in ("==", "!="):
        right = "1"
    return f"{left} {operator} {right}" if random.random() < 0.8 else f"{right} {operator} {left}"


def random_number(random: Random, *, constant: bool = False) -> str:
    if constant and random.random() < 0.7:
        return str(random.choice((*VALUES, -1, -256)))
    kind = random.choice(("", "", ":s8", ":u8", ":s16", ":s32", ":u32", ":s64"))
    if random.random() < 0.2:
        address = random.choice((f"{NUMBERS + 8 * random.randrange(4):#x}", f"{NUMBERS:#x} + {random.randrange(8)}"))
        return f"mem({address}, {random.choice((1, 2, 4))}){kind}"
    return f"{random.choice(('ebx', 'ecx', 'edx', 'pid', 'tid', 'cpu', 'minor'))}{kind}"


class Record:
    """What an unfiltered record shows, with the memory that a test put there."""

    def __init__(self, context: FakeContext, record: LogRecord) -> None:
        self._context = context
        self._bits = 8 * record.word_size
        words = struct.unpack(f"<7{'Q' if record.word_size == 8 else 'I'}", record.data)
        self._numbers = dict(zip(("ebx", "ecx", "edx"), reversed(words[4:]), strict=True))
        self._numbers |= {"pid": record.pid or 0, "tid": record.tid or 0, "cpu": record.cpu or 0, "minor": 7}
        self._numbers["esi"] = context.value_of("esi")
        self._name = record.process_name

    def holds(self, condition: Condition) -> bool:
        match condition:
            case And(parts):
                return all(self.holds(each) for each in parts)
            case Or(parts):
                return any(self.holds(each) for each in parts)
            case Not(inner):
                return not self.holds(inner)
            case Membership(value, choices, is_negated):
                return any(self.value(value) == self.value(each) for each in choices) is not is_negated
            case Comparison(left, operator, right):
                return self._compare(left, str(operator), right)

    def _compare(self, left: Value, operator: str, right: Value) -> bool:
        a, b = self.value(left), self.value(right)
        if isinstance(a, str) and isinstance(b, str):
            tests = {"==": a == b, "=~": a == b, "!=": a != b, "!~": a != b}
            tests |= {"startswith": a.startswith(b), "contains": b in a}
            return tests[operator]
        assert isinstance(a, int)
        assert isinstance(b, int)
        if operator not in ("==", "!=") and self._is_signed(left, right):
            a, b = self._signed(a), self._signed(b)
        tests = {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}
        return tests[operator]

    def _is_signed(self, *values: Value) -> bool:
        return any(
            (isinstance(each, (Name, Memory)) and each.type is not None and each.type.is_signed)
            or (isinstance(each, Number) and each.value < 0)
            for each in values
        )

    def _signed(self, value: int) -> int:
        return value - (1 << self._bits) if value >> (self._bits - 1) else value

    def value(self, value: Value) -> int | str:
        match value:
            case Number(number):
                return number & ((1 << self._bits) - 1)
            case Name("comm"):
                return self._name or ""
            case Name(name, _, known):
                return self._narrow(self._numbers[name], known)
            case Sum(base, addend):
                address = self.value(base)
                assert isinstance(address, int)
                return address + addend
            case Memory(address, size, _, known):
                at = self.value(address)
                assert isinstance(at, int)
                return self._narrow(int.from_bytes(self._context.read(at, size), "little"), known)
            case StringAt(address):
                at = self.value(address)
                assert isinstance(at, int)
                return self._context.read(at, 32).partition(b"\0")[0].decode()
            case _:
                return value.value

    def _narrow(self, number: int, known: object) -> int:
        if known is None:
            return number
        bits = min(known.bits, self._bits)  # type: ignore[attr-defined]
        number &= (1 << bits) - 1
        if known.is_signed and number >> (bits - 1):  # type: ignore[attr-defined]
            number |= -1 << bits
        return number & ((1 << self._bits) - 1)


def record_of(context: FakeContext) -> LogRecord:
    outcome = outcome_of(program_of(LOGGED), context)
    word = context.architecture.word_size
    return LogRecord(
        major=outcome.major, minor=outcome.minor, cpu=context.cpu(), pid=context.pid(), uid=context.uid(),
        tid=context.tid(), process_name=context.process_name().decode(), data=outcome.log,
        word_size=8 if word == 8 else 4,
    )  # fmt: skip


@pytest.mark.parametrize("name", PER_NAME)
@given(seed=st.integers(0, (1 << 32) - 1))
def test_a_hit_makes_a_record_where_the_condition_holds_for_it(name: str, seed: int) -> None:
    random = Random(seed)
    context = random_world(random, name)
    text = random_condition(random)
    if name == "i386":
        text = text.replace(":s64", ":s32")
    outcome = outcome_of(checked(program_of(LOGGED), [text], name), context)
    record = record_of(context)
    if Record(context, record).holds(parse(text)):
        assert (outcome.ending, outcome.log, outcome.unhandled) == (Ending.EXIT, record.data, 0), text
    else:
        assert (outcome.ending, outcome.log) == (Ending.ABORT, b""), text


@pytest.mark.parametrize("name", PER_NAME)
def test_the_kernel_decides_likewise(name: str) -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    ended = set()
    for seed in range(60):
        random = Random(seed)
        context = random_world(random, name)
        context.map_memory(0x100000, b"")  # this process has nothing at the low addresses
        text = random_condition(random).replace(":s64", ":s32")
        program = checked(program_of(LOGGED), [text], name)
        image, point = encode(program, context.architecture), prepare(program, 0, context)
        expected = Interpreter(image, context.architecture).run(image.handlers[0], point, context)
        with EbpfRunner(image, context.architecture, context, loop_forms()[0]) as runner:
            outcome, _ = runner.run(image.handlers[0], point)
        assert (outcome.ending, outcome.log) == (expected.ending, expected.log), text
        ended.add(outcome.ending)
    assert ended == {Ending.EXIT, Ending.ABORT}


ITEMS = st.sampled_from(
    ["pid == 1", "tid < 2", "uid >= 1000", "cpu != 2", "pid in (0, 2)", "major == 3", "minor > 6", 'comm == "redis"',
     'name startswith "redis"', 'comm =~ "redis*"', 'name !~ "a"', 'comm in ("a", "b")', "pid <= tid"]
)  # fmt: skip


JOINS = st.sampled_from(["and", "or", "and not"])


@given(parts=st.lists(ITEMS, min_size=1, max_size=5), joins=st.lists(JOINS, min_size=4), seed=st.integers(0, 1000))
def test_a_filter_of_items_is_the_same_on_records_and_at_hits(parts: list[str], joins: list[str], seed: int) -> None:
    text = parts[0] + "".join(f" {join} {part}" for join, part in zip(joins, parts[1:], strict=False))
    context = random_world(Random(seed), "x86_64")
    body = records_frame(1, 0, [(0, encode_record(record_of(context)))])[12:]
    source = TraceProgram(RecordSource(1, "case", "case", 3), {}, [], TraceOrigin("trace.dpt", "here"))
    (rows,) = rows_of(RecordBlock(source, body, RECORDS_HEAD.size, 0, 0, 100))
    mask = compile_filter(text)(rows)
    of_record = mask[0] if isinstance(mask, list) else mask
    assert (outcome_of(checked(program_of(LOGGED), [text], "x86_64"), context).ending is Ending.EXIT) is of_record


# Single answers


def makes_record(text: str, context: FakeContext, source: str = LOGGED) -> bool:
    return outcome_of(checked(program_of(source), [text], context.architecture.name), context).ending is Ending.EXIT


@pytest.mark.parametrize(
    "text",
    ['str(edi) == "x"', 'str(edi) != "x"', 'not str(edi) == "x"', "mem(edi, 4) == 1", "mem(edi, 4) != 1",
     'comm == "a" or mem(edi, 4) >= 0x0', 'str(edi) contains "x"'],
)  # fmt: skip
def test_memory_that_is_not_there_makes_the_filter_false(text: str) -> None:
    context = random_world(Random(1), "x86_64")
    context.comm = "b"
    text = text.replace(">= 0x0", ">= 1")
    assert not makes_record(text, context)


def test_a_filter_that_is_decided_earlier_reads_no_memory() -> None:
    context = random_world(Random(1), "x86_64")
    context.comm = "b"
    assert makes_record('comm == "b" or mem(edi, 4) == 1', context)
    assert makes_record('not (comm != "b" and mem(edi, 4) == 1)', context)


def test_the_handler_finds_all_as_at_a_hit() -> None:
    source = """
name = case
jmpmax = 3
offset = 0
    push 3
again: loop again
    save tsp
    push x
    sx caught
    push 0x9000
    push mem, u8
caught:
    push lp
    log 9
"""
    context = random_world(Random(1), "x86_64")
    plain = outcome_of(program_of(source), context)
    text = 'str(esi) contains "q" or str(esi + 1) contains "zz" or mem(ebx, 1) == 1 or uid == 1000'
    filtered = outcome_of(checked(program_of(source), [text.replace("mem(ebx, 1) == 1 or ", "")], "x86_64"), context)
    assert filtered == plain
    assert len(plain.log) == 72


def test_a_string_is_looked_at_as_far_as_the_filter_says() -> None:
    context = random_world(Random(1), "x86_64")
    context.map_memory(0x3FF8, b"abcdefgh")  # and nothing behind it
    assert makes_record('str(0x3ff8, 8) == "abcdefgh"', context)
    assert makes_record('str(0x3ff8, 8) contains "gh"', context)
    assert not makes_record('str(0x3ff8, 8) contains "hg"', context)
    assert makes_record('not str(0x3ff8, 8) contains "hg"', context)
    assert not makes_record('str(0x3ff8) == "abcdefgh"', context)  # whether it ends there, nobody can tell
    assert not makes_record('str(0x3ff8) != "abcdefgh"', context)
    assert makes_record('str(0x3ff8) != "abd"', context)


def test_several_filters_must_all_hold() -> None:
    context = random_world(Random(1), "x86_64")
    context.ids["pid"] = 5
    program = program_of(LOGGED)
    assert outcome_of(with_filters(program, ["pid == 5", "uid == 1000"], Diagnostics()), context).ending is Ending.EXIT
    assert outcome_of(with_filters(program, ["pid == 5", "uid == 1"], Diagnostics()), context).ending is Ending.ABORT
    assert with_filters(program, [], Diagnostics()) is program


def test_results_have_a_sign_and_a_warning_says_how_wide_they_are() -> None:
    context = random_world(Random(1), "x86_64")
    context.set_value("eax", 0xFFFFFFFF)
    source = LOGGED.replace("minor", "return = yes; minor")
    assert not makes_record("retval < 0", context, source)
    assert makes_record("retval:s32 < 0", context, source)
    context.set_value("eax", (1 << 64) - 1)
    assert makes_record("retval < 0", context, source)
    diagnostics = Diagnostics()
    program = program_of(source)
    two = replace(program, definitions=program.definitions * 2)
    with_filters(two, ["retval < 0"], diagnostics, called="--filter")
    assert diagnostics.render() == (
        "--filter:1:1: warning: 'retval' is compared as a whole word, in which the -1 of an int is 4294967295\n"
        "    retval < 0\n"
        "    ^~~~~~\n"
        "hint: write 'retval:s32' if the function returns an int, else 'retval:s64'"
    )
    quiet = Diagnostics()
    with_filters(program, ["retval:s32 < 0 or retval:s64 < -5 or retval > arg0:s32"], quiet)
    assert not quiet.has_errors


def test_fields_of_a_tracepoint_are_those_that_no_item_is_called_like() -> None:
    source = "name = vmlinux\nmodtype = tracepoint\noffset = sched:sched_switch\nlog 0\n"
    context = FakeContext(
        traced_fields={"prev_pid": 5, "pid": 6, "prev_comm": 0x1000}, pid=7, user_registers={"rdi": 9}
    )
    context.map_memory(0x1000, b"swapper/0\0")
    assert makes_record("prev_pid == 5 and tp.pid == 6 and pid == 7 and u.arg0 == 9", context, source)
    assert makes_record('str(prev_comm) startswith "swapper" and prev_pid:u8 in (5)', context, source)
    assert not makes_record("tp.gone == 0", context, source)


def test_labels_of_the_handler_stay_its_own() -> None:
    source = "name = case\noffset = 0\njmp filter2\nnop\nfilter2: push 5\nfilter_1: log 1\n"
    program = checked(program_of(source), ["pid == 0"], "x86_64")
    assert outcome_of(program, FakeContext()).log == (5).to_bytes(8, "little")
    assert program_of(print_program(program)) == program


ERRORS = """
--filter:1:1: error: there is no 'retvl' at a hit
    retvl == 5
    ^~~~~
hint: did you mean 'retval'?

--filter:1:1: error: there is no 'com' at a hit
    com == "bash"
    ^~~
hint: did you mean 'comm'?

--filter:1:1: error: there is no 'nothing_like_it' at a hit
    nothing_like_it == 1
    ^~~~~~~~~~~~~~~
hint: there are comm, name, pid, tid, uid, cpu, elapsed, major, minor, registers such as arg0 and retval, \
mem(address, bytes), str(address)

--filter:1:14: error: 'time' exists in records, but not at a hit: the time of a hit is read with the record
    pid == 1 and time > 5
                 ^~~~

--filter:1:1: error: 'function' exists in records, but not at a hit: places are chosen with 'offset ='
    function == 1
    ^~~~~~~~

--filter:1:1: error: 'xmm0' has more bits than a word, and cannot be compared
    xmm0 == 1
    ^~~~

--filter:1:1: error: 'msr' has more bits than a word, and cannot be compared
    msr == 1
    ^~~

--filter:1:1: error: 'arg0' is compared as a number without a sign, which is never below 0
    arg0 < 0
    ^~~~~~~~
hint: write 'arg0:s64 < 0', or ':s32' for an int

--filter:1:1: error: 'arg0' is compared as a number without a sign, which is never below 0
    0 > arg0
    ^~~~~~~~
hint: write 'arg0:s64 < 0', or ':s32' for an int

--filter:1:1: error: 'arg0:u32' is compared as a number without a sign, which is never below 0
    arg0:u32 >= 0
    ^~~~~~~~~~~~~
hint: write 'arg0:s64 >= 0', or ':s32' for an int

--filter:1:1: error: 'arg0' is a number, and 'startswith' is for strings
    arg0 startswith "/etc"
    ^~~~
hint: 'str(arg0)' is the string at an address

--filter:1:1: error: of 'arg0' and '"/etc"' one is a number, the other a string
    arg0 == "/etc"
    ^~~~~~~~~~~~~~
hint: 'str(arg0)' is the string at an address

--filter:1:9: error: 'comm' is a string, which is compared with a text, not with the number '5'
    comm == 5
            ^
hint: write "5"

--filter:1:9: error: 'comm' is a string, which is compared with a text
    comm == str(arg0)
            ^~~~~~~~~
hint: a handler cannot compare two strings

--filter:1:1: error: 'comm' is a string, and strings have no order
    comm < "a"
    ^~~~~~~~~~
hint: compare it with ==, !=, startswith, contains or in

--filter:1:1: error: 'comm' is not searched by handlers
    comm contains "a"
    ^~~~
hint: write startswith, or ==

--filter:1:9: error: the kernel keeps 15 bytes of a process name, and this one has more
    comm == "process-of-many-words"
            ^~~~~~~~~~~~~~~~~~~~~~~
hint: write "process-of-many"

--filter:1:9: error: a handler cannot match this pattern
    comm =~ "a?c"
            ^~~~~
hint: it can match "text", "text*" and "*text*"

--filter:1:9: error: a handler cannot match the end of a string
    comm =~ "*c"
            ^~~~
hint: it can match "text", "text*" and "*text*"

--filter:1:9: error: every string matches this pattern
    comm =~ "*"
            ^~~

--filter:1:20: error: every string contains the empty one
    str(arg0) contains ""
                       ^~

--filter:1:17: error: a string of at most 2 bytes is compared with a text of 3
    str(arg0, 2) == "abc"
                    ^~~~~

--filter:1:14: error: a text has no control characters, if a handler is to compare it
    str(arg0) == "a\tb"
                 ^~~~~

--filter:1:1: error: nothing of a hit is in this comparison
    1 == 1
    ^~~~~~
hint: as in: pid == 42

--filter:1:1: error: 'startswith' goes between a string of a hit and a text
    "a" startswith comm
    ^~~~~~~~~~~~~~~~~~~
hint: as in: comm startswith "py"

--filter:1:5: error: 'comm' is a string, and a number is needed here
    str(comm) == "a"
        ^~~~

--filter:1:5: error: '"ab"' is a string, and a number is needed here
    str("ab") == "a"
        ^~~~
"""


@pytest.mark.parametrize("message", ERRORS.strip().split("\n\n"))
def test_what_a_handler_cannot_compare_is_shown_in_the_filter(message: str) -> None:
    text = message.splitlines()[1][4:]
    with pytest.raises(SourceError) as caught:
        with_filters(program_of(LOGGED), [text], Diagnostics())
    assert caught.value.message == message


def test_codes_that_the_handlers_set_cannot_be_compared() -> None:
    program = program_of(LOGGED + "    setmin 5\n")
    with pytest.raises(SourceError, match="the handlers of this program set 'minor' themselves, after the filter"):
        with_filters(program, ["minor == 5"], Diagnostics())


def test_a_program_that_lets_faults_end_handlers_cannot_have_a_filter_that_reads_memory() -> None:
    program = program_of(LOGGED.replace("minor", "ex_mask = 0x10; minor"))
    with pytest.raises(SourceError) as caught:
        with_filters(program, ["mem(arg0, 4) == 1"], Diagnostics())
    assert caught.value.message == (
        "--filter:1:1: error: this may not be there, and 'ex_mask' leaves out INVALID_ADDR, which would say so\n"
        "    mem(arg0, 4) == 1\n"
        "    ^~~~~~~~~~~~\n"
        "hint: write 'ex_mask = 0x11' in the program"
    )
    with_filters(program, ["arg0 == 1"], Diagnostics())


def test_what_a_processor_lacks_is_shown_in_the_filter() -> None:
    with pytest.raises(SourceError) as caught:
        checked(program_of(LOGGED), ["pid == 1 and r12 == 5"], "i386")
    assert caught.value.message == (
        "--filter:1:14: error: i386 has no register 'r12'\n"
        "    pid == 1 and r12 == 5\n                 ^~~\nhint: did you mean 'fr2'?"
    )


def test_calls_that_return_have_a_time_and_registers_at_their_entry() -> None:
    source = "name = case\noffset = 0\nreturn = yes\npush 5\nlog 1\n"
    context = FakeContext(time=2_000_000, entry={"edi": 7, "esi": 0x1000, "time": 500_000})
    context.map_memory(0x1000, b"/etc\0")
    assert makes_record('elapsed > 1ms and entry.arg0 == 7 and str(entry.arg1) == "/etc"', context, source)
    assert not makes_record("elapsed >= 2ms", context, source)
    assert not makes_record("elapsed != 0", FakeContext(), source)  # whose entry nobody has seen


def test_numbers_of_64_bits_are_not_for_smaller_words() -> None:
    check_words(["elapsed > 1", "mem(esi, 8) == 1"], architecture("x86_64"))
    check_words(["mem(esi, 4) == 1"], architecture("i386"))
    for text, shown in (("mem(esi, 8) == 1", "^~~~~~~~~~~"), ("elapsed > 1", "^~~~~~~")):
        with pytest.raises(SourceError) as caught:
            check_words([text], architecture("i386"))
        message = "--filter:1:1: error: this has 64 bits, and does not fit in the 32-bit word of i386"
        assert caught.value.message == f"{message}\n    {text}\n    {shown}"
