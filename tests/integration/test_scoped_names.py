"""Names of types and variables mean what the source file, class and namespace of the probed place have of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.debug_comparison import dprobes
from integration.support import PROGRAMS, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

FORMS = {
    "whole": [],
    "type-units": ["-fdebug-types-section"],
    "split": ["-gsplit-dwarf"],
    "dwarf-4": ["-gdwarf-4"],
    "dwarf-4-type-units": ["-gdwarf-4", "-fdebug-types-section"],
    "joined": ["-flto"],
}
ENGINES = [
    "ptrace",
    "inline",
    pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root")),
]


def compiled(directory: Path, compiler: str, *words: str) -> Path:
    """Return a program of the sources and flags ``words``."""
    program = directory / "scoped"
    subprocess.run([compiler, "-g", *words, "-o", str(program)], check=True, cwd=directory, timeout=TIMEOUT)
    return program


def scopes(directory: Path, *flags: str) -> Path:
    return compiled(directory, "g++", "-std=c++17", *flags, *(str(PROGRAMS / n) for n in ("scopes.cc", "scopes2.cc")))


def namesakes(directory: Path, *flags: str) -> Path:
    """Return the program of two source files whose names are the same."""
    for name, more in (("first.c", ""), ("second.c", "#define SECOND\n")):
        (directory / name).write_text(more + (PROGRAMS / "namesakes.c").read_text())
    return compiled(directory, "gcc", *flags, "first.c", "second.c")


def printed(program: Path, text: str, *options: str) -> list[str]:
    """Return what handlers print, without time, process and what the program prints."""
    done = dprobes("run", "-e", text, *options, "--", str(program))
    return [line.split("]  ", 1)[1] for line in done.stdout.splitlines() if "]  " in line]


def errors(program: Path, text: str) -> list[str]:
    """Return the messages and hints of the errors that a program has."""
    done = dprobes("run", "-e", text, "--", str(program), status=2)
    lines = done.stderr.splitlines()
    return [line.partition("error: ")[2] or line for line in lines if "error: " in line or line.startswith("hint: ")]


@pytest.mark.parametrize("level", ["-O0", "-O1"])
@pytest.mark.parametrize("form", FORMS)
def test_names_of_c_plus_plus_mean_those_of_the_scope(tmp_path: Path, form: str, level: str) -> None:
    program = scopes(tmp_path, level, *FORMS[form])
    text = """
    shop::Item::get {
        printf("%d %d %d %d %d %d %d", shop::Item::count, count, hidden, ::hidden, secret, sizeof(Item), sizeof(Note));
        printf("%s %d %d %d %S", this->kind, this->hue == Hue::BLUE, LARGE, sizeof(Part), *this);
    }
    yard::Item::get {
        Item *same = (Item *)this; shop::Item *other = (shop::Item *)this;
        printf("%d %d %d %d %d %d", count, hidden, shop::hidden, sizeof(Item), same->price, sizeof(*other));
    }
    apart { printf("%d %d %d %d", secret, shop::secret, shop::hidden, sizeof(shop::Note)); }
    main { printf("%d %d %d %d", sizeof(Item), shop::Item::SMALL, hidden, shop::v2::version == shop::version); }
    """
    assert printed(program, text) == [
        "8 3 63 1",
        "5 5 61 63 71 20 8",
        "6 62 61 8 8 20",
        "171 171 161 16",
    ]


@pytest.mark.parametrize("form", FORMS)
def test_names_of_c_mean_those_of_the_source_file(tmp_path: Path, form: str) -> None:
    program = namesakes(tmp_path, "-O1", *FORMS[form])
    text = """
    first(struct node *n) { printf("%d %d %s %d", n->id, counter, s, sizeof(struct node)); }
    second(n) { struct node *q = (struct node *)n; printf("%d %d %s %d", q->id, counter, s, sizeof(enum state)); }
    plain { struct node *q = (struct node *)n; printf("%d %s", q->id, str(q->name)); }
    """
    assert printed(program, text) == ["55 111 BUSY 8", "77 222 RUNNING 4", "77 named"]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_point_of_a_block_has_its_own_names(tmp_path: Path, engine: str) -> None:
    program = namesakes(tmp_path, "-O1")
    text = 'first, second, second+0 { struct node *q = (struct node *)n; printf("%d %d", q->id, counter); }'
    assert printed(program, text.replace(", second+0", ""), "--engine", engine) == ["55 111", "77 222"]


def test_what_may_mean_several_things_is_an_error_that_lists_them(tmp_path: Path) -> None:
    program = scopes(tmp_path, "-O1")
    which = "hint: name the intended one"
    assert printed(program, 'apart { printf("%d", sizeof(Item)); }') == ["8"]  # that in no namespace
    assert printed(program, 'main { printf("%d", sizeof(Note)); }') == ["8"]  # that of the source file
    assert printed(program, 'apart { printf("%d", sizeof(Version)); }') == ["4"]  # the only one
    found = errors(program, 'apart { printf("%d", Item::count); }')
    assert found == ["'Item::count' may be shop::Item::count, yard::Item::count", which]
    program = namesakes(tmp_path, "-O1")
    own = "hint: a handler in a function of a source file means its own"
    text = 'static struct node *kept; second { kept = n; printf("%d", kept->id); }'
    assert errors(program, text) == ["'struct node' may be that of first.c, that of second.c", own]
    text = 'watch w (int)call_first { printf("%d", counter); }'
    assert errors(program, text) == ["'counter' may be that of first.c, that of second.c", own]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_variable_of_a_class_is_watched_and_read_by_its_name(tmp_path: Path, engine: str) -> None:
    program = scopes(tmp_path, "-O1")
    text = f'watch w (int){program}:shop::Item::count {{ printf("%d %d", shop::Item::count, *(int *)watched); }}'
    engine = "ptrace" if engine == "inline" else engine  # which has no watchpoints
    assert printed(program, text, "--engine", engine) == ["6 6"]


def test_scoped_names_cannot_be_declared(tmp_path: Path) -> None:
    program = scopes(tmp_path, "-O1")
    message = "'a::b' is a name of the module, and cannot be declared"
    assert errors(program, "main { int a::b = 3; }") == [message]
    assert errors(program, "apart(a::b) { }") == [message]


TEMPLATES = """
#include <vector>
template<class T> struct Box {
    static T last;
    T value;
    Box *next;
    __attribute__((noinline)) int put(T given) { value = last = given; asm volatile("" ::: "memory"); return given; }
};
template<class T> T Box<T>::last = 0;
namespace shop {
template<class A, class B, unsigned N> struct Pair { A a; B b[N]; static int made; };
template<class A, class B, unsigned N> int Pair<A, B, N>::made = 7;
}
typedef shop::Pair<const char *, unsigned long, 3> Labels;
__attribute__((noinline)) int look(void *raw, std::vector<Box<int>> &boxes, Labels *labels)
{
    asm volatile("" : : "r"(raw), "r"(labels) : "memory");
    return boxes.size() + labels->made;
}
int main()
{
    Box<int> one{}; Box<short> two{}; Labels labels{"text", {1, 2, 3}};
    std::vector<Box<int>> boxes(3);
    one.put(41); two.put(42);
    return look(&one, boxes, &labels) == 0;
}
"""


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("form", ["whole", "type-units", "split"])
def test_what_has_arguments_of_templates_is_named_in_backquotes(tmp_path: Path, compiler: str, form: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (tmp_path / "boxes.cc").write_text(TEMPLATES)
    program = compiled(tmp_path, compiler, "-O1", *FORMS[form], "boxes.cc")
    asked = [
        "((Box<int> *)raw)->value",
        "Box<short>::last",
        "sizeof(Box<short>)",
        "sizeof(std::vector<Box<int>, std::allocator<Box<int> > >)",
    ]
    commands = [word for each in ("break look", "run", *(f"print {each}" for each in asked)) for word in ("-ex", each)]
    told = subprocess.run(
        ["gdb", "-batch", "-nx", *commands, str(program)], check=True, capture_output=True, text=True, timeout=TIMEOUT
    )
    values = " ".join(re.findall(r"^\$\d+ = (\d+)$", told.stdout, re.MULTILINE))
    text = """
    look(raw) {
        `Box<int>` *box = (`Box<int>` *)raw;
        printf("%d %d %d %d", box->value, `Box<short>::last`, sizeof(struct `Box<short int>`),
               sizeof(`std::vector<Box<int>, std::allocator<Box<int>>>`));
    }
    return `look`(raw, boxes, `shop::Pair<char const*, unsigned long, 3u>` *pair) {
        printf("%s %d %d", pair->a, `shop::Pair<char const*, unsigned long, 3u>::made`, scoped:`Box<int>::last`);
    }
    `Box<int>::put` { printf("int %d", arg1); }
    "Box<short>::put" { printf("short %d", (short)arg1); }
    """
    assert values == "41 42 16 24"
    assert printed(program, text) == ["int 41", "short 42", values, "text 7 41"]


PAIRS_IN_RUST = """
use std::hint::black_box;
pub struct Pair<A, B> { pub left: A, pub right: B, pub next: u64 }
#[inline(never)]
pub fn both(p: &Pair<i32, u64>, v: &Vec<i32>) -> u64 { black_box(p.left as u64 + p.right + v.len() as u64) }
fn main() {
    let (p, q) = (Pair { left: 3, right: 4u64, next: 5 }, Pair { left: 3u8, right: 4i16, next: 6 });
    black_box(&q);
    black_box(both(black_box(&p), black_box(&vec![1, 2, 3])));
}
"""


def test_what_has_arguments_in_rust_is_named_in_backquotes(tmp_path: Path) -> None:
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    (tmp_path / "pairs.rs").write_text(PAIRS_IN_RUST)
    program = compiled(tmp_path, "rustc", "-C", "opt-level=1", "pairs.rs")
    text = """"pairs::both" {
        `pairs::Pair<i32, u64>` *pair = (`pairs::Pair<i32,u64>` *)arg0;
        printf("%d %d %d %d", pair->left, pair->right, sizeof(`Pair<u8, i16>`),
               sizeof(`alloc::vec::Vec<i32, alloc::alloc::Global>`));
    }"""
    assert printed(program, text) == ["3 4 16 24"]


PAIRS_IN_GO = """
package main

type Pair[A any, B any] struct {
	left  A
	right B
}

var total = 5

//go:noinline
func look(p *Pair[int32, string], q *Pair[int64, bool]) int { return len(p.right) + int(q.left) + total }

func main() {
	println(look(&Pair[int32, string]{3, "four"}, &Pair[int64, bool]{6, true}))
}
"""


def test_what_has_arguments_in_go_is_named_in_backquotes(tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    (tmp_path / "pairs.go").write_text(PAIRS_IN_GO)
    program = tmp_path / "pairs"
    subprocess.run(["go", "build", "-o", str(program), "pairs.go"], check=True, cwd=tmp_path, timeout=TIMEOUT)
    text = """`main.look`(p) {
        `main.Pair[int32,string]` *pair = (`main.Pair[int32,string]` *)p;
        printf("%d %d %d %d", pair->left, sizeof(*pair), sizeof(`main.Pair[int64,bool]`), `main.total`);
    }"""
    assert printed(program, text) == ["3 24 16 5"]
