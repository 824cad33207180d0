"""
Random programs, for tests of the interpreter, the printer, the encoder, and of other back ends against the interpreter.

A *wild* program is only well-formed: it underflows, jumps anywhere, and reads cells that were never written. A
*defined* one reads only cells that it wrote, so that its outcome is the same in every back end.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dprobes.arch.x86_processors import ACCESSED
from dprobes.keyed.table_entries import stores_of
from dprobes.rpn import instruction_set
from dprobes.rpn.control_flow import stack_effect
from dprobes.rpn.instruction_set import Flow, OperandKind, Row
from dprobes.rpn.keyed_tables import Key, KeyKind, Range, Table, TableKind, Unit
from dprobes.rpn.performance_counters import COUNTERS
from dprobes.rpn.rpn_program import (
    Access,
    Address,
    Code,
    Expression,
    Glob,
    Instruction,
    Location,
    ModuleType,
    Offset,
    Operand,
    ProbeDefinition,
    Procedure,
    Program,
    Sampler,
    Tracepoint,
    Usdt,
)
from dprobes.testing import FakeContext

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.arch import Architecture, Register

__all__ = ["SYMBOLS", "TABLES", "VARIABLES", "RandomPrograms", "random_context"]

VARIABLES = 4
"""The number of variables of each kind in a program."""

SYMBOLS = ("data", "table", "Buffer.cold", "operator new[]")
_FIELDS = ("missing", "prev_pid", "next.comm")
"""Fields of a tracepoint; the first one does not exist."""
_TEXTS = ("", "text", "te", "random-program", "random-program-s", 'a "quoted" \\ one', "längeres, // kein Kommentar")
"""Strings with which memory and process names are compared."""
TABLES = (
    Table("hits", TableKind.COUNT, (Key(KeyKind.WORD), Key(KeyKind.STRING, 11)), room=3),
    Table("sums", TableKind.SUM, (Key(KeyKind.ADDRESS), Key(KeyKind.COMM)), room=5),
    Table("least", TableKind.MIN, (Key(KeyKind.WORD),)),
    Table("most", TableKind.MAX, (), unit=Unit.NANOSECONDS),
    Table("means", TableKind.AVG, (Key(KeyKind.WORD),) * 2),
    Table("all", TableKind.STATS, (Key(KeyKind.STRING, 64),)),
    Table("powers", TableKind.HIST, (Key(KeyKind.WORD),), room=7, unit=Unit.BYTES),
    Table("steps", TableKind.LHIST, (), Range(-3, 1000, 70)),
    Table("latest", TableKind.LAST, (Key(KeyKind.WORD),), room=2),
    Table("level", TableKind.LAST, ()),
    Table("levels", TableKind.LAST, (Key(KeyKind.SIGNED),), value=Key(KeyKind.LONG)),
    Table("wide", TableKind.STATS, (Key(KeyKind.SIGNED_LONG),), room=3, value=Key(KeyKind.LONG)),
    Table("names", TableKind.LAST, (Key(KeyKind.WORD),), room=3, value=Key(KeyKind.STRING, 11)),
    Table("texts", TableKind.COUNT, (Key(KeyKind.TEXT, 11),), room=5),
    Table("kept", TableKind.LAST, (), value=Key(KeyKind.TEXT, 9)),
    Table("frames", TableKind.LAST, (Key(KeyKind.FRAMES, 2),), room=4, value=Key(KeyKind.COMM)),
    Table("stacks", TableKind.COUNT, (Key(KeyKind.USER_FRAMES, 2),), room=4),
)
"""The keyed tables of a program."""

_ARGUMENTS = ("-4@%eax", "1@%bh", "8@$-5", "-2@(%ebx,%ecx,4)", "4@data+4", "8f@%xmm0", "-8@4(%esi)", "1@0x1000")
"""Arguments of a USDT probe for i386; for x86-64 the address registers are renamed."""
_LITTLE = ("log <count>", "log b, <count>", "log w, <count>", "log d, <count>", "dup <times>", "ros <cells>")


def random_context(random: Random, architecture: Architecture) -> FakeContext:
    """Return a context with random memory, registers and other values that these programs may read."""
    mask = architecture.word_mask
    names = [r.name for r in architecture.registers if r.bits <= architecture.word_bits and r.memory_offset is None]
    context = FakeContext(
        architecture.name,
        registers={name: _value(random) & mask & ((1 << 16) - 1) for name in names},
        memory={0x1000: random.randbytes(64) + b"text\0" + bytes(8), 0x1FF8: random.randbytes(16)},
        read_only={0x4000: random.randbytes(64)},
        pid=random.randrange(1 << 16),
        tid=random.randrange(1 << 16),
        uid=random.randrange(1 << 16),
        cpu=random.randrange(8),
        task=random.randrange(1 << 32),
        time=random.randrange(1 << 64),
        comm=random.choice(("text", "random-program-with-a-long-name", "")),
        segments={0x2B: 0x1000},
        ports={0x60: random.randrange(1 << 32)},
        physical_memory={0x1000: random.randbytes(64)},
        page_frames={0x1000: 0x7000},
        symbols=dict.fromkeys(SYMBOLS, 0x1010),
        kernel_stack=[random.randrange(1 << 64) & mask for _ in range(3)],
        user_stack=[random.randrange(1 << 64) & mask for _ in range(3)],
        traced_fields={name: random.randrange(1 << 64) for name in _FIELDS[1:]},
        usdt_arguments=[a.replace("%e", "%r") if "(" in a and architecture.word_size == 8 else a for a in _ARGUMENTS],
        entry=_entry(random, architecture),
        counters={counter.name: random.randrange(1 << 64) for counter in COUNTERS[::2]},
        cpuid={1: (1, 2, 3, 4)},
        msr={0x10: random.randrange(1 << 64)},
        tables={"gdtr": (0x1000, 0xFF), "idtr": (0x2000, 0x7F)},
    )
    context.keyed_tables = stores_of(TABLES)
    return context


def _entry(random: Random, architecture: Architecture) -> dict[str, int] | None:
    """Return random registers at the entry of the returning call; None, which is rare, means an unseen entry."""
    if random.randrange(4) == 0:
        return None
    registers = {r.name: random.randrange(1 << 64) & architecture.word_mask for r in architecture.registers}
    counters = {counter.name: random.randrange(1 << 64) for counter in COUNTERS[:3]}
    return {"time": random.randrange(1, 1 << 64), **registers, **counters}


def _value(random: Random) -> int:
    """Return a random number, most often at or near a limit of a number type."""
    match random.randrange(5):
        case 0:
            return random.randrange(-4, 12)
        case 1:
            return random.choice((0x1000, 0x1010, 0x1FFC, 0x2FFE, 0x3000, 0x4000, 0x2B, 0x60))
        case 2:
            return random.choice((0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, -0x80000000, 1000, 1024, 0xFFFF))
        case 3:
            return random.randrange(1 << 16)
        case _:
            return random.randrange(1 << 32)


def _operated(row: Row, tables: Sequence[Table]) -> list[Table]:
    """Return the tables on which an instruction can operate."""
    return [each for each in tables if row.operator != "add" or each.takes_additions]


class RandomPrograms:
    """
    A generator of programs for one processor from a source of random numbers.

    ``allows`` restricts the instructions: it gets a row, and the register that is its operand, or None. ``tables`` are
    the keyed tables of each program.
    """

    def __init__(
        self,
        random: Random,
        architecture: Architecture,
        allows: Callable[[Row, Register | None], bool] = lambda row, register: True,
        tables: Sequence[Table] = TABLES,
    ) -> None:
        self._random = random
        self._architecture = architecture
        self._allows = allows
        self._tables = tuple(tables)
        is_x86 = architecture.name in ("i386", "x86_64")
        self._rows = [
            row
            for row in instruction_set.ROWS
            if (is_x86 or row.group not in (instruction_set.Group.IO, instruction_set.Group.SEGMENT))
            and (row.operand_kind is OperandKind.REGISTER or allows(row, None))
            and (row.operand_kind is not OperandKind.TABLE or _operated(row, tables))
        ]
        self._rows = [row for row in self._rows if row.operand_kind is not OperandKind.REGISTER or self._registers(row)]

    def _registers(self, row: Row) -> list[str]:
        access = row.syntax.partition(",")[0]
        # Only programs of 'dprobes storage' know the distance of the accessed memory.
        return [
            r.name
            for r in self._architecture.registers
            if r.may_be(access) and r.name != ACCESSED and self._allows(row, r)
        ]

    def wild(self) -> Program:
        """Return a well-formed program, whose behaviour may be unspecified."""
        names = [f"p{n}" for n in range(self._random.randrange(3))]
        definitions = tuple(self._definition(self._wild_code(names)) for _ in range(self._random.choice((1, 1, 1, 2))))
        procedures = tuple(Procedure(name, self._wild_code(names)) for name in names)
        return self._program(definitions, procedures)

    def defined(self) -> Program:
        """Return a program that reads only cells that it wrote; its outcome is the same in every back end."""
        names = [f"p{n}" for n in range(self._random.randrange(3))]
        framed = self._is_framed()
        procedures = tuple(Procedure(name, self._defined_code(names, "ret", framed)) for name in names)
        handler = self._defined_code(names, "exit", framed)
        definition = ProbeDefinition(Offset(Expression(0)), handler, at_return=True)  # so that it may ask for the entry
        return self._program((definition,), procedures, is_small=True)

    def together(self, count: int, *, wild: bool) -> Program:
        """Return a program of ``count`` handlers, ``wild`` or defined, with common procedures, variables and tables."""
        names = [f"p{n}" for n in range(self._random.randrange(4))]
        framed = self._is_framed()

        def code(ending: str) -> Code:
            return self._wild_code(names) if wild else self._defined_code(names, ending, framed)

        procedures = tuple(Procedure(name, code("ret")) for name in names)
        definitions = tuple(ProbeDefinition(Offset(Expression(0)), code("exit"), minor=n) for n in range(count))
        return self._program(definitions, procedures, is_small=not wild)

    def _is_framed(self) -> bool:
        """Return whether code moves SBP, as in half of the programs; this choice changes no other random number."""
        other = Random()
        other.setstate(self._random.getstate())
        return other.random() < 0.5

    def _defined_code(self, procedures: list[str], ending: str, framed: bool) -> Code:
        writer = _Defined(self._random, self._architecture, self._rows, procedures, self._allows, self._tables, framed)
        return writer.code(ending)

    def _program(
        self, definitions: tuple[ProbeDefinition, ...], procedures: tuple[Procedure, ...], *, is_small: bool = False
    ) -> Program:
        random = self._random
        return Program(
            name=random.choice(("case", "/usr/lib/libc.so.6", 'odd "name" \\ //')),
            modtype=random.choice([each for each in ModuleType if each is not ModuleType.TRACEPOINT or not is_small]),
            major=random.randrange(1 << 16),
            id=random.randrange(1 << 16),
            vars=VARIABLES,
            gvars=VARIABLES,
            cvars=VARIABLES,
            tvars=VARIABLES,
            tables=self._tables,
            jmpmax=random.choice((0, 10, 100, 256)),
            logmax=random.choice((1, 16, 100, 1024)) if not is_small else random.choice((64, 200, 1024)),
            ex_logmax=random.choice((1, 40, 200, 1024)),
            heapmax=random.choice((40, 100, 16384)),
            autostacktrace=random.random() < 0.3,
            logonfault=random.random() < 0.3,
            groups=random.choice(((), ("a", "b"))),
            types=random.choice(((), ("x",))),
            definitions=definitions,
            procedures=procedures,
        )

    def _definition(self, handler: Code) -> ProbeDefinition:
        random = self._random
        return ProbeDefinition(
            location=self._location(),
            handler=handler,
            opcode=random.choice((None, 0, 0x55)),
            minor=random.randrange(1 << 16),
            watchpoint=random.choice((None, *Access)),
            group=random.choice((None, "a")),
            types=random.choice(((), ("x",), ("x", "y"))),
            passcount=random.choice((0, 3, 0x7FFFFFFF)),
            maxhits=random.choice((0, 1)),
            logonfault=random.choice((None, False, True)),
            exception_mask=random.choice((0x0FFF, 0x1FFF, 0, 0xFFFF, random.randrange(1 << 16))),
            heap=random.choice((None, 0, 64)),
            at_return=random.random() < 0.2,
        )

    def _location(self) -> Location:
        random = self._random
        expression = Expression(random.choice((0, 1, 0x1234, -8)), random.choice(SYMBOLS))
        number = Expression(random.randrange(1 << 40))
        match random.randrange(7):
            case 0:
                return Offset(expression)
            case 5:
                return Tracepoint(random.choice(("sched", "syscall")), random.choice(("sched_switch", "openat")))
            case 6:
                return Usdt(random.choice(("demo", "lib*")), random.choice(("tick", "gc__start", "[ab]?")))
            case 1:
                return Offset(number)
            case 2:
                return Glob(random.choice(("sys_*", "[a-c]?", "operator*")))
            case 3:
                return Address(expression, random.choice((None, number)))
            case _:
                counter = random.choice((None, "page-faults", "cycles"))
                return Sampler(random.randrange(1, 10_001), counter)

    def _wild_code(self, procedures: list[str]) -> Code:
        random = self._random
        count = random.randrange(1, 30)
        labels = {f"l{n}": random.randrange(count) for n in range(random.randrange(4))}
        rows = [
            row
            for row in self._rows
            if (row.operand_kind is not OperandKind.LABEL or labels)
            and (row.operand_kind is not OperandKind.PROCEDURE or procedures)
        ]
        # Half of the instructions push something, so that there is something to work with.
        pushes = [row for row in rows if row.syntax == "push <value>"]
        instructions = tuple(
            Instruction(row, self._operand(row, list(labels), procedures))
            for row in (random.choice(pushes if random.random() < 0.4 else rows) for _ in range(count))
        )
        return Code(instructions, labels)

    def _operand(self, row: Row, labels: list[str], procedures: list[str]) -> Operand:
        random = self._random
        match row.operand_kind:
            case None:
                return None
            case OperandKind.LABEL:
                return random.choice(labels)
            case OperandKind.PROCEDURE:
                return random.choice(procedures)
            case OperandKind.EXTENSION:
                return random.choice(("sample", "a.b"))
            case OperandKind.TABLE:
                return random.choice(_operated(row, self._tables)).name
            case OperandKind.FIELD:
                return random.choice(_FIELDS)
            case OperandKind.TEXT:
                return random.choice(_TEXTS)
            case OperandKind.COUNTER:
                return random.choice(COUNTERS[:4]).name
            case OperandKind.ARGUMENT:
                return random.randrange(len(_ARGUMENTS) + 2)
            case OperandKind.REGISTER:
                return random.choice(self._registers(row))
            case OperandKind.VALUE:
                return _pushed(random, self._architecture)
            case OperandKind.LV | OperandKind.GV | OperandKind.CV | OperandKind.TV:
                return random.randrange(VARIABLES)
            case OperandKind.EXIT_CODE:
                return random.randrange(5)
            case OperandKind.DISPLACEMENT:
                return random.choice((0, 1, -1, 5, -5, 1024, -0x8000, 0x7FFF))
            case OperandKind.BITS:
                return random.choice((0, 1, 8, 31, 32, 33, 63, 64, 65, 255))
            case _:
                return random.choice((0, 1, 2, 3, 200))


def _pushed(random: Random, architecture: Architecture) -> Expression:
    if random.random() < 0.1:
        return Expression(random.choice((0, 4, -4)), random.choice(SYMBOLS))
    value = _value(random)
    return Expression(value if architecture.word_size == 8 or value >= 0 else max(value, -0x80000000))


class _Defined:
    """
    A generator of code whose stack depth is known at every instruction.

    Instructions that access cells, log bytes or heap bytes by position are generated in patterns that read only bytes
    that exist.
    """

    # What changes a position, or writes where the code around it does not expect it: only in patterns.
    _PATTERNS = ("callk", "restore", "pop lp", "pop stp", "push h", "pop h", "pop sbp", "pop tsp", "copy", "push sbp",
                 "push tsp", "malloc", "free", "trace", "sx", "ux")  # fmt: skip

    def __init__(
        self,
        random: Random,
        architecture: Architecture,
        rows: list[Row],
        procedures: list[str],
        allows: Callable[[Row, Register | None], bool],
        tables: Sequence[Table],
        framed: bool,
    ) -> None:
        self._random = random
        self._tables = tables
        self._framed = framed  # whether code of the program moves SBP; where none does, it is at the bottom
        self._below = 0
        self._allows = allows
        self._architecture = architecture
        self._procedures = procedures
        self._rows = [
            row
            for row in rows
            if row.flow is Flow.NEXT
            and not row.syntax.startswith(self._PATTERNS)
            and "?" not in row.effect
            and row.operand_kind is not OperandKind.REGISTER
        ]
        self._registers = [row for row in rows if row.syntax in ("push r, <register>", "push u, <register>")]
        self._patterns = [
            self._relative_access,
            self._framed_access,
            self._popped_dup,
            self._popped_log,
            self._rewound_stack,
            self._rewound_log,
            self._rewound_traces,
            self._shown_cells,
            self._shown_variables,
            self._heap,
            self._caught_call,
            self._raise,
            self._early_end,
        ]
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._depth = 0

    def code(self, ending: str) -> Code:
        """Return code in which every path ends with the instruction ``ending``."""
        if not self._framed and ending == "ret":
            self._patterns.remove(self._framed_access)  # how much the callers have on the stack differs
        self._block(self._random.randrange(1, 12), nesting=0)
        self._emit("log <count>", min(self._depth, 4))
        self._emit("ros <cells>", self._depth)  # so that a call leaves the stack as it was
        self._emit(ending)
        return Code(tuple(self._instructions), self._labels)

    def _emit(self, syntax: str, operand: Operand = None) -> None:
        instruction = Instruction(instruction_set.rows_by_syntax()[syntax], operand)
        effect = stack_effect(instruction, self._architecture, self._tables)
        while self._depth < effect.popped:
            self._emit("push <value>", _pushed(self._random, self._architecture))
        self._instructions.append(instruction)
        self._depth += effect.pushed - effect.popped

    def _label(self) -> str:
        return f"l{len(self._labels)}"

    def _block(self, statements: int, nesting: int) -> None:
        for _ in range(statements):
            choice = self._random.randrange(12)
            if choice == 0 and nesting < 2:
                self._branch(nesting)
            elif choice == 1 and nesting < 2:
                self._loop(nesting)
            elif choice == 2 and self._procedures:
                self._emit("call <procname>", self._random.choice(self._procedures))
            elif choice == 3 and nesting < 2:
                self._guarded()
            elif choice == 4:
                row = self._random.choice(self._registers)
                self._register_push(row)
            elif choice in (5, 6):
                self._random.choice(self._patterns)()
            else:
                self._plain(self._random.choice(self._rows))

    def _plain(self, row: Row) -> None:
        operand: Operand = None
        match row.operand_kind:
            case None:
                pass
            case OperandKind.FIELD:
                operand = self._random.choice(_FIELDS)
            case OperandKind.TEXT:
                operand = self._random.choice(_TEXTS)
            case OperandKind.TABLE:
                operand = self._random.choice(_operated(row, self._tables)).name
            case OperandKind.COUNTER:
                operand = self._random.choice(COUNTERS[:4]).name
            case OperandKind.ARGUMENT:
                operand = self._random.randrange(1, len(_ARGUMENTS) + 2)
            case OperandKind.VALUE:
                operand = _pushed(self._random, self._architecture)
            case OperandKind.LV | OperandKind.GV | OperandKind.CV | OperandKind.TV:
                operand = self._random.randrange(VARIABLES)
            case _:
                operand = self._random.randrange(4) if row.syntax in _LITTLE else self._random.randrange(1, 70)
        if row.faults and row.faults != (instruction_set.ExceptionCode.LOG_OVERFLOW,):
            self._guarded(row, operand)
        else:
            self._emit(row.syntax, operand)

    def _register_push(self, row: Row) -> None:
        access = row.syntax.partition(",")[0]
        wide = [
            r.name
            for r in self._architecture.registers
            if r.may_be(access) and not r.selector_cells and r.memory_offset is None and not r.parts
            and r.bits <= self._architecture.word_bits and r.name != ACCESSED and self._allows(row, r)
        ]  # fmt: skip
        self._emit(row.syntax, self._random.choice(wide))

    def _guarded(self, row: Row | None = None, operand: Operand = None) -> None:
        """
        Append an instruction that may fault between ``sx`` and ``ux``; the depth is equal with and without a fault.

        Without ``row``, the instruction is a random one.
        """
        faulting = [r for r in self._rows if r.faults and r.operand_kind is None]
        row = row or self._random.choice(faulting)
        effect = stack_effect(Instruction(row, operand), self._architecture, self._tables)
        handler, done = f"h{len(self._labels)}", f"d{len(self._labels)}"
        self._labels[handler] = self._labels[done] = -1
        self._emit("sx <label>", handler)
        self._emit(row.syntax, operand)
        after = self._depth
        self._emit("ux")
        self._emit("jmp <label>", done)
        self._labels[handler] = len(self._instructions)
        self._depth = after - effect.pushed + 3
        self._emit("log <count>", 3)
        for _ in range(effect.pushed):
            self._emit("push <value>", Expression(0))
        self._labels[done] = len(self._instructions)
        self._emit("nop")

    def _branch(self, nesting: int) -> None:
        label = self._label()
        self._labels[label] = -1
        if not self._depth:
            self._emit("push <value>", _pushed(self._random, self._architecture))
        self._emit(self._random.choice(("jlt", "jle", "jgt", "jge", "jz", "jnz")) + " <label>", label)
        self._neutral(nesting)
        self._labels[label] = len(self._instructions)
        self._emit("nop")

    def _loop(self, nesting: int) -> None:
        self._emit("push <value>", Expression(self._random.randrange(1, 4)))
        label = self._label()
        self._labels[label] = len(self._instructions)
        self._neutral(nesting)
        self._emit("loop <label>", label)
        self._emit("ros <cells>", 1)

    def _neutral(self, nesting: int) -> None:
        """
        Append a block that accesses no cell below its own, and leaves the depth unchanged.

        ``nesting`` is the number of blocks around it.
        """
        outer, self._depth = self._depth, 0
        self._below += outer
        self._block(self._random.randrange(1, 5), nesting + 1)
        if self._depth:
            self._emit("ros <cells>", self._depth)
        self._below -= outer
        self._depth = outer

    # Patterns: they leave the cells that they find alone, and their results on top of them

    def _value(self) -> None:
        self._emit("push <value>", _pushed(self._random, self._architecture))

    def _number(self, number: int) -> None:
        self._emit("push <value>", Expression(number))

    def _new_label(self, prefix: str) -> str:
        label = f"{prefix}{len(self._labels)}"
        self._labels[label] = -1
        return label

    def _place(self, label: str) -> None:
        self._labels[label] = len(self._instructions)
        self._emit("nop")

    def _relative_access(self) -> None:
        """Append a read or write of an existing cell at a distance from TSP."""
        random = self._random
        for _ in range(random.randrange(1, 4)):
            self._value()
        n = random.randrange(self._depth)
        match random.randrange(6):
            case 0:
                self._emit("push tsp, <n>", n)
            case 1:
                self._number(n)
                self._emit("push tsp")
            case 2:
                self._emit("copy tsp, <n>", n)
            case 3:
                self._number(n)
                self._emit("copy tsp")
            case 4:
                self._value()
                self._emit("pop tsp, <n>", n + 1)
            case 5:
                self._number(n)
                self._value()
                self._emit("pop tsp")

    def _framed_access(self) -> None:
        """
        Append a read or write of an existing cell at a distance from SBP.

        SBP is the TSP before some pushes, or that at the start.
        """
        random = self._random
        self._value()
        base = -self._below
        if self._framed:
            base = self._depth
            self._emit("save tsp")
            self._emit("restore sbp")
        for _ in range(random.randrange(3)):
            self._value()
        n = random.randrange(base - self._depth, base)
        match random.randrange(6):
            case 0:
                self._emit("push sbp, <n>", n)
            case 1:
                self._number(n)
                self._emit("push sbp")
            case 2:
                self._emit("copy sbp, <n>", n)
            case 3:
                self._number(n)
                self._emit("copy sbp")
            case 4:
                self._value()
                self._emit("pop sbp, <n>", n)
            case 5:
                self._number(n)
                self._value()
                self._emit("pop sbp")

    def _popped_dup(self) -> None:
        count = self._random.choice((0, 1, 5, 40))
        self._number(count)
        self._value()
        self._emit("dup")
        self._depth += count  # the table does not say how many

    def _popped_log(self) -> None:
        for _ in range(self._random.randrange(3)):
            self._value()
        count = self._random.randrange(self._depth + 1)
        self._number(count)
        self._emit("log")
        self._depth -= count

    def _rewound_stack(self) -> None:
        """Append pushes, and the restoration of the earlier TSP by its distance, or from SBP."""
        depth, count = self._depth, self._random.randrange(4)
        if self._random.random() < 0.5 or not self._framed:
            self._emit("save tsp")
            for _ in range(count):
                self._value()
            self._emit("push tsp, <n>", count)
        else:
            self._emit("save tsp")
            self._emit("restore sbp")
            for _ in range(count):
                self._value()
            self._emit("save sbp")
        self._emit("restore tsp")
        self._depth = depth

    def _rewound_log(self) -> None:
        self._emit("push lp")
        self._value()
        self._emit(self._random.choice(("log b, <count>", "log <count>")), 1)
        self._emit("pop lp")

    def _rewound_traces(self) -> None:
        self._emit("push stp")
        is_purged = self._random.random() < 0.3
        if is_purged:
            self._emit("purge st")
        self._emit("log st")
        if is_purged or self._random.random() < 0.5:
            self._emit("ros <cells>", 1)
        else:
            self._emit("pop stp")

    def _shown_cells(self) -> None:
        """Append a stack trace with the topmost cells, then an empty one."""
        self._value()
        count = self._random.randrange(1, self._depth + 1)
        self._emit("save tsp")
        self._number(count)
        self._emit("trace pv")
        self._emit("log st")
        self._number(0)
        self._number(0)
        self._emit("trace pv")

    def _shown_variables(self) -> None:
        self._number(self._random.randrange(VARIABLES + 1))
        self._number(self._random.randrange(VARIABLES + 1))
        self._guarded(instruction_set.rows_by_syntax()[self._random.choice(("trace lv", "trace gv"))])
        self._emit("log st")

    def _heap(self) -> None:
        """Append the allocation of a heap block, a write to all of it, and reads with other widths."""
        random, word = self._random, self._architecture.word_size
        syntaxes, size = instruction_set.rows_by_syntax(), 8 * random.randrange(1, 4)
        self._number(random.choice((size, size - 1, size - 3)) if word == 8 else size)
        self._guarded(syntaxes["malloc"])
        if random.random() < 0.3:
            self._number(random.choice((1, 100)))
            self._guarded(syntaxes["malloc"])
            self._guarded(syntaxes["free"])
        self._access_heap(random.randrange(4), size, stores=True)
        for _ in range(random.randrange(1, 3)):
            self._access_heap(random.randrange(4), size, stores=False)
        if random.random() < 0.7:
            self._guarded(syntaxes["free"])

    def _access_heap(self, shift: int, size: int, *, stores: bool) -> None:
        """
        Append code that writes all of the block whose handle is on top; without ``stores``, reads and logs a part.

        ``shift`` is the binary logarithm of the width in bytes; ``size`` is that of the block.
        """
        random, count = self._random, size >> shift
        cells = count * max(1, (1 << shift) // self._architecture.word_size)
        if stores:
            for _ in range(cells):
                self._value()
            self._emit("push tsp, <n>", cells)
            self._number(0)
            self._guarded(instruction_set.rows_by_syntax()[f"pop h, u{8 << shift}, <values>"], count)
            return
        first = random.randrange(count)
        count = random.randrange(1, count - first + 1)
        self._emit("dup <times>", 1)
        self._number(random.choice((first << shift,) * 4 + (1 << 16,)))
        self._guarded(instruction_set.rows_by_syntax()[f"push h, u{8 << shift}, <values>"], count)
        self._emit("log <count>", count * max(1, (1 << shift) // self._architecture.word_size))

    def _caught_call(self) -> None:
        """Append a call of a procedure whose exceptions are caught; SBP has the depth of the stack before it."""
        if not self._procedures or not self._framed:
            return
        handler, done = self._new_label("h"), self._new_label("d")
        self._emit("save tsp")
        self._emit("restore sbp")
        self._emit("sx <label>", handler)
        self._emit("call <procname>", self._random.choice(self._procedures))
        self._emit("ux")
        self._emit("jmp <label>", done)
        depth = self._depth
        self._place(handler)
        self._depth = 3
        self._emit("log <count>", 3)
        self._emit("save sbp")
        self._emit("restore tsp")
        self._depth = depth
        self._place(done)

    def _raise(self) -> None:
        """Append the raising of an exception, conditional or not; without an exception handler it ends the handler."""
        over = self._new_label("o")
        self._value()
        self._emit("jlt <label>", over)
        for _ in range(2):
            self._value()
        self._number(self._random.choice((0x8000, 0x18000, 1, 0)))
        self._emit("rx")
        self._depth -= 3
        self._place(over)

    def _early_end(self) -> None:
        over = self._new_label("o")
        self._value()
        self._emit("jge <label>", over)
        endings = ("abort", "remove", "exit", "exit <code>", "skip")
        ending = self._random.choice([e for e in endings if self._allows(instruction_set.rows_by_syntax()[e], None)])
        self._emit(ending, self._random.randrange(1, 4) if ending == "exit <code>" else None)
        self._place(over)
