"""Which functions a pattern matches, and why the rest is left out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.target.code.machine_code import first_instructions
from dprobes.target.matching_functions import LeftOut, matching_functions
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from pathlib import Path

    from unit.target.conftest import Toolbox

SOURCE = """
int task_value = 3;
int task_one(int x) { return x * task_value; }
int task_other(int x) { return x - 1; }
int task_an_alias(int x) __attribute__((alias("task_other")));
static void *task_choose(void) { return task_one; }
int task_chosen(int) __attribute__((ifunc("task_choose")));
extern void abort(void);
int __attribute__((noinline)) task_partly(int x) { if (__builtin_expect(x == 77, 0)) abort(); return x / 3; }
int Task_big(int x) { return x; }
__asm__(".globl task_inner, task_label, task_entry\\n.type task_entry, @function\\n.type task_inner, @function\\n"
        ".type task_second, @function\\n"
        "task_entry: mov $0x90909090, %eax\\n task_second: nop\\n ret\\n .size task_entry, . - task_entry\\n"
        ".set task_inner, task_entry + 2\\n"
        "task_label: ret\\n");
"""


@pytest.fixture(scope="module")
def tasks(tools: Toolbox) -> Module:
    return Module.load(tools.build("libtasks.so", {"tasks.c": SOURCE}, "-shared", "-fPIC", "-O2"))


def test_each_function_is_given_once_in_order_of_addresses(tasks: Module) -> None:
    functions, _ = matching_functions(tasks, "task_*")
    assert {f.name for f in functions} == {
        "task_one", "task_other", "task_choose", "task_partly", "task_entry", "task_second"
    }  # fmt: skip
    assert [f.address for f in functions] == sorted(tasks.address_of(f.name) for f in functions)
    assert {f.name for f in functions if not f.size} == {"task_second"}


def test_what_is_left_out_has_its_reason(tasks: Module) -> None:
    _, left_out = matching_functions(tasks, "task_*")
    assert sorted(left_out, key=lambda each: each.name) == [
        LeftOut("task_an_alias", "it is another name of a function that is taken"),
        LeftOut("task_chosen", "it is chosen at run time (IFUNC)"),
        LeftOut("task_inner", "it starts inside an instruction of another function"),
        LeftOut("task_label", "it is not a function"),
        LeftOut("task_partly.cold", "it is a part of another function"),
        LeftOut("task_value", "it is not a function"),
    ]


def test_case_matters_and_brackets_choose(tasks: Module) -> None:
    assert [f.name for f in matching_functions(tasks, "Task_*")[0]] == ["Task_big"]
    assert {f.name for f in matching_functions(tasks, "task_o[!n]*")[0]} == {"task_other"}
    assert matching_functions(tasks, "nothing*") == ([], [])


def test_the_debug_file_names_what_the_stripped_program_does_not(
    tools: Toolbox, pie: Path, stripped: Path, debug_file: Path
) -> None:
    assert matching_functions(Module.load(stripped), "hel*")[0] == []
    (found,) = matching_functions(Module.load(stripped, debug_file), "hel*")[0]
    assert f"{found.address:016x} t helper" in tools.run("nm", pie)


def test_the_same_functions_as_nm_lists(tools: Toolbox, libc: Path) -> None:
    functions, left_out = matching_functions(Module.load(libc), "str*")
    listed = re.findall(r"^[0-9a-f]+ ([TtWi]) (str\w*)(?:@.*)?$", tools.run("nm", "-D", libc), re.MULTILINE)
    names = {f.name for f in functions} | {each.name for each in left_out}
    assert {name for _, name in listed} <= names
    chosen = {name for kind, name in listed if kind == "i"}
    assert chosen
    assert chosen == {each.name for each in left_out if "IFUNC" in each.reason} & {name for _, name in listed}


def test_first_instructions_of_many_places(tasks: Module) -> None:
    functions, _ = matching_functions(tasks, "task_*")
    decoded = list(first_instructions(tasks, [f.offset for f in functions]))
    assert [d.address for d in decoded] == [f.address for f in functions]
    assert {d.text for d, f in zip(decoded, functions, strict=True) if f.name == "task_second"} == {"nop"}


def test_a_name_that_reads_as_a_pattern_is_meant_itself(tools: Toolbox) -> None:
    source = '__asm__(".globl \\"main.gen[int]\\", \\"main.geni\\"\\n.type \\"main.gen[int]\\", @function\\n'
    source += '.type \\"main.geni\\", @function\\n\\"main.gen[int]\\": ret\\n\\"main.geni\\": ret\\n");\n'
    module = Module.load(tools.build("libbrackets.so", {"brackets.c": source}, "-shared", "-fPIC"))
    assert [f.name for f in matching_functions(module, "main.gen[int]")[0]] == ["main.gen[int]"]
    assert [f.name for f in matching_functions(module, "main.gen[hij]")[0]] == ["main.geni"]


def test_static_functions_of_one_name_have_their_files(tools: Toolbox) -> None:
    static = "static __attribute__((noipa)) int helper(int x) { return x + NUMBER; }\n"
    sources = {
        "one.c": static.replace("NUMBER", "1") + "int one(int x) { return helper(x); }",
        "two.c": static.replace("NUMBER", "2") + "int two(int x) { return helper(x); }",
        "alone.c": "static __attribute__((noipa)) int only(int x) { return x; }\nint three(int x) { return only(x); }",
    }
    module = Module.load(tools.build("libcopies.so", sources, "-shared", "-fPIC", "-O1"))

    def found(pattern: str) -> set[str]:
        functions, left_out = matching_functions(module, pattern)
        assert left_out == []
        return {function.name for function in functions}

    assert found("*:helper") == found("helpe[r]") == {"one.c:helper", "two.c:helper"}
    assert found("t*.c:helper") == {"two.c:helper"}
    assert found("alone.c:*") == {"alone.c:only"}
    assert found("*:only") == {"alone.c:only"}
    assert found("onl*") == {"only"}
    assert found("*:three") == {"three"}
    assert found("alone.c:three") == set()
    both = {module.symbol_at(function.offset) for function in matching_functions(module, "*:helper")[0]}
    assert both == {("one.c:helper", 0), ("two.c:helper", 0)}
    (only,) = matching_functions(module, "only")[0]
    assert module.symbol_at(only.offset + 1) == ("only", 1)
