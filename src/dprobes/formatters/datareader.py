"""What the data of a program's records says, by name: by the program's templates, else by what its handlers log."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.formatters.templates.fields import Value
    from dprobes.formatters.templates.program import ProgramTemplates
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

        template = self._templates.of(record)
        if template is None:
            return None
        names = (field.name for field in fields_of(template, record.word_size))
        return dict(zip(names, decode_fields(template, record).values, strict=True))

    @cached_property
    def _templates(self) -> ProgramTemplates:
        from dprobes.formatters.templates.derived import derived_templates
        from dprobes.formatters.templates.program import ProgramTemplates

        return ProgramTemplates(self._files, derived_templates(self._program), self._program.major)
