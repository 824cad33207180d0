"""The bytes themselves, read as ``ppdf.md`` draws them, and a file of version 1.0 that every version must read."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from dprobes.ppdf.ppdf_file import decode, encode
from unit.ppdf.samples import sample

KEPT = Path(__file__).parents[2] / "fixtures" / "ppdf" / "version-1.0.ppdf"
NONE = 0xFFFFFFFF


class Fields:
    """Read numbers one after the other; what is drawn is all that this knows."""

    def __init__(self, data: bytes, strings: list[str]) -> None:
        self._data = data
        self._strings = strings

    def number(self, size: int) -> int:
        value, self._data = int.from_bytes(self._data[:size], "little"), self._data[size:]
        return value

    def string(self) -> str | None:
        number = self.number(4)
        return None if number == NONE else self._strings[number]

    def block(self) -> bytes:
        return self.taken(self.number(4))

    def taken(self, size: int) -> bytes:
        taken, self._data = self._data[:size], self._data[size:]
        assert len(taken) == size
        return taken

    def done(self) -> bool:
        return not self._data


def sections_as_drawn(data: bytes) -> dict[str, Fields]:
    assert data[:8] == bytes.fromhex("89 50 50 44 46 0d 0a 1a")
    major, minor, size, count, checksum = struct.unpack_from("<HHIII", data, 8)
    table = data[24 : 24 + 16 * count]
    assert (major, minor, size) == (1, 3, len(data))
    assert checksum == zlib.crc32(data[:20] + table)
    found = {}
    end = 24 + 16 * count
    for name, offset, length, crc in struct.iter_unpack("<4sIII", table):
        assert offset == end
        end += length
        assert zlib.crc32(data[offset:end]) == crc
        found[name.decode()] = data[offset:end]
    assert end == size
    texts = Fields(found.pop("STRS"), [])
    strings = [texts.block().decode() for _ in range(texts.number(4))]
    assert texts.done()
    return {name: Fields(section, strings) for name, section in found.items()}


def test_what_is_drawn_is_what_is_written() -> None:
    ppdf = sample()
    sections = sections_as_drawn(encode(ppdf))
    info = sections["INFO"]
    assert (info.string(), info.number(4), info.done()) == ("dprobes test", 1, True)
    assert (sections["ISET"].number(4), sections["ISET"].done()) == (7, True)
    builds = sections["BILD"]
    assert builds.number(4) == len(ppdf.builds)
    for build in ppdf.builds:
        assert (builds.string(), builds.string(), builds.string()) == (build.identity, build.path, build.machine)
        assert builds.number(4) == len(build.symbols)
        for symbol in build.symbols:
            assert (builds.string(), builds.number(8), builds.number(8)) == (symbol.name, symbol.address, symbol.size)
            assert ("func", "object", "ifunc", "tls", "common", "notype")[builds.number(1)] == symbol.kind
            assert ("local", "global", "weak")[builds.number(1)] == symbol.binding
            assert builds.number(1) == symbol.default_version
        assert builds.number(4) == len(build.places)
        for place in build.places:
            assert (builds.number(4), builds.number(8)) == (place.definition, place.offset)
            assert (builds.string(), builds.number(1)) == (place.where, place.is_exit)
            assert builds.taken(builds.number(1)) == place.raw
    assert builds.done()
    kernels = sections["KERN"]
    assert kernels.number(4) == len(ppdf.kernels)
    for kernel in ppdf.kernels:
        assert (kernels.string(), kernels.string(), kernels.string()) == (kernel.identity, kernel.path, kernel.module)
        areas = tuple((kernels.string(), kernels.number(8), kernels.number(8)) for _ in range(kernels.number(4)))
        assert areas == kernel.areas
        symbols = [(kernels.string(), kernels.number(8), kernels.number(1)) for _ in range(kernels.number(4))]
        assert symbols == [(symbol.name, symbol.address, ord(symbol.letter)) for symbol in kernel.symbols]
        assert kernels.number(4) == len(kernel.places)
        for its in kernel.places:
            assert (kernels.number(4), kernels.number(8), kernels.string()) == (its.definition, its.address, its.where)
            assert kernels.taken(kernels.number(1)) == its.raw
    assert kernels.done()
    templates = sections["TMPL"]
    found = {templates.string(): templates.block() for _ in range(templates.number(4))}
    assert found == ppdf.templates
    assert templates.done()
    ebpf = sections["EBPF"]
    assert ebpf.number(4) == len(ppdf.ebpf) == 2 * 3 * len(ppdf.program.definitions)
    for code in ppdf.ebpf:
        assert (ebpf.string(), ebpf.number(4), ebpf.string()) == (code.machine, code.definition, code.loops)
        assert (ebpf.string(), ebpf.number(4), ebpf.number(1)) == (code.problem, code.scratch, code.sleepable)
        assert ebpf.block() == code.code
        slots = len(code.code) // 8
        assert struct.unpack(f"<{slots}i", ebpf.taken(4 * slots)) == code.origins
        maps = [(ebpf.number(4), ebpf.string(), bool(ebpf.number(1))) for _ in range(ebpf.number(4))]
        assert maps == [(reference.index, reference.name, reference.is_value) for reference in code.maps]
    assert ebpf.done()


def test_source_lines_are_those_that_something_refers_to() -> None:
    sources = sections_as_drawn(encode(sample()))["SRCE"]
    assert sources.number(4) == 1
    assert sources.string() == "sample.rpn"
    lines = {sources.number(4): sources.string() for _ in range(sources.number(4))}
    assert list(lines) == sorted(lines)
    assert lines[4] == 'name = "libwork.so"'
    assert "again:" not in lines.values()
    assert 1 not in lines
    for _ in range(sources.number(4)):
        file, line, column, length = (sources.number(4) for _ in range(4))
        macro, body = sources.string(), sources.number(4)
        assert file == 0
        assert 1 <= column <= column + length <= len(lines[line] or "") + 1
        assert (macro is not None) == (body != NONE)
    assert sources.done()


def test_code_is_the_encoding_of_the_language() -> None:
    code = sections_as_drawn(encode(sample()))["CODE"]
    for name, word in (("x86_64", 8), ("i386", 4)) if code.number(4) == 2 else ():
        assert code.string() == name
        data = code.block()
        # push 7, and push -1, as the recovered reference 1.2 numbers them
        assert data.startswith(b"\x4c" + (7).to_bytes(word, "little") + b"\x4c" + b"\xff" * word)
        handlers = [code.number(4) for _ in range(code.number(4))]
        procedures = [code.number(4) for _ in range(code.number(4))]
        assert (len(handlers), handlers[0], len(procedures)) == (4, 0, 1)
        relocations = [(code.number(4), code.string(), code.number(16)) for _ in range(code.number(4))]
        assert relocations == [(3 + 2 * word, "table", 8)]
    assert code.done()


def test_a_file_of_version_1_0_is_read() -> None:
    # Written once, and never again: a file that somebody has must stay readable. Its eBPF is that of its day.
    kept = decode(KEPT.read_bytes())
    expected = sample()
    assert kept.program == expected.program
    assert (kept.machines, kept.builds, kept.templates) == (expected.machines, expected.builds, expected.templates)
    assert (kept.needs_write, kept.tool, kept.kernels) == (True, "dprobes test", ())
    assert len(kept.ebpf) == len(expected.ebpf)
    assert str(kept.program.definitions[0].handler.instructions[0].span) == "sample.rpn:14:5"
