"""Files with companions and blocks of the tool: they come back, do the same, and nothing that they hold does harm."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.dpc.tool_interpreter import ToolError, ToolInterpreter
from dprobes.dpc.typedtree import typed_program
from dprobes.errors import FormatError
from dprobes.ppdf.ppdf_file import decode, encode
from dprobes.ppdf.tool_trees import DEPTH_MAX, OF_STATEMENTS, OF_VALUES, StatementKind, ValueKind
from support.rounds import rounds
from unit.dpc.test_against_gcc import Writer
from unit.dpc.test_tool_interpreter import Host
from unit.ppdf.joinedsamples import JOINED, joined_sample, joined_text
from unit.ppdf.samples import SMALL, repacked, sections_of

if TYPE_CHECKING:
    from dprobes.ppdf.ppdf_model import Ppdf

SEEDS = st.integers(0, (1 << 32) - 1)


def executed(ppdf: Ppdf) -> list[Any]:
    """Execute the blocks of a program, and return what they have done."""
    assert ppdf.blocks is not None
    host = Host(ppdf.program)
    interpreter = ToolInterpreter(ppdf.blocks, host)
    for block in ppdf.blocks.blocks:
        try:
            interpreter.execute(block)
        except ToolError as error:
            host.done.append((error.code, None if error.span is None else str(error.span)))
        host.done.append((block.block.kind, block.block.written, block.block.period))
    tables = [
        (store.table.name, [(row.key, list(row.cells)) for row in store.contents().rows]) for store in host.tables
    ]
    return [*host.done, host.variables, tables]


def error_of(data: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        decode(data)
    return caught.value.message


def test_companions_and_blocks_come_back() -> None:
    sample, found = joined_sample(), decode(JOINED)
    assert [each.program for each in found.members] == [each.program for each in sample.members]
    assert [each.program.name for each in found.members] == ["libwork.so", "libother.so"]
    assert encode(found) == JOINED
    assert found.blocks is not None
    assert list(found.blocks.functions) == ["power", "nothing"]  # nothing of what no block calls
    assert (
        found.blocks.tables
        == ("sizes", "last", "count", "name", "flags", "sizes2", "named", "texts", "by", "modes")[
            : len(found.blocks.tables)
        ]
    )


def test_blocks_do_the_same_as_before() -> None:
    sample = joined_sample()
    done = executed(decode(JOINED))
    assert done == executed(sample)
    assert done[0][0] == "begin %(power)qd as %(value)dd"


@pytest.mark.parametrize("seed", range(rounds(40)))
def test_random_blocks_do_the_same_as_before(seed: int) -> None:
    writer = Writer(9000 + seed, 64)
    body = writer.declarations() + " ".join(writer.statement(3) for _ in range(5))
    names = ", ".join(f"(long long){name}" for name, _ in writer.names)
    sample = joined_text(f'libwork.so:work {{ }} begin {{ {body} printf("%d %d %d %d %d %d", {names}); }}')
    assert executed(decode(encode(sample))) == executed(sample)


def test_errors_in_blocks_name_their_line() -> None:
    sample = joined_text("libwork.so:work { }\nbegin {\n  long zero = 0;\n  zero = 1 / zero;\n}")
    assert executed(decode(encode(sample)))[0][1] == "joined.dpc:4:3"


def test_a_file_with_any_byte_changed_is_refused() -> None:
    for offset in range(0, len(JOINED), 3):
        changed = bytearray(JOINED)
        changed[offset] ^= 1 << offset % 8
        with pytest.raises(FormatError):
            decode(bytes(changed))


@given(seed=SEEDS)
def test_bytes_that_are_changed_under_right_checksums_do_no_harm(seed: int) -> None:
    random = Random(seed)
    sections = sections_of(JOINED)
    for _ in range(30):
        data = bytearray(sections["TOOL"])
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(len(data))
            match random.randrange(5):
                case 0:
                    data[place] = random.randrange(256)
                case 1:
                    data[place] = random.randrange(24)
                case 2:
                    data[place : place + 4] = random.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
                case 3:
                    del data[place : place + random.randrange(1, 9)]
                case _:
                    data[place:place] = random.randbytes(random.randrange(1, 9))
        with contextlib.suppress(FormatError):
            found = decode(repacked({**sections, "TOOL": bytes(data)}))
            assert encode(decode(encode(found))) == encode(found)
            if found.blocks is not None:
                executed(replace(found, blocks=replace(found.blocks, jmpmax=min(found.blocks.jmpmax, 50))))


@given(data=st.binary(max_size=200), name=st.sampled_from(["COMP", "TOOL"]))
def test_random_sections_do_no_harm(data: bytes, name: str) -> None:
    with contextlib.suppress(FormatError):
        decode(repacked({**sections_of(JOINED), name: data}))


def test_a_damaged_companion_is_named() -> None:
    sections = sections_of(JOINED)
    changed = bytearray(sections["COMP"])
    changed[-1] ^= 1
    said = error_of(repacked({**sections, "COMP": bytes(changed)}))
    assert said.startswith("section COMP: companion 0, from byte ")
    assert ": section TOOL is damaged: expected the CRC-32 " in said


def test_companions_that_fit_not_together_are_refused() -> None:
    sample = joined_sample()
    (companion,) = sample.companions
    for change, what in (
        ({"vars": 99}, "number of variables"),
        ({"tables": sample.program.tables[::-1]}, "tables"),
        ({"major": 3}, "major code"),
    ):
        other = replace(companion, program=replace(companion.program, **change))
        said = error_of(encode(replace(sample, companions=(other,))))
        assert said.startswith(f"section COMP: expected the {what} of the first program in companion 0 (at byte ")


def test_companions_of_companions_are_refused() -> None:
    sample = joined_sample()
    nested = replace(sample.companions[0], companions=sample.companions)
    said = error_of(encode(replace(sample, companions=(nested,))))
    assert "section INFO: expected no flags but 0x1, found 0x2" in said


def test_parts_that_no_flag_announces_are_refused() -> None:
    plain, joined = sections_of(SMALL), sections_of(JOINED)
    for name in ("COMP", "TOOL"):
        said = error_of(repacked({**plain, name: joined[name]}))
        assert said.startswith(f"section {name}: expected nothing, for the flag 0x2 is not set (at byte ")


def test_version_1_2_has_no_joined_programs_and_refuses_these() -> None:
    sections = sections_of(JOINED)
    assert error_of(repacked(sections, minor=2)).startswith("expected no section COMP in version 1.2 (at byte ")
    del sections["COMP"], sections["TOOL"]
    with pytest.raises(
        FormatError, match=r"section INFO: expected no flags but 0x1, found 0x2 \(at byte \d+\)"
    ) as caught:
        decode(repacked(sections, minor=2))
    assert caught.value.hint == "update dprobes here, or build the file with an older one"


# What blocks may not hold

SPAN = struct.pack("<I", 0)
STEPS = bytes([StatementKind.STEPS])
ONE = bytes([ValueKind.CONSTANT, 0x88]) + (1).to_bytes(16, "little")


def with_block(body: bytes, slots: int = 1, *, kind: int = 0, period: int = 0, word_size: int = 8) -> bytes:
    """Return the sample with one block instead of its own."""
    head = struct.pack("<IBII", 1, word_size, 100, 0)
    block = struct.pack("<BIIQI", kind, 0, 0, period, slots) + body
    return repacked({**sections_of(JOINED), "TOOL": head + block})


def evaluated(value: bytes) -> bytes:
    return bytes([StatementKind.EVALUATE]) + SPAN + value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\0", "expected the kind of a statement, found 0"),
        (bytes([20]) + SPAN, "expected the kind of a statement, found 20"),
        (bytes([StatementKind.CAT]) + SPAN + bytes(4), "expected the path of a file, found none"),
        (bytes([StatementKind.BREAK]) + SPAN, "there is nothing that 'break' leaves"),
        (bytes([StatementKind.CONTINUE]) + SPAN, "there is nothing that 'continue' leaves"),
        (bytes([StatementKind.RESULT]) + SPAN + b"\0", "expected no result of a block"),
        (bytes([StatementKind.CLEAR]) + SPAN + b"\x63\0\0\0", "expected the number of a table below "),
        (bytes([StatementKind.QUIT]) + b"\xff\xff\0\0", "expected the number of a span below "),
        (evaluated(b"\0"), "expected a value, found none"),
        (evaluated(b"\x1c"), "expected the kind of a value, found 28"),
        (evaluated(bytes([ValueKind.COMM, 0])), "the name of the process is not a number"),
        (evaluated(bytes([ValueKind.KEPT, 0])), "what a table keeps is not a number"),
        (evaluated(bytes([ValueKind.LITERAL, 0])), "a text is not a number"),
        (evaluated(bytes([ValueKind.CONSTANT, 3])), "expected a type, found 0x3"),
        (evaluated(bytes([ValueKind.NEGATION, 0]) + ONE), "expected a type of numbers, found another one"),
        (evaluated(bytes([ValueKind.SYSTEM, 8]) + SPAN), "expected one of pid, tid, uid, procid, time, found '"),
        (evaluated(bytes([ValueKind.ARITHMETIC, 8]) + SPAN), "expected one of + - * / % & | ^ << >>, found '"),
        (evaluated(bytes([ValueKind.COMPARISON, 8]) + SPAN + ONE + ONE), "expected one of == < <=, found '"),
        (evaluated(bytes([ValueKind.LOCAL, 8, 1, 0, 0, 0])), "expected the number of a variable below 1, found 1"),
        (evaluated(bytes([ValueKind.PARAMETER, 8, 0, 0, 0, 0])), "expected the number of a parameter below 0, found 0"),
        (evaluated(bytes([ValueKind.VARIABLE, 8, 99, 0, 0, 0, 0])), "expected the number of a variable below "),
        (evaluated(bytes([ValueKind.ASSIGN, 8]) + ONE + ONE), "expected a variable, found another value"),
        (evaluated(bytes([ValueKind.CALL, 8, 0, 0, 0, 0])), "expected the number of a function below 0, found 0"),
        (evaluated(bytes([ValueKind.TABLE_VALUE, 8, 0, 0, 0, 0, 0, 0, 0, 0])), "expected the keys of the table"),
        (
            bytes([StatementKind.TALLY]) + SPAN + bytes([1, 0, 0, 0, 0, 0, 0, 0, 0]),
            "expected a value for the table 'last'",
        ),
        (
            bytes([StatementKind.TALLY]) + SPAN + bytes([3, 0, 0, 0, 1, 0, 0, 0]) + ONE + ONE,
            "expected what the table 'name' keeps, found another value",
        ),
        (
            bytes([StatementKind.LOG]) + SPAN + bytes([0, 0, 0, 0, 1, 0, 0, 0, ValueKind.KEPT, 0, 1, 0, 0, 0]),
            "expected a table that keeps strings or call stacks, found 'last'",
        ),
        (
            bytes([StatementKind.LOG]) + SPAN + bytes([0, 0, 0, 0, 1, 0, 0, 0, ValueKind.LITERAL, 0])
            + b"\3\0\0\0two\2\0\0\0",
            "expected a text of at most 2 bytes, found another one",
        ),
        (
            evaluated(bytes([ValueKind.KEPT_TEST, 8]) + ONE),
            "expected what a table keeps, found another value",
        ),
        (
            evaluated(bytes([ValueKind.ITEM_TEST, 8]) + ONE),
            "expected a field of a loop's item, found another value",
        ),
        (evaluated(bytes([ValueKind.ITEM_TEXT, 0])), "a text is not a number"),
        (
            bytes([StatementKind.LOG]) + SPAN + bytes([0, 0, 0, 0, 1, 0, 0, 0, ValueKind.ITEM_TEXT, 0]) + bytes(12),
            "expected a string of 1 to 512 bytes, found one of 0",
        ),
        (bytes([StatementKind.EACH]) + SPAN + b"\3\0\0\0", "expected the kind of a loop's items below 3, found 3"),
        (bytes([StatementKind.EACH]) + SPAN + bytes(4) + ONE, "expected no process for a loop over 'tasks'"),
        (bytes([StatementKind.EACH]) + SPAN + b"\1\0\0\0\0", "expected a process for a loop over 'files'"),
        (bytes([StatementKind.TRY]) + SPAN + ONE, "expected a variable of the block, found another value"),
        (bytes([StatementKind.LOG]) + SPAN + b"\1\0\0\0\xff\0\0\0\0", "expected UTF-8 for a template, found something"),
        (
            bytes([StatementKind.SWITCH]) + SPAN + ONE + b"\1\0\0\0" + bytes(17) + b"\5\0\0\0" + bytes(4),
            "a label leads to no statement",
        ),
        (STEPS + b"\0\0\0\0\0", "expected the end, found 1 more bytes"),
        (
            (STEPS + b"\1\0\0\0") * (DEPTH_MAX + 1) + STEPS + bytes(4),
            f"expected at most {DEPTH_MAX} statements and values in each other",
        ),
    ],
)  # fmt: skip
def test_a_block_that_cannot_be_executed_is_refused(body: bytes, said: str) -> None:
    assert error_of(with_block(body)).startswith(f"section TOOL: {said}")


def test_a_function_with_a_loop_over_items_is_refused() -> None:
    nothing, each = STEPS + bytes(4), bytes([StatementKind.EACH]) + SPAN + bytes(4)
    signature = struct.pack("<IIBII", 0, 0, 8, 0, 1)  # name, span, type of the result, no parameters, one variable
    blocks = struct.pack("<IBII", 1, 8, 100, 1) + signature + struct.pack("<BIIQI", 0, 0, 0, 0, 1) + nothing
    sections = sections_of(JOINED)
    assert decode(repacked({**sections, "TOOL": blocks + nothing})).blocks is not None
    said = error_of(repacked({**sections, "TOOL": blocks + each}))
    assert said.startswith("section TOOL: expected no loop over items in a function (at byte ")


def test_a_block_that_is_none_is_refused() -> None:
    nothing = STEPS + bytes(4)
    assert decode(with_block(nothing)).blocks is not None
    said = error_of(with_block(nothing, kind=3))
    assert said.startswith("section TOOL: expected the kind of a block below 3, found 3 (at byte ")
    said = error_of(with_block(nothing, kind=1, period=9))
    assert said.startswith("section TOOL: expected from 10000000 to 86400000000000 nanoseconds, found 9 (at byte ")
    said = error_of(with_block(nothing, word_size=2))
    assert said.startswith("section TOOL: expected words of 4 or 8 bytes, found 2 (at byte ")
    said = error_of(with_block(nothing, slots=4097))
    assert said.startswith("section TOOL: expected the number of variables below 4097, found 4097 (at byte ")


def test_what_the_compiler_takes_can_be_written() -> None:
    levels = 97
    deep = "if (kept) {" * (levels // 2) + "kept = 1;" + "}" * (levels // 2)
    value = "-~" * (levels // 2) + "letter"
    sample = joined_text(
        f"static long kept; static char letter; libwork.so:work {{ }} begin {{ {deep} kept = {value}; }}"
    )
    assert executed(decode(encode(sample))) == executed(sample)


def test_what_is_nested_too_deep_is_not_written() -> None:
    sample = joined_text("libwork.so:work { } begin { }")
    assert sample.blocks is not None
    body = sample.blocks.blocks[0].body
    for _ in range(DEPTH_MAX):
        body = typed_program.Steps((body,))
    block = sample.blocks.blocks[0]._replace(body=body)
    with pytest.raises(FormatError) as caught:
        encode(replace(sample, blocks=replace(sample.blocks, blocks=(block,))))
    said = f"the blocks of the tool have statements and values nested deeper than {DEPTH_MAX}"
    assert caught.value.message == said
    assert caught.value.hint == "put a part of them into a function"


@pytest.mark.parametrize("kind", [*OF_STATEMENTS, *OF_VALUES], ids=lambda kind: kind.name)
def test_a_file_has_all_fields_of_a_node(kind: StatementKind | ValueKind) -> None:
    layout = OF_STATEMENTS[kind] if isinstance(kind, StatementKind) else OF_VALUES[kind]
    of_all = {"type"} if isinstance(kind, ValueKind) else {"span"} if kind is not StatementKind.STEPS else set[str]()
    names = set(layout.node.__match_args__)
    assert {*layout.fields, *layout.given} <= names
    left = {name for name in names if getattr(layout.node, name, None) is None} - {*layout.fields, *layout.given}
    assert of_all >= left


def test_each_kind_of_statements_and_values_has_a_layout() -> None:
    assert list(OF_STATEMENTS) == list(StatementKind)
    assert [ValueKind.NONE, *OF_VALUES] == list(ValueKind)
