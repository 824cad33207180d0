"""
Put jumps to trampolines over instructions of modules in this very process, then work, and print what came of it.

Arguments: a module's file name, what of it ("functions", or a number of random instructions, and then perhaps "w" for
windows first), a seed; more of these. LOADED in the environment is a library of ours that takes part in the work; with
WAITS in it "patched" is said on stderr when the jumps are there, and the work begins when a byte has been read.
Each trampoline counts its hits and executes what was displaced. Nothing is undone. There is one thread, so that nobody
else executes what is being written; and its own return addresses are at the end of windows, never inside.

The code is made writable before, so that the kernel inserts no uprobe that somebody wants in the same library: when it
goes, the kernel puts a byte of the file over the jump there.

The output is that of the work; for each module stderr says how many sites were placed and refused, and how many
trampolines were hit.
"""

from __future__ import annotations

import collections
import ctypes
import decimal
import hashlib
import itertools
import json
import mmap
import os
import random
import re
import sqlite3
import struct
import sys
import zlib
from pathlib import Path

from iced_x86 import Decoder

from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.displaced_code import displaced
from dprobes.platform.x86.patches.patch_placer import Placement, Placer, Shared
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.probed_module import Module
from dprobes.target.process_maps import growth_of, parse_maps, read_maps

ROOM = 256
COUNTER_SIZE = 8
MAP_FIXED_NOREPLACE = 0x100000
REGIONS_MAX = 15_000
OWN_GROWTH = 512 << 20
"""Bytes that planning itself may map: they count as used, and are free again before the first plan is made."""


def counting(at: int, counter: int) -> bytes:
    """Return code that counts in a word, and leaves flags and the red zone as they are."""
    code = bytes.fromhex("488d642480 9c 48ff05") + struct.pack(
        "<i", counter - (at + 13)
    )  # lea rsp, [rsp-128]; pushfq; inc
    return code + bytes.fromhex("9d 488da42480000000")  # popfq; lea rsp, [rsp+128]


def trampoline(placed: Placement, sites: set[int]) -> bytes:
    """Return what was displaced, with the handler before each of the sites in it; the counter is behind that."""
    plan, at = placed.plan, placed.trampoline
    counter = at + ROOM - COUNTER_SIZE
    # What a landing mark is the site of begins behind the mark.
    cuts = sorted({max(site, plan.start) for site in sites} | {plan.start, plan.start + len(plan.raw)})
    code = b""
    for start, end in itertools.pairwise(cuts):
        if start != plan.start or not plan.lead or start in sites:
            code += counting(at + len(code), counter)
        raw = plan.raw[start - plan.start : end - plan.start]
        copy = displaced(raw, start, at + len(code), goes_back=end == cuts[-1])
        assert copy is not None
        code += copy.code
    assert len(code) <= ROOM - COUNTER_SIZE
    return code


def sites_of(module: Module, code: ModuleCode, what: str, chooser: random.Random) -> list[int]:
    elf = module.elf
    starts = [start for start in elf.frames.starts if code.around(start + code.bias) is not None]
    if what == "functions":
        return [start + code.bias for start in starts]
    found = []
    for start in starts:
        extent, around = elf.frames.extent(elf, start), code.around(start + code.bias)
        assert around is not None
        if extent is not None:
            first = start + code.bias - around.start
            data = around.original[first : first + extent[1] - start]
            found += [one.ip for one in Decoder(64, data, ip=start + code.bias) if not one.is_invalid]
    return chooser.sample(found, min(len(found), int(what.rstrip("w"))))


