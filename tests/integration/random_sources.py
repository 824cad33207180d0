"""Random programs whose variables are compared: in C and C++ of two files with the same names, in Rust and Go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

__all__ = ["c_sources", "go_source", "rust_source"]

FUNCTIONS = 6
"""Functions of a source file."""

_INTEGERS = ["signed char", "unsigned char", "short", "unsigned short", "int", "unsigned", "long", "unsigned long",
             "long long", "_Bool", "enum mode"]  # fmt: skip
_OPERATORS = ["+", "-", "*", "^", "&", "|"]


class _Source:
    """A source file that is being written: ``_choose`` picks what there is."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.lines: list[str] = []

    def mixed(self, values: list[str], cast: str, depth: int = 0) -> str:
        """Return an expression of numbers that wraps."""
        if depth > 1 or self.chance.random() < 0.3:
            return self.chance.choice([*values, str(self.chance.randrange(100))])
        operator = self.chance.choice(_OPERATORS)
        left, right = (self.mixed(values, cast, depth + 1) for _ in range(2))
        return f"({cast.format(left)} {operator} {cast.format(right)})"


class _CSource(_Source):
    """A file in C, or C++; what is in it has the names of the other one, by ``letter``, but not its types."""

    def __init__(self, chance: Random, letter: str, *, is_cpp: bool) -> None:
        super().__init__(chance)
        self.letter = letter
        self.is_cpp = is_cpp
        self.made: list[tuple[str, list[str]]] = []
        """Functions, and what their arguments are made of."""

    def text(self) -> str:
        chance, add = self.chance, self.lines.append
        fields = ["int a", "short b", "unsigned char c", "long d"]
        chance.shuffle(fields)
        base = chance.choice(["", " : unsigned char", " : long", " : short"]) if self.is_cpp else ""
        values = chance.sample(range(-20 if "char" not in base else 0, 100), 3)
        if self.is_cpp:
            add(f"namespace n{self.letter} {{ namespace {{")
        add(f"enum mode{base} {{ LOW = {values[0]}, MIDDLE = {values[1]}, HIGH = {values[2]} }};")
        add(f"struct pair {{ int x; {chance.choice(['int', 'short', 'long'])} y; }};")
        add(f"struct item {{ {'; '.join(fields)}; struct pair at; enum mode mode; unsigned low : 5; int high : 9; "
            f"int list[{chance.randrange(2, 5)}]; struct item *next; }};")  # fmt: skip
        for number in range(4):
            add(f"static {chance.choice(_INTEGERS[:8])} g{number} = {chance.randrange(100)};")
        add(f"static {chance.choice(_INTEGERS[:6])} table[4] = {{ 1, 2, {chance.randrange(99)}, 4 }};")
        add("static volatile long sink;")
        if self.is_cpp:
            add("}")
        add("static inline long small(long p, int q) { long inner = p * 3 + q; sink = inner; "
            "if (inner & 1) { int odd = (int)inner - q; sink = odd; inner += odd; } return inner; }")  # fmt: skip
        for number in range(FUNCTIONS):
            self._function(number)
        self._run()
        if self.is_cpp:
            add("}")
            add(f'extern "C" long run_{self.letter}(int argc) {{ return n{self.letter}::run(argc); }}')
        return "\n".join(self.lines) + "\n"

    def _parameter(self) -> str:
        kinds = [*_INTEGERS, *["struct item *", "struct pair", "struct item", "double"]]
        return self.chance.choice([*kinds, "struct item &"] if self.is_cpp else kinds)

    def _function(self, number: int) -> None:
        chance, add = self.chance, self.lines.append
        kinds = [self._parameter() for _ in range(chance.randrange(1, 9))]
        result = chance.choice(_INTEGERS[2:9])
        parameters = ", ".join(f"{kind} p{n}" for n, kind in enumerate(kinds))
        attributes = chance.choice(["__attribute__((noinline))", "static __attribute__((noinline))", "KEEP"])
        name = f"f{self.letter}{number}"
        self.made.append((name, kinds))
        values: list[str] = ["g0", "g1", "table[1]", "table[3]"]
        for n, kind in enumerate(kinds):
            match kind:
                case "struct item *":
                    values += [f"p{n}->a", f"p{n}->list[1]", f"p{n}->at.y", f"p{n}->low"]
                case "struct item" | "struct item &":
                    values += [f"p{n}.d", f"p{n}.high", f"p{n}.list[0]"]
                case "struct pair":
                    values += [f"p{n}.x", f"p{n}.y"]
                case "double":
                    values.append(f"(int)p{n}")
                case _:
                    values.append(f"p{n}")
        cast = "(long){}"
        add(f"{attributes} {result} {name}({parameters}) {{")
        for n in range(chance.randrange(1, 4)):
            kind = chance.choice(_INTEGERS[:9])
            add(f"    {kind} v{n} = ({kind}){self.mixed(values, cast)};")
            values.append(f"v{n}")
        add(f"    struct pair two = {{ (int){self.mixed(values, cast)}, (short){self.mixed(values, cast)} }};")
        add(f"    int few[3] = {{ (int){self.mixed(values, cast)}, 7, (int){self.mixed(values, cast)} }};")
        add(f"    enum mode way = {self.mixed(values, cast)} & 1 ? LOW : HIGH;")
        values += ["two.x", "two.y", "few[0]", "few[2]", "way"]
        add(f"    for (int i = 0; i < {chance.randrange(2, 4)}; i++) {{")
        add(f"        long step = {self.mixed([*values, 'i'], cast)};")
        add(f"        sink = step; few[i] += (int)step; v0 += {self.mixed([*values, 'i', 'step'], cast)};")
        if chance.random() < 0.6:
            add("        if (step & 3) { unsigned short deep = (unsigned short)(step + i); sink = deep;")
            add(f"            g{chance.randrange(4)} += deep; }}")
        add("    }")
        if chance.random() < 0.7:
            add(f"    v0 += small({self.mixed(values, cast)}, few[1]);")
        if number and chance.random() < 0.7:
            add(f"    sink = {self._call(chance.randrange(number), values)};")
        add(f"    sink = two.x + few[{chance.randrange(3)}] + way;")
        add(f"    return ({result}){self.mixed(values, cast)};")
        add("}")

    def _call(self, number: int, values: list[str]) -> str:
        name, kinds = self.made[number]
        arguments = []
        for kind in kinds:
            match kind:
                case "struct item *":
                    arguments.append("&one")
                case "struct item" | "struct item &":
                    arguments.append("one")
                case "struct pair":
                    arguments.append("one.at")
                case "double":
                    arguments.append(f"{self.chance.randrange(100)}.5")
                case _:
                    arguments.append(f"({kind}){self.mixed(values, '(long){}')}")
        return f"(long){name}({', '.join(arguments)})"

    def _run(self) -> None:
        add = self.lines.append
        calls = [f"    sum += {self._call(number, ['sum', 'i', 'g0'])};" for number in range(FUNCTIONS)]
        scope = "" if self.is_cpp else f"_{self.letter}"
        add(f"long run{scope}(int argc) {{ long sum = argc; one.next = &one; one.a += argc; one.list[1] = 5;")
        add("    one.mode = HIGH;")
        add("    one.low = 21; one.high = -77; one.d = 1L << 33; one.b = -5; one.at.x = 9; one.at.y = -8;")
        add("    for (int i = 0; i < 2; i++) {")
        self.lines += calls
        add("    }\n    return sum; }")
        first = next(n for n, line in enumerate(self.lines) if "volatile long sink" in line)
        self.lines.insert(first + 1, "static struct item one;")


