"""Filters: what holds for a record, and what is said of a filter that is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import SourceError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.trace.record_columns import rows_of
from dprobes.trace.trace_content import PlaceEntry, RecordBlock, TraceOrigin, TraceProgram
from dprobes.trace.trace_filter import FILTER_NAMES, all_of, compile_filter, time_filter
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import WALL_OFFSET, header, program, records

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = TraceProgram(
    RecordSource(1, "service", "/usr/lib/libc.so.6", 7),
    {},
    [PlaceEntry("malloc", "", None), PlaceEntry("fr*", "free", None), PlaceEntry("main+0x10", "", 0x1234)],
    TraceOrigin("trace.dpt", "alpha"),
)

RECORD = LogRecord(
    major=1, minor=2, cpu=0, pid=42, uid=1000, ip=0xFFFFFFFF81000000, time=5_000, process_name="python3", tid=43,
    data=b"data",
)  # fmt: skip


def block_of(found: list[tuple[int, LogRecord]], *, written: int = 9_000, wall_offset: int = 0) -> RecordBlock:
    body = records_frame(1, written, [(probe, encode_record(record)) for probe, record in found])[12:]
    return RecordBlock(PROGRAM, body, RECORDS_HEAD.size, wall_offset, written, 100)


def wanted(wants: Callable[[Any], bool | list[bool]], block: RecordBlock) -> list[bool]:
    result: list[bool] = []
    for rows in rows_of(block):
        mask = wants(rows)
        result += mask if isinstance(mask, list) else [mask] * len(rows)
    return result


def holds(text: str, record: LogRecord = RECORD, probe: int = 0) -> bool:
    (result,) = wanted(compile_filter(text), block_of([(probe, record)]))
    return result


@pytest.mark.parametrize(
    "text",
    [
        "major == 1",
        "major==1 and pid==42",
        "major == 2 or pid == 42",
        "not major == 2",
        "NOT (major == 2 OR pid == 41)",
        "!(major == 2) && pid == 42 || uid == 0",
        "major == 2 and pid == 1 or uid == 1000",
        "uid == 1000 or major == 2 and pid == 1",
        "pid != 41 and pid < 43 and pid <= 42 and pid > 41 and pid >= 42",
        "41 < pid and 42 >= pid and 42 == pid",
        "pid in (41, 0x2a)",
        "pid not in (41, 43)",
        "pid in ('*')",
        "pid == '*'",
        "pid == 0b101010 and pid == 0o52",
        "ip == 0xffffffff81000000",
        "tid > pid",
        "tid == 43 and time == 5000 and cpu == 0",
        'name == "python3"',
        "name == 'python3'",
        'name =~ "py*" and name !~ "*perl*"',
        'name in ("bash", "python3")',
        'name not in ("bash")',
        'name =~ "p[xy]thon?"',
        'module =~ "*/libc.so*"',
        'program == "service"',
        'host == "alpha"',
        'symbol == "malloc" and function == "malloc"',
        'program != module',
        "stack_trace == 0",
        "sp == 1 or pid == 42",
        'comm == "python3" and name startswith "py" and comm contains "thon"',
        "time == 5us and time < 1ms and uid < 1K and time == 0.005ms",
    ],
)  # fmt: skip
def test_a_filter_holds(text: str) -> None:
    assert holds(text)
    assert not holds(f"not ({text})")


@pytest.mark.parametrize(
    "text", ["sp == 0", "sp != 0", "sp < 1", "sp in (0)", "sp not in (0)", "sp == pid", "pid != sp"]
)
def test_nothing_holds_for_an_item_that_a_record_lacks(text: str) -> None:
    assert not holds(text)
    assert holds(f"not ({text})")


def test_symbols_and_functions_are_those_of_the_probepoint() -> None:
    assert holds('symbol == "fr*" and function == "free"', probe=1)
    assert holds('symbol == "main+0x10" and function == "main"', probe=2)
    assert holds('symbol == "probepoint 3"', probe=3)


def test_a_name_that_is_no_text_can_be_compared() -> None:
    record = RECORD._replace(process_name=b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert holds('name != "python3" and name =~ "?xff?xfe"', record)


def test_times_are_of_the_wall_clock_and_those_of_writing_where_a_record_has_none() -> None:
    found = [(0, RECORD._replace(time=time)) for time in (999, 1000, 1999, 2000, None)]
    block = block_of(found, written=1500, wall_offset=10**18)
    assert wanted(time_filter(10**18 + 1000, 10**18 + 2000), block) == [False, True, True, False, True]
    assert wanted(time_filter(None, 10**18 + 1500), block) == [True, True, False, False, False]
    assert wanted(time_filter(10**18 + 1501, None), block) == [False, False, True, True, False]


def test_records_of_frames_that_were_put_together_have_each_the_time_of_its_own() -> None:
    untimed = encode_record(RECORD._replace(time=None))
    frames = [records(1, (0, untimed), written=written) for written in range(1000, 1100)]
    (block,) = TraceParser("trace.dpt").feed(b"".join([header(), program(1), *frames]))
    assert isinstance(block, RecordBlock)
    within = wanted(time_filter(WALL_OFFSET + 1030, WALL_OFFSET + 1090), block)
    assert within == [1030 <= written < 1090 for written in range(1000, 1100)]
    assert block.last_written == 1099


def test_filters_are_joined() -> None:
    block = block_of([(0, RECORD), (0, RECORD._replace(pid=1)), (0, RECORD._replace(major=2))])
    assert wanted(all_of([compile_filter("major == 1"), compile_filter("pid == 42")]), block) == [True, False, False]
    assert wanted(all_of([]), block) == [True] * 3


ITEMS = (
    "major, minor, cpu, pid, uid, cs, ip, ss, sp, time, tid, stack_trace, "
    "word_size, name, module, program, host, symbol, function"
)
ERRORS = """
--filter:1:16: error: there is no item 'pidd'
    major == 1 and pidd == 2
                   ^~~~
