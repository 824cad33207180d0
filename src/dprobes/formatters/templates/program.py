"""The templates of one program: those that a user wrote, and for other records those derived from what handlers log."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.formatters.templates.collection import templates_in, templates_of
from dprobes.formatters.templates.compiled import compiled_of
from dprobes.formatters.templates.extraction import fits
from dprobes.formatters.templates.model import Placeholder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dprobes.formatters.templates.collection import Templates
    from dprobes.formatters.templates.model import Part, Template
    from dprobes.record.layout import LogRecord
    from dprobes.record.origin import RecordSource

__all__ = ["ProgramTemplates"]


class ProgramTemplates:
    """
    Find the template of a record.

    A derived one is that of a record only if it takes all of its data: a handler that has ended early has logged less.
    """

    def __init__(
        self, written: Mapping[str, bytes] | None = None, derived: Mapping[int, str] | None = None, major: int = 0
    ) -> None:
        self._files = written or {}
        self._texts = derived or {}
        self._major = major

    @classmethod
    def of_source(cls, source: RecordSource | None) -> ProgramTemplates:
        """Return the templates of a program that records come from; none of nobody."""
        return cls() if source is None else cls(source.templates, source.derived, source.major)

    @cached_property
    def written(self) -> Templates:
        """The templates that a user wrote."""
        return templates_of(self._files)

    @cached_property
    def _derived(self) -> Mapping[int, Mapping[int, Template]]:
        """The others, by the size of a word and the minor code."""
        return {size: templates_in(text, self._major) for size, text in self._texts.items()}

    def of(self, record: LogRecord) -> Template | None:
        """Return the template of a record; a stack trace has none, whatever its codes are."""
        if record.is_stack_trace:
            return None
        major, minor = record.major or 0, record.minor or 0
        if (written := self.written.find(major, minor)) is not None:
            return written
        derived = self.derived(record.word_size, major, minor)
        if derived is None:
            return None
        compiled = compiled_of(derived, record.word_size, record.byte_order)
        if compiled is None or record.is_cut:
            return derived if fits(derived, record) else None
        return derived if len(record.data) == compiled.layout.size else None

    def derived(self, word_size: int, major: int, minor: int) -> Template | None:
        """Return the derived template of records with these codes."""
        template = self._derived.get(word_size, {}).get(minor)
        return template if template is not None and template.major == major else None

    def find(self, major: int, minor: int) -> Template | None:
        """
        Return the template of all records with these codes: the written one, or the derived one.

        There is none where words of both sizes have different ones. A record may be too short for the derived one.
        """
        if (written := self.written.find(major, minor)) is not None:
            return written
        derived = [found for size in (8, 4) if (found := self.derived(size, major, minor)) is not None]
        return derived[0] if derived and len({_parts_of(each) for each in derived}) == 1 else None

    def all(self) -> Iterator[Template]:
        """Iterate over all templates; those derived for either size of a word are mostly the same."""
        yield from self.written.all()
        seen = set()
        for templates in self._derived.values():
            for template in templates.values():
                key = template.minor, _parts_of(template)
                if self.written.find(template.major, template.minor) is None and key not in seen:
                    seen.add(key)
                    yield template


def _parts_of(template: Template) -> tuple[tuple[Part, ...], ...]:
    """Return the lines of a template, wherever they are written."""
    return tuple(
        tuple(replace(part, span=None) if isinstance(part, Placeholder) else part for part in line)
        for line in template.lines
    )
