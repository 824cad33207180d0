"""Names of C++ and Rust in ``offset =``, as people write them: places, counts and errors on real programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import DPROBES, PROGRAMS, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return ["--engine", request.param]


@pytest.fixture
def shop(build: Builder) -> Path:
    return build("shop.cc", "-lstdc++")


CALLS = {
    "shop::Cart::add(int)": 2,
    "Cart::add(const char *)": 1,
    "Cart::size": 1,
    "shop::Cart::operator()": 1,
    "Cart::operator+=": 1,
    "shop::(anonymous namespace)::hidden": 1,
    "shop::twice<double>": 1,
    '"twice<int>(int)"': 1,
    '"lone(int, char*)"': 1,
    "shop::Box<int>::get": 1,
}


def test_each_function_is_hit_as_often_as_it_is_called(shop: Path, run: Runner, engine: list[str]) -> None:
    definitions = "".join(f"offset = {name}\nminor = {minor}\nexit\n" for minor, name in enumerate(CALLS, 1))
    result = run(f'name = "{shop}"\n{definitions}', ["--", str(shop)], engine)
    assert result.status == 0, result.stderr
    minors = [record["minor"] for record in result.records]
    assert {name: minors.count(minor) for minor, name in enumerate(CALLS, 1)} == CALLS


def test_patterns_distances_and_data_take_them_as_well(shop: Path, run: Runner, engine: list[str]) -> None:
    text = (
        f'name = "{shop}"\noffset = shop::Cart::add*\nminor = 1\nexit\n'
        'offset = Cart::size + 0\nminor = 2\npush "shop::counter"\npush mem, u32\nlog 1\nexit\n'
    )
    result = run(text, ["--", str(shop)], engine)
    minors = [record["minor"] for record in result.records]
    assert (minors.count(1), minors.count(2)) == (3, 1)
    assert result.words(2) == [[5]]


def test_rust_has_modules_before_its_names(tmp_path: Path, run: Runner, engine: list[str]) -> None:
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    program = tmp_path / "names"
    done = subprocess.run(
        ["rustc", "-O", "-o", str(program), str(PROGRAMS / "names.rs")],
        capture_output=True, text=True, check=False, timeout=5 * TIMEOUT,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"rustc cannot compile here: {done.stderr[-200:]}")
    text = f'name = "{program}"\noffset = names::take\nminor = 1\nexit\noffset = deep::apply\nminor = 2\nexit\n'
    result = run(text, ["--", str(program)], engine)
    assert [record["minor"] for record in result.records] == [1, 1, 2]


def said(*arguments: str, text: str = "") -> str:
    done = subprocess.run([*DPROBES, *arguments], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_list_and_locate_take_and_show_them(shop: Path) -> None:
    located = said("locate", f"{shop}:Cart::size")
    assert "function  _ZNK4shop4Cart4sizeEv\n          shop::Cart::size() const\n" in located
    assert "\noffset = Cart::size          // file offset 0x" in located
    added = said("list", f"{shop}:shop::Cart::add")
    assert re.findall(r"^(shop::.*?)  +\d", added, re.MULTILINE) == [
        "shop::Cart::add(int)",
        "shop::Cart::add(char const*)",
    ]
    assert "shop::Box<int>::get()" in said("list", f"{shop}:shop::*")


def test_what_is_not_unique_or_not_there_has_the_names_that_may_be_meant(shop: Path) -> None:
    def refused(place: str) -> str:
        return said("check", "-", text=f'name = "{shop}"\noffset = {place}\nexit\n')

    assert (
        f"error: 'Cart::add' may be one of 2 functions of '{shop}': 'shop::Cart::add(int)', "
        "'shop::Cart::add(char const*)'\n    offset = Cart::add\n    ^~~~~~~~~~~~~~~~~~\n"
        'hint: write the whole of one: offset = "shop::Cart::add(int)"\n'
    ) in refused("Cart::add")
    assert "hint: did you mean 'shop::Cart::add'" in refused("shop::Cart::ad")


def test_a_compiled_program_carries_what_they_stand_for(
    shop: Path, run: Runner, engine: list[str], tmp_path: Path
) -> None:
    source, compiled, stripped = tmp_path / "shop.rpn", tmp_path / "shop.ppdf", tmp_path / "stripped" / "shop"
    source.write_text(
        "name = shop\noffset = Cart::add(int)\nminor = 1\nexit\noffset = shop::Cart::o*\nminor = 2\nexit\n"
    )
    subprocess.run([*DPROBES, "build", str(source), "-o", str(compiled), "--for", str(shop)], check=True)
    stripped.parent.mkdir()
    subprocess.run(["strip", "-o", str(stripped), str(shop)], check=True)
    output = tmp_path / "records"
    command = [*DPROBES, "run", str(compiled), *engine, "--format", "json", "-o", str(output), "--", str(stripped)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    minors = re.findall(r'"minor": ?(\d)', output.read_text())
    assert (minors.count("1"), minors.count("2")) == (2, 2)
