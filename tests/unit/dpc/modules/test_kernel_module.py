"""What programs for modules of the kernel know: by BTF, by debug information of object files, by both."""

from __future__ import annotations

import subprocess
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.dpc.modules.kernel_module import BtfModule, KernelModule
from dprobes.errors import SourceError
from dprobes.preprocessor import preprocess
from dprobes.source_text import SourceFile
from dprobes.target.btf import Btf
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
struct stock { int kept; struct stock *next; char label[8]; };
struct stock stocks[3], *last_stock;
int counted = 3;
long outside(long n);

__attribute__((noipa)) long deliver(struct stock *stock, int amount)
{
    static int calls;
    long price = outside(amount);
    calls += 1;
    last_stock = stock;
    if (price > counted) stocks[price & 1].kept = amount;
    return price * 3 + outside(price) + calls;
}
"""


class Module:
    """A module of the kernel: an object file with debug information, and its BTF."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "stock.c").write_text(SOURCE)
        self._run("gcc", "-c", "-g", "-O2", "stock.c", "-o", "stock.ko")
        self._run("gcc", "-c", "-gbtf", "-O2", "stock.c", "-o", "btf.o")
        self._run("objcopy", "-O", "binary", "--only-section=.BTF", "--set-section-flags", ".BTF=alloc", "btf.o", "btf")

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.directory, check=True, capture_output=True, text=True)
        return done.stdout

    @cached_property
    def elf(self) -> ElfFile:
        return ElfFile.open(self.directory / "stock.ko")

    @cached_property
    def second_call(self) -> str:
        """The place of the second call in the function, where its variable has a value."""
        listed = self._run("objdump", "-d", "--no-show-raw-insn", "stock.ko")
        lines = listed[listed.index("<deliver>:") :].splitlines()[1:]
        calls = [line for line in lines if "\tcall " in line]
        start, place = (int(line.partition(":")[0], 16) for line in (lines[0], calls[1]))
        return f"deliver+{place - start:#x}"

    def rpn_of(self, text: str, *, has_btf: bool = True, has_debug: bool = True) -> str:
        btf = Btf((self.directory / "btf").read_bytes()) if has_btf else None
        module = KernelModule(BtfModule(lambda: btf), lambda: self.elf if has_debug else None)
        diagnostics = Diagnostics()
        source = preprocess(SourceFile("a.dpc", text), diagnostics)
        found = compile_text(source, diagnostics, module="", module_of=lambda _name: module)
        return "\n".join(each.source for each in found.compilations)

    def error_of(self, text: str, *, has_btf: bool = True, has_debug: bool = True) -> tuple[str, str | None]:
        with pytest.raises(SourceError) as caught:
            self.rpn_of(text, has_btf=has_btf, has_debug=has_debug)
        (error,) = caught.value.diagnostics
        return error.message, error.hint


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return Module(tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("name", ["stock->kept", "stock->next->kept", "amount"])
def test_both_have_the_same_of_parameters(stock: Module, name: str) -> None:
    text = f'kmod stock:deliver {{ printf("%d", {name}); }}'
    by_btf = stock.rpn_of(text, has_debug=False)
    assert "push r, arg" in by_btf
    assert by_btf == stock.rpn_of(text, has_btf=False) == stock.rpn_of(text)


def test_a_function_in_quotes_has_its_parameters(stock: Module) -> None:
    rpn = stock.rpn_of('kmod stock:deliver { printf("%d", stock->kept); }', has_debug=False)
    quoted = stock.rpn_of('kmod stock:"deliver" { printf("%d", stock->kept); }', has_debug=False)
    assert quoted.replace('"deliver"', "deliver") == rpn.replace('"deliver"', "deliver")


def test_returns_have_the_parameters_of_the_entry(stock: Module) -> None:
    text = 'return kmod stock:deliver { printf("%d %d", stock->kept, retval); }'
    assert stock.rpn_of(text, has_debug=False) == stock.rpn_of(text, has_btf=False)


def test_variables_of_functions_are_those_of_debug_information(stock: Module) -> None:
    text = f'kmod stock:{stock.second_call} {{ printf("%d", price); }}'
    rpn = stock.rpn_of(text)
    assert "push r, r" in rpn
    assert rpn == stock.rpn_of(text, has_btf=False)
    assert stock.error_of(text, has_debug=False)[0] == "'price' is not defined"


def test_variables_without_names_of_their_own_have_those_of_symbols(stock: Module) -> None:
    assert "push calls.0" in stock.rpn_of(f'kmod stock:{stock.second_call} {{ printf("%d", calls); }}')


def test_variables_of_the_module_are_symbols(stock: Module) -> None:
    text = 'kmod stock:deliver { printf("%d %d %d", counted, last_stock->kept, stocks[1].kept); }'
    rpn = stock.rpn_of(text)
    for name in ("counted", "last_stock", "stocks"):
        assert name in rpn


def test_types_are_those_of_either(stock: Module) -> None:
    text = 'kmod stock:outside(at) { printf("%d %d", ((struct stock *)at)->next->kept, sizeof(struct stock)); }'
    assert stock.rpn_of(text, has_debug=False) == stock.rpn_of(text, has_btf=False)


def test_without_either_nothing_is_known(stock: Module) -> None:
    text = 'kmod stock:deliver { printf("%d", amount); }'
    assert stock.error_of(text, has_btf=False, has_debug=False)[0] == "'amount' is not defined"
