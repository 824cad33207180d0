"""What the data of a program's records says, by name: by the program's templates, else by what its handlers log."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.formatters.templates import Template, Templates
    from dprobes.formatters.templates.fields import Value
    from dprobes.record.layout import LogRecord
    from dprobes.rpn.program import Program

__all__ = ["ProgramDataReader"]


class ProgramDataReader:
    """Read the data of a program's records as named values; ``files`` are its templates."""

    def __init__(self, program: Program, files: Mapping[str, bytes]) -> None:
        self._program = program
        self._files = files

    def __call__(self, record: LogRecord) -> Mapping[str, Value] | None:
        """Return the values of a record by their names; None if nothing is known of its data."""
        from dprobes.formatters.templates.fields import decode_fields, fields_of

        template = None if record.is_stack_trace else self._template_of(record)
        if template is None:
            return None
        names = (field.name for field in fields_of(template, record.word_size))
        return dict(zip(names, decode_fields(template, record).values, strict=True))

    @cached_property
    def _written(self) -> Templates:
        from dprobes.formatters.templates.collection import templates_of

        return templates_of(self._files)

    @cached_property
    def _derived(self) -> Mapping[int, Mapping[int, Template]]:
        """Templates for records without a written one, by the size of a word and the minor code."""
        from dprobes.formatters.templates.collection import templates_in
        from dprobes.formatters.templates.derived import derived_templates

        major = self._program.major
        return {size: templates_in(text, major) for size, text in derived_templates(self._program).items()}

    def _template_of(self, record: LogRecord) -> Template | None:
        from dprobes.formatters.templates.extraction import fits

        major, minor = record.major or 0, record.minor or 0
        if (written := self._written.find(major, minor)) is not None:
            return written
        derived = self._derived.get(record.word_size, {}).get(minor)
        return derived if derived is not None and derived.major == major and fits(derived, record) else None