class Patches:
    """The jumps of one module, planned and then written."""

    def __init__(self, name: str, what: str, chooser: random.Random) -> None:
        with mmap.mmap(-1, OWN_GROWTH, prot=mmap.PROT_READ):
            mappings = parse_maps(read_maps(os.getpid()))
        own = self._own = [mapping for mapping in mappings if Path(mapping.path).name == name]
        module = Module.load(own[0].path)
        bias = own[0].start - module.elf.load_segments[0].vaddr & -0x1000
        code = ModuleCode.of(module, bias)
        growth = growth_of(os.getpid())
        self._ranges = code.ranges
        space = AddressSpace(mappings, own[0].start, own[-1].end, growth=growth, regions_max=REGIONS_MAX)
        sites = sites_of(module, code, what, chooser)
        found = list(Placer(code, space, ROOM).place(sites, windows_first=True if what.endswith("w") else None))
        self.placed = [one for one in found if isinstance(one, Placement)]
        shared = [one for one in found if isinstance(one, Shared)]
        self.shared, self.refused = len(shared), len(found) - len(self.placed) - len(shared)
        together = {one.trampoline: {one.plan.site} for one in self.placed}
        for one in shared:
            together[one.placement.trampoline].add(one.site)
        self._regions = space.regions()
        self._trampolines = [(one.trampoline, trampoline(one, together[one.trampoline])) for one in self.placed]

    def map(self, libc: ctypes.CDLL) -> bool:
        """Map memory for the trampolines; return False if this process has taken some of it meanwhile."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        for number, (start, end) in enumerate(self._regions):
            if libc.mmap(start, end - start, 7, flags, -1, 0) != start:
                for begun, finish in self._regions[:number]:
                    libc.munmap(begun, finish - begun)
                return False
        return True

    def keep_uprobes_away(self, libc: ctypes.CDLL, memory: int) -> None:
        """Have the code as it is in the file, without the uprobes that are in it, and let no new ones come."""
        for mapping in self._own:
            if mapping.executable and libc.mprotect(mapping.start, mapping.end - mapping.start, 7):
                raise OSError(ctypes.get_errno(), "mprotect")
        for code in self._ranges:
            if os.pread(memory, len(code.original), code.start) != code.original:
                os.pwrite(memory, code.original, code.start)

    def write(self, memory: int) -> None:
        """Write the trampolines, and the jumps to them."""
        for address, code in self._trampolines:
            os.pwrite(memory, code, address)
        for one in self.placed:
            for write in one.writes:
                os.pwrite(memory, write.data, write.address)

    def hit(self, memory: int) -> int:
        """Return how many sites were hit."""
        counters = (one.trampoline + ROOM - COUNTER_SIZE for one in self.placed)
        return sum(any(os.pread(memory, COUNTER_SIZE, counter)) for counter in counters)


def work(library: ctypes.CDLL | None) -> None:
    if library is not None:
        print(library.check(2000))
    base = sqlite3.connect(":memory:")
    base.execute("create table t(a integer primary key, b text, c real)")
    base.executemany("insert into t values(?, ?, ?)", ((i, f"row {i * 7919 % 1003}", i / 3) for i in range(800)))
    base.execute("create index by_b on t(b)")
    print(base.execute("select count(*), min(b), max(b), round(sum(c), 3) from t where b > 'row 3'").fetchall())
    print(base.execute("select date(86400 * a, 'unixepoch'), printf('%08.3f', c) from t order by b limit 5").fetchall())
    base.execute("update t set b = upper(b) where a % 3")
    base.execute("delete from t where a % 5 = 0")
    print(base.execute("pragma integrity_check").fetchall(), base.execute("select hex(b) from t limit 5").fetchall())
    for name in sorted(hashlib.algorithms_guaranteed - {"shake_128", "shake_256"}):
        print(name, hashlib.new(name, b"text" * 5000).hexdigest())
    print(
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 500).hex(),
        hashlib.scrypt(b"w", salt=b"s", n=64, r=8, p=1).hex(),
    )
    things = {str(i): [i, i / 7, {"x": i**20}] for i in range(60)}
    string = json.dumps(things, sort_keys=True)
    print(json.loads(string) == things, zlib.crc32(string.encode()))
    print(collections.Counter(re.findall(r"[0-9]+", string)).most_common(5))
    print(decimal.Decimal(2).sqrt(), struct.pack("<dfq", 1.5, 2.5, -3), sorted(things, reverse=True)[:5])
    print(sum(a * b for a, b in itertools.combinations(range(60), 2)), f"{3.14159:>12.4e}", "ä".encode())
    for wrong in ("[].pop()", "{}[1]", "1 / 0", "int('x')", "sqlite3.connect('/none/at/all')"):
        try:
            eval(wrong)
        except Exception as error:  # noqa: BLE001
            print(repr(error))


def main() -> None:
    library = ctypes.CDLL(os.environ["LOADED"]) if "LOADED" in os.environ else None
    wanted = [sys.argv[n : n + 3] for n in range(1, len(sys.argv) - 1, 3)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    all_patches = []
    for name, what, seed in wanted:
        patches = Patches(name, what, random.Random(seed))
        while not patches.map(libc):
            patches = Patches(name, what, random.Random(seed))
        all_patches.append(patches)
    memory = os.open("/proc/self/mem", os.O_RDWR)
    for patches in all_patches:
        patches.keep_uprobes_away(libc, memory)
    for patches in all_patches:
        patches.write(memory)
    if "WAITS" in os.environ:
        os.write(2, b"patched\n")
        os.read(0, 1)
    work(library)
    sys.stdout.flush()
    counts = [(len(patches.placed) + patches.shared, patches.refused, patches.hit(memory)) for patches in all_patches]
    print(" ".join(f"{placed}/{refused}/{hit}" for placed, refused, hit in counts), file=sys.stderr)


if __name__ == "__main__":
    main()
