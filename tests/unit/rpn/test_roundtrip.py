"""Text, program and bytes are three forms of one thing."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import ARCHITECTURE_NAMES, Architecture, architecture
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.rpn import instruction_set
from dprobes.rpn.compilation_passes import check_program, parse_file, parse_source
from dprobes.rpn.instruction_encoding import CodeImage, decode_all, decode_one, encode
from dprobes.rpn.instruction_set import OperandKind
from dprobes.rpn.performance_counters import counter_number
from dprobes.rpn.program_text import print_program
from dprobes.rpn.rpn_program import Code, Expression, Instruction, Offset, ProbeDefinition, Program
from dprobes.source_text import SourceFile
from support.random_programs import TABLES, RandomPrograms

SEEDS = st.integers(0, (1 << 32) - 1)
FIXTURES = Path(__file__).parents[2] / "fixtures" / "seeds"
PROGRAMS = sorted(path for path in FIXTURES.glob("*.rpn") if path.name != "test.rpn")
MISPRINTED = {"man-example-6.rpn"}


def _parse(text: str) -> Program:
    return parse_source(SourceFile("case.rpn", text), Diagnostics())


def _program(*instructions: Instruction, labels: dict[str, int] | None = None, name: str = "a") -> Program:
    code = Code(instructions, labels or {})
    return Program(name, tables=TABLES, definitions=(ProbeDefinition(Offset(Expression(0)), code),))


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
@given(seed=SEEDS)
def test_a_printed_program_parses_to_the_same_program(name: str, seed: int) -> None:
    generator = RandomPrograms(Random(seed), architecture(name))
    for program in (generator.wild(), generator.defined()):
        assert _parse(print_program(program)) == program


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
@given(seed=SEEDS)
def test_encoded_instructions_decode_to_themselves(name: str, seed: int) -> None:
    target = architecture(name)
    image = encode(RandomPrograms(Random(seed), target).wild(), target)
    decoded = list(decode_all(image.data, image.word_size, image.byte_order))
    assert [d.offset for d in decoded] == [offset for offset, _ in image.instructions]
    relocated = {r.offset - 1 for r in image.relocations}
    for instruction, (offset, original) in zip(decoded, image.instructions, strict=True):
        assert instruction.row is original.row
        assert instruction.end - offset == original.row.encoded_size(target.word_size, original.operand)
        if offset not in relocated:
            assert instruction.operand == _encoded_operand(original, target, image, offset)


def _encoded_operand(instruction: Instruction, target: Architecture, image: CodeImage, offset: int) -> int | str:
    match instruction.row.operand_kind, instruction.operand:
        case None, _:
            return 0
        case OperandKind.LABEL, name:
            # Labels are local to their code: look from its start to that of the next.
            starts = [*image.handlers, *image.procedures.values(), len(image.data)]
            start, end = max(s for s in starts if s <= offset), min(s for s in starts if s > offset)
            return next(place for place, names in image.labels.items() if name in names and start <= place < end)
        case OperandKind.TABLE, str(name):
            return [table.name for table in TABLES].index(name)
        case OperandKind.COUNTER, str(name):
            return counter_number(name)
        case OperandKind.PROCEDURE, str(name):
            return image.procedures[name]
        case OperandKind.REGISTER, str(name):
            register = target.register(name)
            assert register is not None
            return register.index
        case OperandKind.VALUE, Expression(addend):
            return addend & target.word_mask
        case _, (int() | str()) as operand:
            return operand
    raise AssertionError(instruction)


@pytest.mark.parametrize("row", instruction_set.ROWS, ids=lambda row: row.syntax)
def test_every_row_goes_through_text_and_bytes(row: instruction_set.Row) -> None:
    operands: dict[OperandKind | None, object] = {
        None: None,
        OperandKind.LABEL: "here",
        OperandKind.PROCEDURE: "p",
        OperandKind.VALUE: Expression(-5),
        OperandKind.REGISTER: 6,
        OperandKind.EXTENSION: "sample",
        OperandKind.FIELD: "next.comm",
        OperandKind.TEXT: 'a "text" \\ // ; of ü',
        OperandKind.DISPLACEMENT: -7,
        OperandKind.TABLE: "hits",
        OperandKind.COUNTER: "page-faults",
    }
    operand = operands.get(row.operand_kind, 3)
    instruction = Instruction(row, operand)  # type: ignore[arg-type]
    labels = {"here": 0} if operand == "here" else {}
    text = print_program(_program(instruction, labels=labels))
    assert _parse(text).definitions[0].handler.instructions == (instruction,)
    for name in ("i386", "x86_64", "s390", "s390x"):
        target = architecture(name)
        program = _parse(text + "proc p\nret\nendproc\n")
        image = encode(program, target)
        decoded = decode_one(image.data, 0, target.word_size, target.byte_order)
        assert decoded.row is row
        assert decoded.end == row.encoded_size(target.word_size, operand)


def test_the_encoding_is_that_of_the_original() -> None:
    program = _parse(
        "name = a\nvars = 4\noffset = 0\nagain: push 0x12345678\npop lv, 3\npush tsp, -2\nrol 5\njmp again\n"
    )
    little = encode(program, architecture("i386"))
    assert little.data.hex(" ") == "4c 78 56 34 12 2b 03 00 7e fe ff 3a 05 01 ee ff ff ff"
    big = encode(program, architecture("s390x"))
    assert big.data.hex(" ") == "4c 00 00 00 00 12 34 56 78 2b 00 03 7e ff fe 3a 05 01 ff ff ff ff ff ff ff e6"


def test_symbols_become_relocations() -> None:
    image = encode(_parse("name = a\noffset = 0\nnop\npush table + 8\nexit"), architecture("x86_64"))
    assert [(r.offset, r.symbol, r.addend) for r in image.relocations] == [(2, "table", 8)]
    assert image.data.hex() == "00" + "4c" + "00" * 8 + "0d"


def test_code_that_may_run_off_its_end_is_closed() -> None:
    text = "name = a\noffset = 0\njmp out\nout: nop\noffset = 4\noffset = 8\nexit\nproc p\nnop\nendproc\n"
    image = encode(_parse(text), architecture("i386"))
    assert [i.row.syntax for _, i in image.instructions] == ["jmp <label>", "nop", "exit", "exit", "exit", "nop", "ret"]


def test_code_of_a_builder_may_have_a_label_at_its_end() -> None:
    rows = instruction_set.rows_by_syntax()
    program = _program(Instruction(rows["jz <label>"], "out"), Instruction(rows["exit"]), labels={"out": 2})
    image = encode(program, architecture("i386"))
    assert [i.row.syntax for _, i in image.instructions] == ["jz <label>", "exit", "exit"]


@given(data=st.binary(max_size=60), word_size=st.sampled_from([4, 8]), order=st.sampled_from(["little", "big"]))
def test_random_bytes_decode_to_instructions_that_cover_them(data: bytes, word_size: int, order: str) -> None:
    end = 0
    for instruction in decode_all(data, word_size, "little" if order == "little" else "big"):
        assert instruction.offset == end
        assert instruction.end > end
        end = instruction.end
    assert end == len(data)


def test_a_quoted_symbol_with_the_signs_of_a_pattern_stays_a_symbol() -> None:
    program = Program("a", definitions=(ProbeDefinition(Offset(Expression(0, "operator*")), Code()),))
    assert 'offset = ("operator*")' in print_program(program)
    assert _parse(print_program(program)) == program


def test_a_symbol_that_is_called_like_a_register_stays_a_symbol() -> None:
    push = instruction_set.rows_by_syntax()["push <value>"]
    for symbol in ("eax", "pid", "mem", "lv", "x"):
        program = _program(Instruction(push, Expression(0, symbol)))
        assert _parse(print_program(program)) == program


# The programs of the man page, the paper and the slides, without what is not ours in them: their comments.


@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.name not in MISPRINTED], ids=lambda path: path.stem)
def test_a_program_of_the_seeds_parses_checks_and_prints(path: Path) -> None:
    diagnostics = Diagnostics()
    program = parse_file(path, diagnostics)
    check_program(program, architecture("i386"), diagnostics)
    assert not diagnostics.has_errors
    assert _parse(print_program(program)) == program
    assert encode(program, architecture("i386")).data


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("man-example-1.rpn", []),
        ("man-example-5.rpn", []),
        (
            "man-example-4.rpn",
            ["warning: 'log mrf' needs 2 cells (length address), but at most 1 was pushed"],
        ),
        ("man-example-4.fixed.rpn", []),
        ("man-example-6.fixed.rpn", []),
        ("man-example-7a.rpn", ["note: 'push dif' is written 'push mem, u32' since version 3.4.0"]),
        (
            "man-logstr-snippet.rpn",
            ["note: 'push w, 256' is written 'push 0x100' since version 3.4.0"],
        ),
        ("man-sample-2.rpn", ["note: the handler has no 'exit' at its end; it acts as if it had one"]),
        ("paper-experiment-4.rpn", ["note: 'push eax' is written 'push r, eax'"]),
        ("slides-example-d.rpn", ["note: 'push d,16' is written 'push 0x10' since version 3.4.0"]),
        (
            "man-example-2b-vortex.rpn",
            [
                "note: 'push wif' is written 'push mem, u16' since version 3.4.0",
                "note: the handler has no 'exit' at its end; it acts as if it had one",
            ],
        ),
    ],
)
def test_the_seeds_get_these_messages(name: str, messages: list[str]) -> None:
    diagnostics = Diagnostics()
    check_program(parse_file(FIXTURES / name, diagnostics), architecture("i386"), diagnostics)
    assert [f"{d.severity.value}: {d.message}" for d in diagnostics] == messages


def test_the_misprint_of_example_6_gets_its_own_error() -> None:
    with pytest.raises(SourceError) as caught:
        parse_file(FIXTURES / "man-example-6.rpn", Diagnostics())
    [diagnostic] = caught.value.diagnostics
    assert diagnostic.message == "'type' belongs to a probepoint header, not to the file header"
    assert diagnostic.hint == "did you mean 'typedef'?"


def test_example_6_selects_by_group_and_type() -> None:
    program = parse_file(FIXTURES / "man-example-6.fixed.rpn", Diagnostics())
    assert program.groups == ("filesys", "memory", "process", "faults")
    selected = [d.minor for d in program.definitions if d.group == "process" and "enter" in d.types]
    assert selected == [0]