hint: did you mean 'pid'?

--filter:1:9: error: there is no item 'bash'
    name == bash
            ^~~~
hint: there are ITEMS; strings are in quotes

--filter:1:5: error: expected a comparison, found '='
    pid = 42
        ^
hint: write '==' to compare

--filter:1:4: error: expected a comparison, found the end
    pid
       ^
hint: write 'pid == ' and a value, or one of != < <= > >= =~ !~ in startswith contains

--filter:1:11: error: expected ')', found the end
    (pid == 42
              ^

--filter:1:10: error: expected 'and', 'or' or the end, found ')'
    pid == 42)
             ^

--filter:1:9: error: comparisons cannot be chained
    1 < pid < 5
            ^
hint: write two of them with 'and' between

--filter:1:7: error: expected a value, found the end
    pid ==
          ^

--filter:1:8: error: expected '(', found '1'
    pid in 1, 2
           ^
hint: write the values in parentheses, with commas between

--filter:1:13: error: expected ',' or ')', found the end
    pid in (1, 2
                ^

--filter:1:9: error: expected 'in', found '1'
    pid not 1
            ^

--filter:1:9: error: a string has no end
    name == "bash
            ^~~~~
hint: close it with "

--filter:1:10: error: ';' is not allowed in a filter
    pid == 1 ; x
             ^

--filter:1:9: error: ';' is not allowed in a filter
    pid == 1;;
            ^

--filter:1:8: error: '0x' is not a number
    pid == 0x
           ^~
hint: write a decimal one, or 0x2a, 0b101010, 0o52, 10K, 5ms

--filter:1:8: error: no item is greater than 0xffffffffffffffff
    pid == 99999999999999999999
           ^~~~~~~~~~~~~~~~~~~~

--filter:1:8: error: 'pid' is a number, and this a string
    pid == 'ab'
           ^~~~
hint: write 42, 0x2a, or a character: 'x'

--filter:1:9: error: 'name' is a string, and this a number
    name == 42
            ^~
hint: write "42"

--filter:1:1: error: 'name' is a string, and strings have no order
    name < "a"
    ^~~~~~~~~~
hint: compare it with ==, !=, =~ or in

--filter:1:1: error: of 'name' and 'pid' one is a string, the other a number
    name == pid
    ^~~~~~~~~~~

--filter:1:1: error: 'pid' is a number, and only strings have a pattern
    pid =~ "4*"
    ^~~
hint: compare it with ==, < or in

--filter:1:1: error: '=~' goes between an item and a string
    "ab" =~ name
    ^~~~~~~~~~~~
hint: as in: name =~ "py*"

--filter:1:1: error: no item is in this comparison
    1 == 1
    ^~~~~~
hint: items are ITEMS

--filter:1:1: error: this is not an item
    1 in (1)
    ^
hint: items are ITEMS

--filter:1:1: error: 'startswith' goes between an item and a string
    "ab" startswith name
    ^~~~~~~~~~~~~~~~~~~~
hint: as in: name startswith "py"

--filter:1:1: error: 'pid' is a number, and only strings have parts
    pid contains "4"
    ^~~
hint: compare it with ==, < or in

--filter:1:8: error: no item is negative
    pid == -1
           ^~

--filter:1:9: error: no item is less than -0x8000000000000000
    pid == -0x8000000000000001
            ^~~~~~~~~~~~~~~~~~

--filter:1:9: error: expected a number, found 'pid'
    tid == -pid
            ^~~

--filter:1:8: error: '1.0005us' is not a whole number
    pid == 1.0005us
           ^~~~~~~~

--filter:1:1: error: 'pid' has no other type: items are numbers without a sign
    pid:s32 == 1
    ^~~~~~~
hint: leave out ':s32'

--filter:1:5: error: expected the type of a number, found 'int'
    pid:int == 1
        ^~~
hint: types are u8, u16, u32, u64, s8, s16, s32, s64

--filter:1:1: error: records have no memory
    mem(sp, 4) == 1
    ^~~~~~~~~~
hint: 'dprobes run --filter' looks at it while the program runs

--filter:1:7: error: expected ',', found ')'
    mem(sp) == 1
          ^
hint: write the size of the number after the address: mem(arg0, 4)

--filter:1:9: error: a number has 1, 2, 4 or 8 bytes, not 3
    mem(sp, 3) == 1
            ^

--filter:1:9: error: expected 1 to 4096 bytes, found 5000
    str(sp, 5000) == "a"
            ^~~~

--filter:1:9: error: expected a number of bytes, found ')'
    mem(sp, ) == 1
            ^

--filter:1:10: error: expected a number, found 'ip'
    mem(sp + ip, 4) == 1
             ^~

--filter:1:8: error: expected ')', found '8'
    str(sp 8) == "a"
           ^

--filter:1:12: error: 'tid' is not a value
    pid in (1, tid)
               ^~~
hint: an item can be compared with another one by ==, <, ...
""".replace("ITEMS", ITEMS)


@pytest.mark.parametrize("message", ERRORS.strip().split("\n\n"))
def test_each_error_has_its_place_and_says_what_to_do(message: str) -> None:
    with pytest.raises(SourceError) as caught:
        compile_filter(message.splitlines()[1][4:], called="--filter")
    assert caught.value.message == message


def test_an_empty_filter_is_refused() -> None:
    with pytest.raises(SourceError) as caught:
        compile_filter(" ")
    assert caught.value.diagnostics[0].message == "the filter is empty"
    assert caught.value.diagnostics[0].hint == "write something like 'major == 1 and pid == 42'"


@pytest.mark.parametrize("text", ["(" * 10_000, "not " * 10_000 + "pid == 1", "!" * 10_000])
def test_depth_is_limited(text: str) -> None:
    with pytest.raises(SourceError, match="more than 100 parentheses or negations within each other"):
        compile_filter(text)


def test_a_long_filter_is_no_deep_one() -> None:
    assert holds(" or ".join(["pid == 1"] * 5_000 + ["pid == 42"]))


WORDS = [*FILTER_NAMES, "and", "or", "not", "in", "==", "<", "=~", "(", ")", ",", "1", "0x10", '"a"', "'b", "=", "$"]


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) | st.text(max_size=40))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        wants = compile_filter(text)
    except SourceError as error:
        refusal = error.message
    else:
        assert wanted(wants, block_of([(0, RECORD)])) in ([False], [True])
        return
    assert re.match(r"filter:\d+:\d+: error: .", refusal)
