"""
Line table: the source line of each instruction (``.debug_line``).

Each unit has one line number program. Its header lists the files; its execution yields rows of addresses and lines.
Rules: DWARF Debugging Information Format, versions 4 and 5, section 6.2. A header of version 2 or 3 is like that of
version 4, but has no ``maximum_operations_per_instruction``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.elf.byte_reader import ByteReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LineProgram", "LineSections", "addresses_of_lines", "line_programs"]

_LONG = 0xFFFFFFFF
"""Mark of the 64-bit format in place of a length. The length follows."""
_RESERVED = 0xFFFFFFF0

_FILES_MAX = 1 << 20
_ROWS_MAX = 1 << 24


class LineSections(NamedTuple):
    """The sections of line tables: ``.debug_line`` and the sections of the strings that it refers to."""

    lines: bytes
    strings: bytes = b""
    line_strings: bytes = b""
    is_big_endian: bool = False


class LineRow(NamedTuple):
    """
    A row of the line table: the first instruction of a line, or of a part of a line.

    ``file`` is an index of the program's files. ``ends`` is set in the row after the last instruction of a sequence,
    which belongs to no line.
    """

    address: int
    file: int
    line: int
    column: int
    begins_statement: bool
    ends_prologue: bool
    ends: bool


class LineProgram:
    """
    Line table of one unit.

    ``files`` has paths by the file numbers in rows. A path contains its directory as the compiler wrote it: relative to
    the directory of the unit, or absolute.
    """

    def __init__(self, sections: LineSections, offset: int) -> None:
        """Read the header at ``offset`` of the section; raise ``TargetError`` if it is damaged."""
        self.offset = offset
        self._order: Literal["big", "little"] = "big" if sections.is_big_endian else "little"
        self._data = sections.lines
        self._reader = ByteReader(sections.lines, self._order)
        self._strings = sections
        try:
            self.end = self._read_header()
        except (IndexError, struct.error, ValueError) as error:
            raise TargetError(f"the line table at {offset:#x} of .debug_line is damaged: {error}") from None

    def rows(self) -> Iterator[LineRow]:
        """Execute the program and iterate over its rows; raise ``TargetError`` where it is damaged."""
        try:
            yield from self._execute()
        except (IndexError, struct.error, ValueError) as error:
            raise TargetError(f"the line table at {self.offset:#x} of .debug_line is damaged: {error}") from None

    # The header

    def _read_header(self) -> int:
        self._reader.position = self.offset
        length = self._reader.number(4)
        self._offset_size = 4
        if length == _LONG:
            length, self._offset_size = self._reader.number(8), 8
        elif length >= _RESERVED:
            raise ValueError(f"its length is {length:#x}")
        end = self._reader.position + length
        if end > len(self._data):
            raise ValueError(f"it goes on to {end:#x}, the section only to {len(self._data):#x}")
        self.version = self._reader.number(2)
        if not 2 <= self.version <= 5:
            raise ValueError(f"it has version {self.version}")
        self._address_size = 0
        if self.version >= 5:
            self._address_size, _segment = self._reader.number(1), self._reader.number(1)
        header_length = self._reader.number(self._offset_size)
        self._start = self._reader.position + header_length
        if self._start > end:
            raise ValueError("its header is longer than it is")
        self._unit = self._reader.number(1)
        self._operations = self._reader.number(1) if self.version >= 4 else 1
        self._default_is_statement = bool(self._reader.number(1))
        self._line_base = self._reader.number(1, is_signed=True)
        self._line_range = self._reader.number(1)
        self._opcode_base = self._reader.number(1)
        if not self._line_range or not self._operations or not self._opcode_base:
            raise ValueError("its header has a zero where none may be")
        self._operand_counts = [self._reader.number(1) for _ in range(self._opcode_base - 1)]
        self.files: Sequence[str] = self._files_of_5() if self.version >= 5 else self._files_of_4()
        return end

    def _files_of_4(self) -> list[str]:
        """
        Read two lists of strings, each terminated by an empty string. The numbers of files begin with 1.

        ::

            directory NUL ... NUL   name NUL  directory (ULEB128)  time  size  ... NUL
        """
        directories = [""]
        while text := _decoded(self._reader.text()):
            directories.append(text)
        files = [""]
        while name := _decoded(self._reader.text()):
            directory, _, _ = self._reader.unsigned(), self._reader.unsigned(), self._reader.unsigned()
            files.append(_joined(directories, directory, name))
            if len(files) > _FILES_MAX:
                raise ValueError("it has too many files")
        return files

    def _files_of_5(self) -> list[str]:
        """Read directories and files, each list after the forms of its fields. The numbers of files begin with 0."""
        directories = [path for path, _ in self._entries()]
        return [_joined(directories, directory, path) for path, directory in self._entries()]

    def _entries(self) -> list[tuple[str, int]]:
        forms = [(self._reader.unsigned(), self._reader.unsigned()) for _ in range(self._reader.number(1))]
        count = self._reader.unsigned()
        if count > _FILES_MAX or (count and not forms):
            raise ValueError(f"it has {count} files")
        entries = []
        for _ in range(count):
            path, directory = "", 0
            for content, form in forms:
                value = self._form(form)
                if content == _CONTENT_PATH and isinstance(value, str):
                    path = value
                elif content == _CONTENT_DIRECTORY and isinstance(value, int):
                    directory = value
            entries.append((path, directory))
        return entries

    def _form(self, form: int) -> int | str | None:
        match form:
            case 0x08:  # DW_FORM_string
                return _decoded(self._reader.text())
            case 0x0E:  # DW_FORM_strp
                return _text_at(self._strings.strings, self._reader.number(self._offset_size))
            case 0x1F:  # DW_FORM_line_strp
                return _text_at(self._strings.line_strings, self._reader.number(self._offset_size))
            case 0x0F:  # DW_FORM_udata
                return self._reader.unsigned()
            case 0x0B | 0x05 | 0x06 | 0x07:  # DW_FORM_data1, data2, data4, data8
                return self._reader.number({0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8}[form])
            case 0x1E:  # DW_FORM_data16
                self._reader.skip(16)
            case 0x09:  # DW_FORM_block
                self._reader.skip(self._reader.unsigned())
            case _:
                raise ValueError(f"its header has form {form:#x}")
        return None

    # The program

    def _execute(self) -> Iterator[LineRow]:  # one state machine, in one loop for its speed
        data, position, end = self._data, self._start, self.end
        line_base, line_range, base = self._line_base, self._line_range, self._opcode_base
        unit, operations, default = self._unit, self._operations, self._default_is_statement
        address, operation, file, line, column = 0, 0, 1, 1, 0
        is_statement, ends_prologue = default, False
        rows = 0
        while position < end:
            opcode = data[position]
            position += 1
            if opcode >= base:
                advance, step = divmod(opcode - base, line_range)
                if operations == 1:
                    address += advance * unit
                else:
                    address += unit * ((operation + advance) // operations)
                    operation = (operation + advance) % operations
                line += line_base + step
                yield LineRow(address, file, line, column, is_statement, ends_prologue, False)
                ends_prologue = False
                rows += 1
            elif opcode == 0:
                self._reader.position = position
                size = self._reader.unsigned()
                start = self._reader.position
                position = start + size
                if not size or position > end:
                    raise ValueError("an instruction is longer than it")
                extended = data[start]
                if extended == _END_SEQUENCE:
                    yield LineRow(address, file, line, column, is_statement, False, True)
                    address, operation, file, line, column = 0, 0, 1, 1, 0
                    is_statement, ends_prologue = default, False
                    rows += 1
                elif extended == _SET_ADDRESS:
                    address = int.from_bytes(data[start + 1 : position], self._order)
                    operation = 0
            elif opcode == _COPY:
                yield LineRow(address, file, line, column, is_statement, ends_prologue, False)
                ends_prologue = False
                rows += 1
            elif opcode == _NEGATE_STATEMENT:
                is_statement = not is_statement
            elif opcode == _CONST_ADD_PC:
                advance = (255 - base) // line_range
                address += unit * ((operation + advance) // operations)
                operation = (operation + advance) % operations
            elif opcode == _FIXED_ADVANCE_PC:
                self._reader.position = position
                address, operation = address + self._reader.number(2), 0
                position = self._reader.position
            elif opcode == _SET_PROLOGUE_END:
                ends_prologue = True
            elif opcode in _PLAIN:
                pass
            else:
                self._reader.position = position
                if opcode == _ADVANCE_PC:
                    advance = self._reader.unsigned()
                    address += unit * ((operation + advance) // operations)
                    operation = (operation + advance) % operations
                elif opcode == _ADVANCE_LINE:
                    line += self._reader.signed()
                elif opcode == _SET_FILE:
                    file = self._reader.unsigned()
                elif opcode == _SET_COLUMN:
                    column = self._reader.unsigned()
                else:  # an opcode that is newer than this reader; the header has its number of operands
                    for _ in range(self._operand_counts[opcode - 1]):
                        self._reader.unsigned()
                position = self._reader.position
            if rows > _ROWS_MAX:
                raise ValueError("it has too many rows")


def line_programs(sections: LineSections) -> Iterator[LineProgram]:
    """
    Iterate over the line tables of all units, and read only their headers.

    Raise ``TargetError`` if one is damaged.
    """
    offset = 0
    while offset < len(sections.lines):
        program = LineProgram(sections, offset)
        yield program
        offset = program.end


_CONTENT_PATH, _CONTENT_DIRECTORY = 1, 2
"""DW_LNCT_path, DW_LNCT_directory_index."""

_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _SET_COLUMN, _NEGATE_STATEMENT = range(1, 7)
_SET_BASIC_BLOCK, _CONST_ADD_PC, _FIXED_ADVANCE_PC, _SET_PROLOGUE_END, _SET_EPILOGUE_BEGIN = range(7, 12)
_PLAIN = frozenset({_SET_BASIC_BLOCK, _SET_EPILOGUE_BEGIN})
_END_SEQUENCE, _SET_ADDRESS = 1, 2
"""DW_LNS_… and DW_LNE_…, standard and extended opcodes."""


def _joined(directories: Sequence[str], number: int, name: str) -> str:
    directory = directories[number] if number < len(directories) else ""
    return name if not directory or name.startswith("/") else f"{directory}/{name}"


def _text_at(section: bytes, offset: int) -> str:
    if offset >= len(section):
        raise ValueError(f"a string is at {offset:#x}, after the end of its section")
    return _decoded(section[offset : section.index(b"\0", offset)])


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


_NEAR_LINES = 2
"""Number of lines with code that are suggested for one without."""


def addresses_of_lines(sections: LineSections, path: str, first: int, last: int) -> dict[int, list[int]]:
    """
    Return the link addresses of the instructions that begin a statement of lines ``first`` to ``last``, by line.

    ``path`` is the name of a source file, or the last parts of its path. A statement that continues over several rows
    begins once. A loop's line begins where the loop is entered, tested and continued. For a line without marked
    statements, its instructions that follow those of other lines count. If several lines begin at an instruction, it
    counts for the requested one, and of several requested ones for the last.

    Raise ``TargetError`` if there is no such file, several such files, or no instruction of those lines.
    """
    found = _Statements(path, first, last)
    for program in line_programs(sections):
        found.look_in(program)
    return found.by_line()


class _Statements:
    """A collector of the instructions at which statements of the lines ``first`` to ``last`` (included) begin."""

    def __init__(self, path: str, first: int, last: int) -> None:
        self._path = path
        self._first = first
        self._last = last
        self._starts: dict[int, tuple[set[int], set[int]]] = {}
        """Starts of statements, and of other rows, by line."""
        self._owners: dict[int, int] = {}
        self._paths: set[str] = set()
        self._lines: set[int] = set()

    def look_in(self, program: LineProgram) -> None:
        """Add the statements of the requested lines from one unit's line table."""
        files = {number for number, each in enumerate(program.files) if _ends_with(each, self._path)}
        before: LineRow | None = None
        for row in program.rows() if files else ():
            if row.file in files and not row.ends and row.line:
                self._paths.add(_normal(program.files[row.file]))
                self._lines.add(row.line)
                if self._first <= row.line <= self._last:
                    self._owners[row.address] = row.line
                    if before is None or (before.file, before.line) != (row.file, row.line):
                        statements, others = self._starts.setdefault(row.line, (set(), set()))
                        (statements if row.begins_statement else others).add(row.address)
            before = None if row.ends else row

    def by_line(self) -> dict[int, list[int]]:
        """Return the link addresses of the collected statements by line; raise ``TargetError`` if there are none."""
        path, first, last = self._path, self._first, self._last
        if not self._lines:
            raise TargetError(f"no source file '{path}' is known to the debug information")
        if len(self._paths) > 1:
            raise TargetError(
                f"{len(self._paths)} source files are named '{path}'",
                hint=f"write more of its path: {', '.join(sorted(self._paths))}",
            )
        if not self._starts:
            what = f"line {first} of '{path}' has" if first == last else f"lines {first} to {last} of '{path}' have"
            raise TargetError(f"{what} no instructions", hint=_near(self._lines, first))
        found = {line: sorted(statements or others) for line, (statements, others) in sorted(self._starts.items())}
        if first != last:
            found = {line: [each for each in places if self._owners[each] == line] for line, places in found.items()}
        return {line: addresses for line, addresses in found.items() if addresses}


def _ends_with(path: str, end: str) -> bool:
    """Return True if a path ends with the whole parts ``end``: ``lib/a.c`` ends with ``a.c``, but not with ``.c``."""
    return path == end or path.endswith(f"/{end}")


def _normal(path: str) -> str:
    """Return a path without ``.``, ``..`` and double slashes, so that different spellings of a file are equal."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] not in ("", ".."):
            parts.pop()
        elif part != "." and (part or not parts):
            parts.append(part)
    return "/".join(parts)


def _near(lines: Iterable[int], line: int) -> str:
    nearest: Sequence[int] = sorted(sorted(lines, key=lambda each: abs(each - line))[:_NEAR_LINES])
    return f"the nearest lines with instructions are {' and '.join(map(str, nearest))}"
