"""Blocks of the tool mean what the same statements mean in a handler; what they act on is what their host says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.dpc.tool_interpreter import ToolError, ToolInterpreter
from dprobes.dpc.typedtree.process_items import ItemKind, ProcessItem
from dprobes.errors import SourceError
from dprobes.keyed.table_entries import stores_of
from dprobes.keyed.table_layout import shown_value
from dprobes.preprocessor import preprocess
from dprobes.rpn.instruction_set import CALL_DEPTH_MAX, ExceptionCode, Token
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, run_handler
from dprobes.vm import Ending
from support.rounds import rounds
from unit.dpc.test_against_gcc import Writer

if TYPE_CHECKING:
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.typed_values import VariableKind
    from dprobes.rpn.rpn_program import Program

ROUNDS = rounds(400)


ITEMS = {
    (ItemKind.TASKS, None): [
        ProcessItem((1, 1, 0), (b"S", b"init")),
        ProcessItem((7, 7, 1), (b"R", b"sh")),
        ProcessItem((7, 9, 1), (b"D", b"worker\x1b[1m")),
    ],
    (ItemKind.FILES, 1): [ProcessItem((0,), (b"/dev/null",)), ProcessItem((3,), (b"socket:[77]",))],
    (ItemKind.FILES, 7): [],
    (ItemKind.MAPS, 7): [
        ProcessItem((0x1000, 0x3000, 0), (b"r-xp", b"/bin/sh")),
        ProcessItem((2**63, 2**63 + 8, 16), (b"rw-p", b"")),
    ],
}


class Host:
    """Remember what blocks do."""

    def __init__(self, program: Program) -> None:
        self.variables: dict[tuple[VariableKind, int], int] = {}
        self.tables = stores_of(program.tables)
        self.done: list[Any] = []

    def variable(self, kind: VariableKind, index: int) -> int:
        return self.variables.get((kind, index), 0)

    def set_variable(self, kind: VariableKind, index: int, value: int) -> None:
        self.variables[kind, index] = value

    def table_value(self, table: int, key: bytes) -> int:
        return self.tables[table].value(key)

    def table_kept(self, table: int, key: bytes) -> bytes:
        return self.tables[table].kept(key)

    def tally(self, table: int, key: bytes, value: int) -> None:
        self.tables[table].tally(key, value)

    def add(self, table: int, key: bytes, value: int) -> None:
        self.tables[table].add(key, value)

    def keep(self, table: int, key: bytes, value: bytes) -> None:
        self.tables[table].keep(key, value)

    def delete(self, table: int, key: bytes) -> None:
        self.tables[table].delete(key)

    def clear(self, table: int) -> None:
        self.tables[table].clear()

    def show(self, table: int, rows: int | None) -> None:
        contents = self.tables[table].contents()
        values = sorted((row.key.hex(), shown_value(contents.table, row.cells)) for row in contents.rows)
        self.done.append((contents.table.name, rows, values))

    def items(self, kind: ItemKind, process: int | None) -> list[ProcessItem]:
        self.done.append((kind.value, process))
        return ITEMS.get((kind, process), [])

    def cat(self, path: str) -> None:
        self.done.append(("cat", path))

    def print(self, template: str, data: bytes) -> None:
        self.done.append((template, data))

    def quit(self) -> None:
        self.done.append("quit")

    def system(self, name: str) -> int:
        return {"pid": 7, "time": 2**63 + 5}.get(name, 0)


def compiled(text: str, word_size: int = 8) -> tuple[Program, ToolProgram]:
    diagnostics = Diagnostics()
    source = preprocess(SourceFile("blocks.dpc", text), diagnostics)
    (compilation,), tool = compile_text(source, diagnostics, module="m", word_size_of=lambda _: word_size)
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    assert tool is not None
    return program, tool


def executed(text: str, word_size: int = 8) -> list[Any]:
    program, tool = compiled(text, word_size)
    host = Host(program)
    interpreter = ToolInterpreter(tool, host)
    for block in tool.blocks:
        try:
            interpreter.execute(block)
        except ToolError as error:
            host.done.append((error.code, "" if error.span is None else error.span.text))
    return host.done


def printed(text: str, word_size: int = 8) -> list[tuple[str, list[int]]]:
    """Return the templates that are printed, each with the words of its record."""
    found = []
    for template, data in executed(text, word_size):
        words = [int.from_bytes(data[n : n + 8], "little") for n in range(0, len(data), 8)]
        found.append((template, words))
    return found


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_statements_mean_what_they_mean_in_a_handler(seed: int, bits: int) -> None:
    writer = Writer(5000 + seed, bits)
    body = writer.declarations() + " ".join(writer.statement(3) for _ in range(4))
    names = ", ".join(f"(long long){name}" for name, _ in writer.names)
    text = f'f() {{ {body} printf("%d %d %d %d %d %d", {names}); }}'
    program, _ = compiled(f"{text} begin {{ }}", bits // 8)
    outcome = run_handler(program, FakeContext("i386" if bits == 32 else "x86_64"))
    ours = executed(f"f() {{ }} begin {{ {text[text.index('{') + 1 :]}", bits // 8)
    if outcome.ending is Ending.ABORT:
        assert ours == [(ExceptionCode.DIVIDE_BY_ZERO, ours[0][1])]
    else:
        log = outcome.log
        if len(log) % 8:  # items, for what may fail
            log = b"".join(log[n + 3 : n + 11] for n in range(0, len(log), 11))
        assert [data for _, data in ours] == [log], text


def test_functions_and_recursion() -> None:
    text = """
    long fib(long n) { if (n < 2) return n; return fib(n - 1) + fib(n - 2); }
    void nothing(int *p, int x) { x = x + 1; }
    f { }
    begin { nothing(0, 1); printf("%d", fib(12)); }
    """
    assert printed(text) == [("%(fib)nd", [144])]


def test_variables_of_the_program() -> None:
    text = """
    static char narrow; static unsigned int cells[3]; global long common;
    f { }
    begin {
        narrow = 200; cells[1] = -1; common = -7;
        for (int i = 0; i < 3; i++) cells[i] += i;
        printf("%d %d %d %d", (long)narrow, (long)cells[1], (long)cells[2], common--);
        printf("%d", common);
    }
    """
    assert [words for _, words in printed(text)] == [[2**64 - 56, 0, 2, 2**64 - 7], [2**64 - 8]]


def test_variables_and_functions_of_64_bits_in_programs_of_32() -> None:
    text = """
    static int before; static long long wide[2]; global unsigned long long common; static int after;
    long long mix(int a, long long b, short c) { return b * a + c; }
    f { }
    begin {
        before = after = 7; wide[1] = 1ll << 40; wide[before - 7] -= 2; common = mix(3, wide[1], -1);
        printf("%d %d %u", wide[0], wide[1]++, common);
        printf("%d %d", wide[1], (long long)(before + after));
    }
    """
    assert [words for _, words in printed(text, 4)] == [
        [2**64 - 2, 1 << 40, (3 << 40) - 1],
        [(1 << 40) + 1, 14],
    ]


def test_what_the_tool_is() -> None:
    text = 'f { } begin { printf("%d %u", (long)pid, nsecs); printf("%d", (long)(comm == "dprobes")); }'
    assert [words for _, words in printed(text)] == [[7, 2**63 + 5], [1]]


def test_tables() -> None:
    text = """
    f { }
    begin {
        @n[1, comm] = count(); @n[1, comm]++; @s[2] += 5; @s[2] -= 7; @last = 9;
        print(@n); print(@s, 3); delete(@s[2]); print(@s); clear(@n); print(@n);
        printf("%d %d", @last, @n[1, comm]);
    }
    """
    name = b"dprobes".ljust(16, b"\0").hex()
    assert executed(text) == [
        ("n", None, [("0100000000000000" + name, 2)]),
        ("s", 3, [("0200000000000000", -2)]),
        ("s", None, []),
        ("n", None, []),
        ("%(last)nd %(n)nd", (9).to_bytes(8, "little") + bytes(8)),
    ]


def test_what_tables_keep_is_printed_tested_and_a_key() -> None:
    text = """
    f(char *p, q) { @path[q] = str(p, 10); @stack = kstack(2); }
    begin {
        if (@path[1] && @stack && @path[1] == "/etc" && startswith(@path[1], "/e"))
            printf("%s%k", @path[1], @stack);
        if (!@path[2] && @path[2] == "" && @path[1] != "/e") printf("%s", @path[2]);
        @n[@path[1], @stack] = count(); print(@n);
    }
    """
    program, tool = compiled(text)
    host = Host(program)
    path, stack = b"/etc".ljust(16, b"\0"), (0x1000).to_bytes(8, "little") + bytes(8)
    host.tables[0].keep((1).to_bytes(8, "little"), path)
    host.tables[1].keep(b"", stack)
    ToolInterpreter(tool, host).execute(tool.blocks[0])
    assert host.done == [
        ("%(path)*.10~s%(stack)*k", b"\1\4\0/etc\x09\1\0" + stack[:8]),
        ("%(path)*.10~s", b"\1\0\0"),
        ("n", None, [((path + stack).hex(), 1)]),
    ]


def test_texts_are_kept_as_the_tables_of_handlers_have_them() -> None:
    text = """
    f(char *p) { @path[1] = str(p, 12); @comm = comm; @n[comm, str(p, 7)] = count(); }
    begin {
        @path[2] = "/etc"; @path[3] = @path[2]; @comm = "sh"; @own = "own"; @copy = @own;
        @n["sh", "x"] = count(); @more["z"] += 2; delete(@n["sh", "never"]);
        printf("%s %s %s|%5s|%d", @path[3], @comm, @copy, "in", @more["z"]);
    }
    """
    program, tool = compiled(text)
    assert [str(table) for table in program.tables] == [
        "path, last, signed, value = cutstr[13]",
        "comm, last, value = comm",
        "n, count, comm, cutstr[8]",
        "own, last, value = cutstr[201]",
        "copy, last, value = cuttext[201]",
        "more, sum, cutstr[201]",
        "__faults, count, word, word",
    ]
    host = Host(program)
    ToolInterpreter(tool, host).execute(tool.blocks[0])
    assert host.tables[0].kept((3).to_bytes(8, "little")) == b"/etc".ljust(16, b"\0")
    assert host.tables[2].value(b"sh".ljust(16, b"\0") + b"x".ljust(16, b"\0")) == 1
    items = b"".join(b"\1" + len(each).to_bytes(2, "little") + each for each in (b"/etc", b"sh", b"own", b"in"))
    assert host.done == [
        ("%(path)*.12~s %(comm)*s %(copy)*.200~s|%(value)*5s|%(more)nd", items + (2).to_bytes(8, "little"))
    ]


def test_keys_are_words_of_the_modules() -> None:
    text = "f { } begin { @n[-1] = count(); print(@n); }"
    assert executed(text) == [("n", None, [("ff" * 8, 1)])]
    assert executed(text, word_size=4) == [("n", None, [("ff" * 8, 1)])]
    unsigned = text.replace("-1", "(unsigned)-1")
    assert executed(unsigned, word_size=4) == executed(unsigned) == [("n", None, [("ff" * 4 + "00" * 4, 1)])]


@pytest.mark.parametrize(
    ("body", "done"),
    [
        ("@x = 1 / (@x - @x);", [(ExceptionCode.DIVIDE_BY_ZERO, "@x")]),
        ("while (1) { }", [(ExceptionCode.JMP_MAX, "while (1) { }")]),
        ("down(1);", [(ExceptionCode.CALL_MAX, "return down(x)")]),
        ('exit(); printf("never");', ["quit"]),
        ('return; printf("never");', []),
    ],
)
def test_what_ends_a_block(body: str, done: list[object]) -> None:
    assert executed(f"int down(int x) {{ return down(x); }} f {{ @x = 1; }} begin {{ {body} }}") == done


def test_calls_may_be_as_deep_as_in_a_handler() -> None:
    text = (
        'long down(long x) {{ if (x > 1) return down(x - 1); return 7; }} f {{ }} begin {{ printf("%d", down({0})); }}'
    )
    assert printed(text.format(CALL_DEPTH_MAX)) == [("%(down)nd", [7])]
    assert executed(text.format(CALL_DEPTH_MAX + 1)) == [(ExceptionCode.CALL_MAX, "return down(x - 1)")]


def test_exceptions_are_caught() -> None:
    text = """
    f { }
    begin {
        long zero = 0;
        try { zero = 1 / zero; printf("never"); } catch (code, address) { printf("%d %d", code, address); }
        try { try { zero = 1 % zero; } catch { zero = 2 / zero; } } catch (code) { printf("%d", code + 1); }
    }
    """
    assert [words for _, words in printed(text)] == [[0x20, 0], [0x21]]


def test_loops_visit_the_items_of_the_system() -> None:
    text = """
    f { }
    begin {
        for (t : tasks) {
            if (t.state == "R") continue;
            printf("%d %d %d %s %s", t.pid, t.tid, t.ppid, t.state, t.comm);
            for (file : files(t.pid)) {
                if (startswith(file.path, "socket:")) break;
                printf("%d %s", file.fd, file.path);
            }
        }
        for (m : maps(7)) printf("%p %u %x %s %s", m.begin, m.end - m.begin, m.offset, m.permissions, m.path);
    }
    """

    def shown(name: str) -> bytes:
        return bytes([Token.STRING]) + len(name.encode()).to_bytes(2, "little") + name.encode()

    def number(*values: int, size: int = 4) -> bytes:
        return b"".join(value.to_bytes(size, "little") for value in values)

    done = executed(text)
    assert [each for each in done if isinstance(each[1], int | None)] == [
        ("tasks", None), ("files", 1), ("files", 7), ("maps", 7)
    ]  # fmt: skip
    assert [data for _, data in done if isinstance(data, bytes)] == [
        number(1, 1, 0) + shown("S") + shown("init"),
        number(0) + shown("/dev/null"),
        number(7, 9, 1) + shown("D") + shown("worker\x1b[1m"),
        number(0x1000, 0x2000, 0, size=8) + shown("r-xp") + shown("/bin/sh"),
        number(2**63, 8, 16, size=8) + shown("rw-p") + shown(""),
    ]


def test_strings_of_items_are_keys_and_values_of_tables() -> None:
    text = """
    f { @by[comm] = count(); }
    begin {
        for (t : tasks) { @by[t.comm] = count(); @of[t.comm, t.tid] = t.state; }
        for (t : tasks) if (@of[t.comm, t.tid] == "D") printf("%d", @by[t.comm]);
        delete(@by["sh"]);
        print(@by);
    }
    """
    *_, (data,), shown = [each[1:] for each in executed(text) if each[0] != "tasks"]
    assert data == (1).to_bytes(8, "little")
    names = {bytes.fromhex(key).rstrip(b"\0") for key, _ in shown[1]}
    assert names == {b"init", b"worker\x1b[1m"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("for (t : threads) { }", "'threads' cannot be looped over"),
        ("for (t : tasks(1)) { }", "'tasks(1)' cannot be looped over"),
        ("for (t : files) { }", "'files' cannot be looped over"),
        ("for (t : tasks) @x = t.name;", "an item of 'tasks' has no field 'name'"),
        ("for (t : tasks) @x = t->pid;", "an item of 'tasks' has no field '->pid'"),
        ("for (t : tasks) @x = t;", "'t' is an item of a loop"),
        ("for (t : tasks) t.pid = 1;", "a field of a loop's item is not changed, and has no address"),
        ("for (t : tasks) @x = t.comm + 1;", "'t.comm' is a string"),
        ("for (t : @x) { }", "there are no loops over the entries of a table"),
    ],
)
def test_what_loops_cannot_do(body: str, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        compiled(f"f {{ @x = 1; }} begin {{ {body} }}")
    assert caught.value.diagnostics[0].message == message


def test_a_hit_has_no_items() -> None:
    with pytest.raises(SourceError) as caught:
        compiled("f { for (t : tasks) { } }")
    found = caught.value.diagnostics[0]
    assert found.message == "only the blocks 'begin', 'every' and 'end' can loop over 'tasks'"
    assert found.hint == "write the loop in 'every 1s { … }'"
