"""
Tables of records: their columns with types, and the directories of their files.

There is one table for each program, major and minor code. All have ``HEADER_COLUMNS``. A table with a template also has
a column for each field and for the names of its addresses, ``PROBLEMS`` and ``REST``. A table without a template has
``ITEMS``. The directories are named as in Hive, so that readers get program, major and minor code from a file's path.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Self, assert_never
from urllib.parse import quote, unquote

from dprobes.formatters.address_fields import AddressField, address_fields
from dprobes.formatters.templates.data_extraction import Field, FieldKind, fields_of, unique_name

if TYPE_CHECKING:
    import pyarrow as pa

    from dprobes.formatters.templates.template_model import Template

__all__ = [
    "HEADER_COLUMNS",
    "TIME_NS",
    "TIME_ZONE",
    "Partition",
    "field_columns",
    "field_type",
    "file_schema",
    "fixed_columns",
    "name_columns",
    "name_type",
    "table_schema",
]

HEADER_COLUMNS = {
    "time": "timestamp[ns]",
    "monotonic": "uint64",
    "cpu": "uint32",
    "pid": "uint32",
    "tid": "uint32",
    "uid": "uint32",
    "process_name": "string",
    "module": "string",
    "symbol": "string",
    "function": "string",
    "placed": "uint64",
    "at_return": "bool",
    "cs": "uint32",
    "ip": "uint64",
    "ss": "uint32",
    "sp": "uint64",
    "word_size": "uint8",
    "byte_order": "string",
    "stack_trace": "bool",
    "lost_before": "uint64",
    "data": "binary",
}
"""
Common columns of all tables, with their types.

``time`` has no time zone in its type. DuckDB 1 reads a time with a zone in microseconds. DuckDB 2 reads it exactly, but
as a type (TIMESTAMPTZ_NS) without intervals, differences, ``time_bucket`` or ``date_trunc``.
"""

TIME_NS = "time_ns"
"""
Column of files that has ``time`` in nanoseconds, as a number.

The column ``time`` of files is in microseconds, because Spark refuses files with TIMESTAMP(NANOS), whichever columns it
reads (ParquetSchemaConverter: "Illegal Parquet type").
"""

TIME_ZONE = "UTC"
"""The time zone of ``time``, which each file has in its metadata."""

PARTITION_COLUMNS = ("program", "major", "minor")
ITEMS, PROBLEMS, REST = "items", "problems", "rest"

_NAME_MAX = 200
"""Maximum length in bytes of a program's directory name. File systems allow 255."""

_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Hive's name for a missing value."""

_WORD = 8
"""Size in bytes of a word's column, for words of both sizes."""


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """Key of a table: program, major and minor code. A code is None if records do not have it."""

    program: str
    major: int | None
    minor: int | None

    @property
    def directory(self) -> PurePath:
        """Directory of the table's files, relative to the directory of all tables."""
        return PurePath(f"program={_directory_name(self.program)}", f"major={_code(self.major)}",
                        f"minor={_code(self.minor)}")  # fmt: skip

    @classmethod
    def of_file(cls, path: Path) -> Self | None:
        """Return the table that a file belongs to, or None if its path does not name one."""
        found = dict(part.split("=", 1) for part in path.parts[-4:-1] if "=" in part)
        if tuple(found) != PARTITION_COLUMNS:
            return None
        try:
            return cls(unquote(found["program"]), _read_code(found["major"]), _read_code(found["minor"]))
        except ValueError:
            return None


def _directory_name(program: str) -> str:
    data = program.encode("utf-8", "surrogateescape")
    name = quote(data, safe=" ")
    if program == _NULL:
        name = name.replace("_", "%5F")
    if len(name) <= _NAME_MAX:
        return name
    # Two long names with the same beginning must remain distinct.
    return f"{quote(data[: _NAME_MAX // 4], safe=' ')}~{hashlib.sha256(data).hexdigest()[:16]}"


def _code(code: int | None) -> str:
    return _NULL if code is None else str(code)


def _read_code(text: str) -> int | None:
    if text == _NULL:
        return None
    if not text.isascii() or not text.isdecimal():
        raise ValueError(text)
    return int(text)


def fixed_columns() -> dict[str, str]:
    """Return the columns of the table of all records, including those in a file's path."""
    partition = dict(zip(PARTITION_COLUMNS, ("string", "uint32", "uint32"), strict=True))
    return {"time": HEADER_COLUMNS["time"], **partition, **HEADER_COLUMNS}


def field_columns(template: Template) -> tuple[tuple[str, Field], ...]:
    """
    Return the columns of a template's fields: pairs of column name and field.

    A name that another column has, ignoring case, gets a number, because SQL treats both as the same.
    """
    taken = {*fixed_columns(), TIME_NS, ITEMS, PROBLEMS, REST}
    return tuple((unique_name(field.name, taken, fold=str.lower), field) for field in fields_of(template, _WORD))


def field_type(field: Field) -> pa.DataType:
    """Return the Arrow type of a field's column, which is a list for an array."""
    import pyarrow as pa

    match field.kind:
        case FieldKind.STRING | FieldKind.CHARACTER:
            return pa.string()
        case FieldKind.BYTES:
            return pa.binary()
        case FieldKind.SIGNED:
            element = pa.type_for_alias(f"int{8 * field.size}")
        case FieldKind.UNSIGNED | FieldKind.ADDRESS:
            element = pa.type_for_alias(f"uint{8 * field.size}")
        case other:
            assert_never(other)
    return pa.list_(element) if field.is_array else element


def name_columns(template: Template) -> tuple[tuple[str, AddressField], ...]:
    """Return the columns for symbolic names of addresses: pairs of column name and address field."""
    taken = {*fixed_columns(), TIME_NS, ITEMS, PROBLEMS, REST, *(name.lower() for name, _ in field_columns(template))}
    return tuple((unique_name(each.name, taken, fold=str.lower), each) for each in address_fields(template, _WORD))


def name_type(field: AddressField) -> pa.DataType:
    """Return the Arrow type of a column of symbolic names: strings, or lists of strings for an array."""
    import pyarrow as pa

    return pa.list_(pa.string()) if field.is_array else pa.string()


def table_schema(template: Template | None) -> pa.Schema:
    """
    Return the Arrow schema of records with a template, or of records with self-describing items (None).

    Major and minor code are not columns, because they are in the path of a file.
    """
    import pyarrow as pa

    columns = [(name, pa.type_for_alias(kind)) for name, kind in HEADER_COLUMNS.items()]
    if template is None:
        columns.append((ITEMS, pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())]))))
    else:
        columns += [(name, field_type(field)) for name, field in field_columns(template)]
        columns += [(name, name_type(field)) for name, field in name_columns(template)]
        problem = pa.struct([("field", pa.string()), ("problem", pa.string()), ("address", pa.uint64())])
        columns += [(PROBLEMS, pa.list_(problem)), (REST, pa.binary())]
    return pa.schema(columns)


def file_schema(schema: pa.Schema) -> pa.Schema:
    """
    Return the schema of a Parquet file for a table with ``schema``.

    Its ``time`` is in microseconds, and is followed by a column of nanoseconds since 1970 as integers.
    """
    import pyarrow as pa

    fields = [pa.field("time", pa.timestamp("us")) if each.name == "time" else each for each in schema]
    fields.insert(schema.get_field_index("time") + 1, pa.field(TIME_NS, pa.int64()))
    return pa.schema(fields)
