"""
Names of addresses in a record, in the form that all outputs with fields use.

If a template prints a field by the name of its address (``%a``), there is an additional field ``FIELD_name``, its
companion. A field with several addresses, a call stack (``%k``) or an array, has the companion ``FIELD_names``. An
unknown address stays a number. The reason why a stack ends early is a text in angle brackets, as in lines of text. The
function of a record is the function of its probepoint. For a sampler or a watchpoint, it is the function that contains
the ip.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.formatters.templates.data_extraction import fields_of, placeholders, unique_name
from dprobes.formatters.templates.template_model import Conversion
from dprobes.formatters.templates.template_renderer import STACK_ENDS
from dprobes.rpn.instruction_set import StackEnd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import Value
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place

__all__ = ["AddressField", "address_fields", "code_names", "code_names_of", "frame_name", "function_of"]


class AddressField(NamedTuple):
    """
    A field with addresses that have names.

    ``position`` is its position among the fields of the template, ``name`` the name of the companion field.
    """

    position: int
    name: str
    is_stack: bool
    is_array: bool


@lru_cache(maxsize=4096)
def address_fields(template: Template, word_size: int) -> tuple[AddressField, ...]:
    """Return the fields of a template whose addresses have names. Most templates have none."""
    fields = fields_of(template, word_size)
    taken = {field.name for field in fields}
    found = []
    for position, (field, part) in enumerate(zip(fields, placeholders(template), strict=True)):
        if part.conversion not in (Conversion.ADDRESS, Conversion.STACK):
            continue
        name = unique_name(f"{field.name}_names" if field.is_array else f"{field.name}_name", taken)
        found.append(AddressField(position, name, part.conversion is Conversion.STACK, field.is_array))
    return tuple(found)


def code_names_of(
    template: Template, record: LogRecord, values: Sequence[Value], place: Place, symboliser: Symboliser
) -> list[tuple[str, str | tuple[str, ...]]]:
    """
    Return pairs of field name and symbolic name for the address fields of a record.

    ``values`` are the values of the template's fields. Values that could not be read, or are no addresses, are omitted.
    """
    found = []
    for each in address_fields(template, record.word_size):
        names = code_names(values[each.position], record, place, symboliser, is_stack=each.is_stack)
        if names is not None:
            found.append((each.name, names))
    return found


def code_names(
    value: Value, record: LogRecord, place: Place, symboliser: Symboliser, *, is_stack: bool
) -> str | tuple[str, ...] | None:
    """
    Return the name of an address, or of each of several, or None if the value is not an address.

    With ``is_stack``, several addresses are a call stack, in which return addresses follow the first one.
    """
    match value:
        case int():
            return _name(value, record, place, symboliser)
        case tuple() if is_stack:
            return tuple(frame_name(n, each, record, place, symboliser) for n, each in enumerate(value))
        case tuple():
            return tuple(_name(each, record, place, symboliser) for each in value)
    return None


def frame_name(number: int, address: int, record: LogRecord, place: Place, symboliser: Symboliser) -> str:
    """
    Return the name of frame ``number`` of a call stack, or the reason why the stack ends.

    All frames but the first have return addresses, which are named by the call before them.
    """
    if number and address in STACK_ENDS:
        return f"<{STACK_ENDS[StackEnd(address)]}>"
    if not number:
        return _name(address, record, place, symboliser)
    found = symboliser.caller_name(address, record, place)
    return f"{address:#x}" if found is None else found.text


def _name(address: int, record: LogRecord, place: Place, symboliser: Symboliser) -> str:
    return symboliser.name_of(address, record, place) or f"{address:#x}"


def function_of(record: LogRecord, place: Place, symboliser: Symboliser | None) -> str:
    """
    Return the function of a record: its probepoint's, or else that of the ip.

    Return an empty string if it is unknown.
    """
    if place.is_code or place.function or symboliser is None or record.ip is None:
        return place.routine
    found = symboliser.code_name(record.ip, record, place)
    return "" if found is None else found.function
