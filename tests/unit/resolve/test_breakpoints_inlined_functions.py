"""A function that is nowhere but in others is said to be there, with its places."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dprobes.errors import TargetError
from dprobes.resolve.breakpoints import told_of_inlining
from dprobes.target.probed_module import Module

PROGRAM = Path(__file__).parents[2] / "programs/inlined.c"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    program = tmp_path_factory.mktemp("inlined") / "inlined"
    subprocess.run(["gcc", "-g", "-O2", PROGRAM, "-o", program], check=True)
    return Module.load(program)


def told(module: Module, name: str) -> TargetError:
    with pytest.raises(TargetError) as error:
        module.address_of(name)
    return told_of_inlining(module, name, error.value)


def test_the_places_of_inlined_calls_are_named(module: Module) -> None:
    error = told(module, "inner")
    places = error.message.partition(", at ")[2].split(", ")
    inlined = f"its calls were inlined, at {', '.join(places)}"
    assert error.message == f"'inner' is not a symbol of '{module.path}': {inlined}"
    assert len(places) == 3
    assert {place.partition("+")[0] for place in places} == {"work"}
    assert error.hint == f"write 'offset = {places[0]}', or in DProbes C 'inline {module.path}:inner' for all of them"


def test_of_many_places_some_are_named() -> None:
    libc = Module.load(Path("/lib/x86_64-linux-gnu/libc.so.6"))
    error = told(libc, "heap_for_ptr")
    assert re.fullmatch(r".*: its calls were inlined, at ([\w.]+\+0x\w+, ){3}[\w.]+\+0x\w+ and \d+ more", error.message)


def test_what_was_not_inlined_keeps_its_error(module: Module, tmp_path: Path) -> None:
    assert told(module, "nothing").message == f"'{module.path}' has no symbol 'nothing'"
    plain = tmp_path / "plain"
    subprocess.run(["gcc", "-O2", PROGRAM, "-o", plain], check=True)
    assert told(Module.load(plain), "inner").message == f"'{plain}' has no symbol 'inner'"
    assert told(module, "printf").message == f"'printf' is imported by '{module.path}', not defined in it"


def test_parts_and_clones_are_named_as_well(tmp_path: Path) -> None:
    step = 'n ^= printf("%d", n); n += rand(); n ^= puts("x"); '
    source = f"""
    #include <stdio.h>
    #include <stdlib.h>
    static int work(int n) {{ if (__builtin_expect(n < 3, 1)) return 0; {step * 12} return n; }}
    __attribute__((noinline)) int one(int n) {{ return work(n) + 1; }}
    __attribute__((noinline)) int two(int n) {{ return work(n + 1) + 2; }}
    int main(int argc, char **argv) {{ (void)argv; return one(argc) + two(argc) > work(argc + 2); }}
    """
    program = tmp_path / "parts"
    command = ["gcc", "-g", "-O2", "-fpartial-inlining", "-x", "c", "-", "-o", str(program)]
    subprocess.run(command, input=source, text=True, check=True)
    parted = Module.load(program)
    assert parted.address_of("work.part.0") > 0
    error = told(parted, "work")
    assert error.message.endswith("; the compiler has also made 'work.part.0' of it")
    assert ": its calls were inlined, at " in error.message
    assert error.hint is not None
    assert error.hint.endswith("/parts:work' for all of them")
