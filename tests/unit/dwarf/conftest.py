"""Programs with debug information of all kinds, compiled once."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.debug_file import DebugFile, debug_file_of
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = """
#include <stdint.h>
#include <stddef.h>
#include <stdlib.h>

enum color { RED, GREEN = 5, BLUE = -1 };
enum wide { SMALL = 1, HUGE_ONE = 0x100000000 };
typedef unsigned char byte_t;
typedef struct node node_t;
struct inner { short a; long b; };
union both { int number; char text[8]; };
struct node {
    node_t *next;
    const char *name;
    enum color color;
    unsigned low : 3, middle : 7;
    int is_signed : 5;
    long long wide : 40;
    struct inner inner;
    struct { int x, y; };
    union both both;
    byte_t bytes[16];
    int table[3][4];
    int (*call)(struct node *, int);
    double weight;
    _Bool is_set;
    volatile uint64_t big;
    char flexible[];
};
struct opaque;

node_t *first;
int counted = 3;
static long hidden[4] = {1, 2, 3, 4};
extern int nowhere;
_Thread_local int per_thread;

static __attribute__((noinline)) int helper(node_t *node, enum color color, struct opaque *opaque) {
    return node->color == color ? node->middle + (int)hidden[node->low & 3] : opaque != 0;
}

static inline int folded(int value) { return value * 3 + counted; }

__attribute__((noipa)) int work(node_t *node, int count, const char *text, double weight, unsigned char small) {
    int sum = 0;
    for (int i = 0; i < count; i++) {
        long scaled = i * (long)small;
        sum += (int)scaled + text[i % 2] + (int)(weight * i);
        { int sum = i; hidden[i & 3] += sum; }
    }
    sum += helper(node, GREEN, (struct opaque *)node);
    return folded(sum) + (node->call ? node->call(node, sum) : 0);
}

union both pass(struct inner inner, union both both) { both.number += inner.a; return both; }
long many(int a, int b, int c, int d, int e, int f, int g, struct inner h) { return a+b+c+d+e+f+g+h.b; }
int cold(int n) { if (__builtin_expect(n < 0, 0)) { abort(); } return n + 1; }

int main(int argc, char **argv) {
    static node_t nodes[2];
    nodes[0].next = &nodes[1]; nodes[0].name = argv[0]; nodes[0].color = GREEN; nodes[0].middle = 9;
    first = nodes;
    enum wide w = HUGE_ONE; volatile enum wide kept = w;
    union both both = { .number = argc };
    both = pass((struct inner){1, 2}, both);
    return work(nodes, argc, argv[0], 1.5, 3) + cold(argc) + (int)many(1, 2, 3, 4, 5, 6, 7, (struct inner){8, 9})
        + both.number + (kept == SMALL) + per_thread;
}
"""

CPLUSPLUS = """
#include <string>
namespace outer { namespace inner_space {
struct base { int kept; virtual int value() const { return kept; } virtual ~base() {} };
struct derived : base {
    int more; int value() const override; static int shared; derived(int n) : more(n) { kept = n; } };
int derived::shared = 4;
int derived::value() const { return more + kept + shared; }
int free_function(const base &b, std::string &text) { return b.value() + (int)text.size(); }
} }
int main(int argc, char **argv) {
    outer::inner_space::derived d(argc);
    std::string text(argv[0]);
    return outer::inner_space::free_function(d, text);
}
"""

VARIANTS = {
    "d5-O0": ("gcc", SHAPES, "-g -gdwarf-5 -O0"),
    "d5-O2": ("gcc", SHAPES, "-g -gdwarf-5 -O2"),
    "d4-O2": ("gcc", SHAPES, "-g -gdwarf-4 -O2"),
    "d4-types": ("gcc", SHAPES, "-g -gdwarf-4 -O1 -fdebug-types-section"),
    "d5-types": ("gcc", SHAPES, "-g -gdwarf-5 -O1 -fdebug-types-section"),
    "d3-O1": ("gcc", SHAPES, "-g -gdwarf-3 -gstrict-dwarf -O1"),
    "d5-64": ("gcc", SHAPES, "-g -gdwarf64 -O3"),
    "d5-lto": ("gcc", SHAPES, "-g -O2 -flto"),
    "d5-zlib": ("gcc", SHAPES, "-g -O2 -gz=zlib"),
    "d5-zlib-gnu": ("gcc", SHAPES, "-g -O2 -gz=zlib-gnu"),
    "d5-static": ("gcc", SHAPES, "-g -O2 -static"),
    "d5-split": ("gcc", SHAPES, "-g -O1 -gsplit-dwarf"),
    "d4-split": ("gcc", SHAPES, "-g -gdwarf-4 -O2 -gsplit-dwarf"),
    "d4-split-types": ("gcc", SHAPES, "-g -gdwarf-4 -O1 -gsplit-dwarf -fdebug-types-section"),
    "d5-split-types": ("gcc", SHAPES, "-g -gdwarf-5 -O2 -gsplit-dwarf -fdebug-types-section"),
    # pyelftools relocates no offsets of thread variables.
    "object-d5": ("gcc", SHAPES, "-c -g -gdwarf-5 -O2 -ffunction-sections -D_Thread_local="),
    "object-d4": ("gcc", SHAPES, "-c -g -gdwarf-4 -O2 -D_Thread_local="),
    "object-zlib": ("gcc", SHAPES, "-c -g -O1 -gz=zlib -D_Thread_local="),
    "object-joined": ("gcc", SHAPES, "-r -g -O2 -D_Thread_local="),
    "object-types": ("gcc", SHAPES, "-c -g -gdwarf-4 -O1 -fdebug-types-section -D_Thread_local="),
    "cxx": ("g++", CPLUSPLUS, "-g -O1"),
}
"""Compiler, source and flags of each program."""


def compiled(directory: Path, name: str) -> Path:
    """Return a program; skip the test if its compiler is missing."""
    compiler, source, flags = VARIANTS[name]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    path = directory / name
    if not path.exists():
        suffix = "cc" if compiler == "g++" else "c"
        (directory / f"{name}.{suffix}").write_text(source)
        subprocess.run([compiler, *flags.split(), f"{name}.{suffix}", "-o", name], cwd=directory, check=True)
    return path


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("debuginformation")


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest, programs: Path) -> Path:
    return compiled(programs, request.param)


@pytest.fixture
def program(programs: Path) -> Path:
    return compiled(programs, "d5-O2")


def read(path: Path) -> DebugFile:
    """Return the debug information of a file that has it."""
    found = debug_file_of(ElfFile.open(path))
    assert found is not None
    return found