def c_sources(chance: Random, *, is_cpp: bool) -> list[tuple[str, str]]:
    """Return the files of a program, by their names."""
    keep = (
        "#ifdef __clang__\n#define KEEP __attribute__((noinline))\n#else\n#define KEEP __attribute__((noipa))\n#endif\n"
    )
    end = "cc" if is_cpp else "c"
    files = []
    for letter in "ab":
        text = _CSource(chance, letter, is_cpp=is_cpp).text()
        files.append((f"{letter}.{end}", keep + (text if not is_cpp else text.replace("_Bool", "bool"))))
    linkage = 'extern "C" ' if is_cpp else ""
    declared = "".join(f"{linkage}long run_{letter}(int);\n" for letter in "ab")
    body = 'printf("%ld\\n", run_a(argc) + run_b(argc)); return 0;'
    main = f"#include <stdio.h>\n{declared}int main(int argc, char **argv) {{ {body} }}\n"
    return [*files, (f"main.{end}", main)]


_RUST = ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "isize", "usize"]
_RUST_HEAD = """use std::hint::black_box;
#[derive(Clone, Copy)] #[repr(C)] pub struct Pair { x: i32, y: i16 }
pub struct Item { a: i64, b: u8, list: [i32; 3], at: Pair }
#[derive(Clone, Copy)] pub enum Mode { Low = 3, High = 200 }
"""
_RUST_MAIN = """fn main() {
    let n = std::env::args().count();
    let item = Item { a: n as i64 - 9, b: 4, list: [1, -2, 3], at: Pair { x: -8, y: 9 } };
    black_box(item.b);
    black_box(Mode::Low);
    let mut sum: i64 = 0;
"""
_RUST_MEMBERS = {"&Item": ["p{}.a", "p{}.list[1]"], "Pair": ["p{}.x", "p{}.y"]}
_RUST_ARGUMENTS = {"bool": "n > 1", "&Item": "&item", "Pair": "item.at", "Mode": "Mode::High", "f64": "2.5"}


