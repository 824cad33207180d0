"""Handlers whose state is on the stack do what the interpreter does, in the kernel and as machine code."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import Abilities, Lowered, Placement, Request, lower
from dprobes.bpf.map_layouts import LOAD_WINDOW, MapName
from dprobes.diagnostics import Diagnostics
from dprobes.record.log_record import Item
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import CodeImage, encode
from dprobes.rpn.rpn_program import Point
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from support.differential_runs import Demand, compared
from support.ebpf_backend import Stage
from support.native_backend import NATIVE, NativeStage
from support.rounds import rounds

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

TARGET = architecture("x86_64")
SMALL = Abilities(small_states=True)
ROUNDS = rounds(2000)
MAPPED, MISSING = 0x5_0000, 0x7_0000
TABLES = "table = one, count; table = by, sum, word; table = two, hist, word, word; table = who, avg, address, comm; "
HEADER = f"name = x; major = 3; logmax = 100; vars = 4; gvars = 2; tvars = 2; {TABLES} offset = 0x40; minor = 5; "
ITEMS = Item.PID | Item.TID | Item.UID | Item.CPU | Item.IP | Item.SP | Item.TIME | Item.PROCESS_NAME | Item.CS


def program_of(text: str) -> Program:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("x.rpn", HEADER + text), diagnostics, CompileOptions())
    diagnostics.raise_if_errors()
    return program


def compiled(text: str) -> tuple[CodeImage, Point]:
    program = program_of(text)
    return encode(program, TARGET), Point.of(program, program.definitions[0], 0x40)


def lowered(text: str, request: Request | None = None) -> Lowered:
    image, point = compiled(text)
    request = request or Request(abilities=SMALL, vars=4, gvars=2)
    return lower(image, TARGET, image.handlers[0], point, request)


def maps_of(text: str, request: Request | None = None) -> set[MapName]:
    return {reference.map for reference in lowered(text, request).assembled.maps}


@pytest.mark.parametrize(
    "text",
    [
        "abort",
        "exit",
        "inc lv, 2; abort",
        "push r, rdi; push r, rsi; log 2; exit",
        "push r, rdi; push 5; jgt more; abort; more: push r, rsi; log 1; exit",
        "push r, rdi; push mem, u64; log 1; exit",
        "push pid; push time; log 2; setmin 7; exit",
        "tally one; abort",
        "push r, rdi; push 5; tally by; abort",
        "push 1; push r, rdi; push 5; tally two; push 1; push 2; tally who; exit",
        "push 0; push 1; push 2; push 3; add; mul; sub; pop lv, 1; push gv, 1; log b, 1; exit",
    ],
)
def test_handlers_that_need_little_claim_nothing(text: str) -> None:
    assert not {MapName.SCRATCH, MapName.CLAIMS} & maps_of(text)
    without = maps_of(text, Request(vars=4, gvars=2))
    assert {MapName.SCRATCH, MapName.CLAIMS} <= without


@pytest.mark.parametrize(
    "text",
    [
        "again: inc lv, 0; jmp again",
        "push 8; push r, rdi; log str; exit",
        "push 8; push r, rdi; log mrf; exit",
        "remove",
        "exit 1",
        "sx caught; push 1; push 0; div; log 1; exit; caught: exit",
        "push r, rdi; " + "push 1; " * 40 + "log 40; exit",
    ],
)
def test_those_that_need_more_do(text: str) -> None:
    assert maps_of(text) >= {MapName.SCRATCH, MapName.CLAIMS}


LOOPING = (
    "again: push lv, 0; push 9; lt; jz done; ros 1; inc lv, 0; jmp again; done: ros 1; push lv, 0; pop gv, 1; abort",
    "again: push tv, 1; push 20; lt; jz done; ros 1; push tv, 1; push 3; add; pop tv, 1; jmp again; done: abort",
    "again: inc lv, 0; jmp again",
    f"push tv, 0; push 1; add; pop tv, 0; {'inc gv, 0; ' * 70}push tv, 0; push gv, 0; log 2; exit",
    "push 1; push 5; push tv, 1; add; pop tv; push 1; push tv; log 1; exit",
    "push 2; push tv; abort",
)


@pytest.mark.parametrize("text", LOOPING)
def test_a_handler_that_is_not_verified_may_have_loops_and_variables_of_threads(text: str) -> None:
    request = Request(abilities=NATIVE, vars=4, gvars=2, tvars=2)
    assert not {MapName.SCRATCH, MapName.CLAIMS} & maps_of(text, request)
    image, point = compiled(text)
    hits = [(image.handlers[0], point)] * 3
    demand = Demand(request=Request(abilities=NATIVE, probe=2, moved=0), keeps_stack=False)
    compared(image, TARGET, hits, partial(world, program_of(text)), demand, NativeStage())


def test_what_others_have_to_see_is_claimed() -> None:
    for request in (
        Request(abilities=SMALL, maxhits=3),
        Request(abilities=SMALL, keeps_stack=True),
        Request(abilities=SMALL, probe=None, shared=True),
    ):
        assert MapName.SCRATCH in maps_of("exit", request)


def test_a_handler_that_only_counts_has_no_record() -> None:
    assert maps_of("inc lv, 0; abort") == {MapName.PROBES, MapName.LOCALS}
    assert len(lowered("abort").assembled.code) < 12


def random_handler(random: Random) -> str:
    """Return a handler without loops: what it may need is known before it runs, but for addresses."""
    statements: list[str] = []
    labels, depth = 0, 0
    open_labels: list[tuple[str, int]] = []
    for _ in range(random.randrange(1, 30)):
        if open_labels and random.random() < 0.3:
            label, at = open_labels.pop()
            statements += ["pop lv, 3"] * max(0, depth - at) + ["push 9"] * max(0, at - depth)
            depth = at
            statements.append(f"{label}:")
        choice = random.randrange(12)
        if choice < 4 or depth < 2:
            statements.append(random.choice((
                f"push {random.choice((0, 1, 7, 1 << 31, (1 << 64) - 1, random.getrandbits(64)))}",
                f"push r, {random.choice(('rax', 'rdi', 'rsp', 'rip', 'r15', 'rflags'))}",
                "push pid", "push tid", "push time", "push gv, 1", "push lv, 0", "push lp", "push uid",
            )))  # fmt: skip
            depth += 1
        elif choice == 11 and random.random() < 0.5:
            table = random.choice(("one", "by", "two", "who"))
            takes = {"one": 0, "by": 2, "two": 3, "who": 2}[table]
            if depth >= takes:
                statements.append(f"tally {table}")
                depth -= takes
        elif choice < 6:
            keeps = ("div", "idiv", "neg", "xchg", "shl 3", "pbr 20")
            operation = random.choice(
                ("add", "sub", "mul", "and", "or", "xor", "shl", "shr", "rol", "lt", "eq", *keeps)
            )
            statements.append(operation)
            depth -= operation not in keeps
        elif choice == 6:
            address = random.choice((MAPPED + random.randrange(64), MISSING - random.randrange(12)))
            size = random.choice(("u8", "u16", "u32", "u64"))
            statements += [f"push {address:#x}", f"push mem, {size}"]
            depth += 1
        elif choice == 7:
            count = random.randrange(1, min(depth, 6) + 1)
            statements.append(random.choice((f"log {count}", f"log b, {count}", f"log w, {count}", f"log d, {count}")))
            depth -= count
        elif choice == 8:
            statements.append(random.choice((f"inc lv, {random.randrange(4)}", "dec gv, 0", "setmin 77", "setmaj 12")))
        elif choice == 9:
            statements.append(f"pop lv, {random.randrange(3)}")
            depth -= 1
        elif choice == 10 and depth >= 2:
            labels += 1
            statements.append(f"{random.choice(('jz', 'jnz', 'jlt', 'jge'))} l{labels}")
            open_labels.append((f"l{labels}", depth))
        elif random.random() < 0.2:
            statements.append(random.choice(("dup 1", "nop")))
            depth += statements[-1] == "dup 1"
    while open_labels:
        label, at = open_labels.pop()
        statements.append(random.choice(("exit", "abort")))
        statements.append(f"{label}:")
        depth = at
    statements.append(random.choice(("exit", "exit", "abort")))
    return "; ".join(statements).replace(":;", ":")


def world(program: Program) -> FakeContext:
    context = FakeContext("x86_64")
    prepare(program, 0, context)
    context.map_memory(MAPPED, bytes(range(100)))
    context.map_memory(MISSING - 4096, bytes(n % 250 for n in range(4096)))
    for n, name in enumerate(("eax", "edi", "esp", "eip", "r15", "eflags", "cs", "ss")):
        context.set_value(name, 0x1234_5678 * (n + 1))
    context.local_variables[:] = [1, 2, 3, 4]
    context.global_variables[:] = [5, 6]
    return context


@pytest.mark.parametrize(
    ("stage", "abilities", "least"), [(Stage(), SMALL, 0.25), (NativeStage(), NATIVE, 0.6)], ids=["ebpf", "native"]
)
def test_random_handlers_do_what_the_interpreter_does(stage: Stage, abilities: Abilities, least: float) -> None:
    small = agreed = 0
    for seed in range(ROUNDS):
        random = Random(seed)
        text = random_handler(random)
        program = program_of(text)
        image, point = compiled(text)
        point = point._replace(exception_mask=random.choice((0, 0xFFFF, random.getrandbits(16))))
        request = Request(
            abilities=abilities,
            probe=random.choice((2, None)),
            items=ITEMS & Item(random.getrandbits(16)),
            placement=random.choice((Placement.BREAKPOINT, Placement.RET_SITE)),
            moved=0,
            wants_tid=random.random() < 0.5,
            load_limit=random.choice((None, LOAD_WINDOW)),
        )
        compiled_as = replace(request, vars=4, gvars=2)
        code = lower(image, TARGET, image.handlers[0], point, compiled_as).assembled
        small += all(reference.map is not MapName.SCRATCH for reference in code.maps)
        hits = [(image.handlers[0], point)] * 2
        demand = Demand(request=request, keeps_stack=False)
        try:
            agreed += compared(image, TARGET, hits, partial(world, program), demand, stage)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {text}: {error}") from error
    assert small > ROUNDS * least
    assert agreed > ROUNDS * 9 // 10