def rust_source(chance: Random) -> str:
    """Return a program in Rust."""

    def mixed(values: list[str]) -> str:
        left, right = chance.choice(values), chance.choice(values)
        return f"{left}.wrapping_{chance.choice(['add', 'sub', 'mul'])}({right} ^ {chance.randrange(99)})"

    lines, calls = [], []
    for number in range(FUNCTIONS):
        kinds = [chance.choice([*_RUST, "bool", *_RUST_ARGUMENTS]) for _ in range(chance.randrange(1, 7))]
        members = [form.format(n) for n, kind in enumerate(kinds) for form in _RUST_MEMBERS.get(kind, ["p{}"])]
        values = [f"({member} as i64)" for member in members]
        result = chance.choice(_RUST)
        parameters = ", ".join(f"p{n}: {kind}" for n, kind in enumerate(kinds))
        lines.append(f"#[inline(never)] pub fn f{number}({parameters}) -> {result} {{")
        for n in range(chance.randrange(1, 4)):
            kind = chance.choice(_RUST)
            lines.append(f"    let v{n} = ({mixed(values)}) as {kind};")
            values.append(f"(v{n} as i64)")
        lines += [f"    let few = [({mixed(values)}) as i32, 7, 9];", f"    let mut sum = {mixed(values)};"]
        lines.append(f"    for i in 0..{chance.randrange(2, 4)}i64 {{ let step = {mixed([*values, 'i', 'sum'])};")
        lines.append("        sum = sum.wrapping_add(black_box(step)); }")
        lines += ["    black_box(&few);", f"    (sum ^ {mixed(values)}) as {result}", "}"]
        numbers = [f"(n as i64 * {chance.randrange(1, 99)} - 7) as {kind}" for kind in kinds]
        call = ", ".join(_RUST_ARGUMENTS.get(kind, each) for kind, each in zip(kinds, numbers, strict=True))
        calls.append(f"    sum = sum.wrapping_add(f{number}({call}) as i64);")
    return _RUST_HEAD + "\n".join([*lines, _RUST_MAIN, *calls, '    println!("{}", sum); }']) + "\n"


_GO = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "int", "uint"]
_GO_HEAD = """package main
import "fmt"
type Pair struct { X int32; Y int16 }
type Item struct { A int64; B uint8; List [3]int32; At Pair }
type Mode uint8
var sink int64
"""
_GO_MAIN = """func main() {
    n, sum := int64(3), int64(0)
    item := &Item{n - 9, 4, [3]int32{1, -2, 3}, Pair{-8, 9}}
    sink += item.A
"""
_GO_MEMBERS = {
    "*Item": ["p{}.A", "int64(p{}.List[1])"],
    "Pair": ["int64(p{}.X)", "int64(p{}.Y)"],
    "bool": [],
    "string": ["int64(len(p{}))"],
}
_GO_ARGUMENTS = {
    "bool": "n > 1",
    "*Item": "item",
    "Pair": "item.At",
    "Mode": "Mode(200)",
    "float64": "2.5",
    "string": '"name"',
}


def go_source(chance: Random) -> str:
    """Return a program in Go."""

    def mixed(values: list[str]) -> str:
        left, right = chance.choice(values), chance.choice(values)
        return f"({left} {chance.choice('+-*^')} ({right} & {chance.randrange(1, 99)}))"

    lines, calls = [], []
    for number in range(FUNCTIONS):
        kinds = [chance.choice([*_GO, *_GO_ARGUMENTS]) for _ in range(chance.randrange(1, 8))]
        members = [_GO_MEMBERS.get(kind, ["int64(p{})"]) for kind in kinds]
        values = ["sink", *(form.format(n) for n, forms in enumerate(members) for form in forms)]
        result = chance.choice(_GO)
        parameters = ", ".join(f"p{n} {kind}" for n, kind in enumerate(kinds))
        lines += ["//go:noinline", f"func f{number}({parameters}) {result} {{"]
        for n in range(chance.randrange(1, 4)):
            lines += [f"    v{n} := {chance.choice(_GO)}({mixed(values)})", f"    sink += int64(v{n})"]
            values.append(f"int64(v{n})")
        lines += [f"    few := [3]int32{{int32({mixed(values)}), 7, 9}}", f"    sum := {mixed(values)}"]
        lines.append(f"    for i := int64(0); i < {chance.randrange(2, 4)}; i++ {{")
        lines += [
            f"        step := {mixed([*values, 'i', 'sum'])}",
            "        sum += step",
            "        sink ^= step",
            "    }",
        ]
        lines += ["    sink += int64(few[sum & 1])", f"    return {result}(sum ^ {mixed(values)})", "}"]
        numbers = [f"{kind}(n * {chance.randrange(1, 99)})" for kind in kinds]
        call = ", ".join(_GO_ARGUMENTS.get(kind, each) for kind, each in zip(kinds, numbers, strict=True))
        calls.append(f"    sum += int64(f{number}({call}))")
    return _GO_HEAD + "\n".join([*lines, _GO_MAIN, *calls, "    fmt.Println(sum, sink)", "}"]) + "\n"
