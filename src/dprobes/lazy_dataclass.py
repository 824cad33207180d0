"""
Dataclasses that cost little to import: what ``dataclasses.dataclass`` compiles for each class is made when it is used.

The standard library's decorator compiles six or seven functions for a class, which takes 0.4 ms; a start has 130
classes. Here ``__init__`` is compiled for classes of more than a few instances, and the other methods are closures over
the names of the fields. Instances behave alike: ``replace``, ``fields``, ``asdict``, patterns, pickles and hashes do
what they do with the original. What is rare is left to that: ``order``, ``kw_only``, ``InitVar``. Annotations must be
strings.
"""

from __future__ import annotations

import dataclasses
import reprlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass  # noqa: TID251 - what type checkers know

    Fields = dict[str, dataclasses.Field[Any]]

__all__ = ["dataclass"]

_MISSING = dataclasses.MISSING

_FEW = 6
"""Instances of a class that are made without a compiled ``__init__``: most classes of a start have no more."""


def _dataclass(
    cls: type | None = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True
) -> type | Callable[[type], type]:
    def made(cls: type) -> type:
        fields, own = _fields_of(cls), cls.__dict__
        attributes: dict[str, Any] = {"__init__": _lazy_init(fields, frozen=frozen), "__repr__": _repr}
        if eq:
            key = _key(tuple(field.name for field in fields.values() if field.compare))
            attributes["__eq__"] = _eq(key)
            if frozen:
                attributes["__hash__"] = lambda self: hash(key(self))
        if frozen:
            attributes["__setattr__"], attributes["__delattr__"] = _set_frozen, _delete_frozen
            if slots:
                attributes["__getstate__"], attributes["__setstate__"] = _get_state, _set_state
        # Python itself sets __hash__ to None where there is an __eq__.
        kept = own.keys() - ({"__hash__"} if own.get("__hash__", 0) is None and "__eq__" not in own else set())
        if eq and not frozen and "__hash__" not in kept:
            attributes["__hash__"] = None  # equal objects that change have none
        attributes = {name: value for name, value in attributes.items() if name not in kept}
        attributes["__match_args__"] = tuple(field.name for field in fields.values() if field.init)
        attributes["__dataclass_fields__"] = fields
        if slots:
            return _with_slots(cls, fields, attributes)
        for name, value in attributes.items():
            setattr(cls, name, value)
        return cls

    return made if cls is None else made(cls)


if not TYPE_CHECKING:
    dataclass = _dataclass


def _fields_of(cls: type) -> Fields:
    """Return the fields of a class and those that it inherits, in order; take their definitions out of the class."""
    fields: Fields = {}
    for base in cls.__mro__[-1:0:-1]:
        fields |= base.__dict__.get("__dataclass_fields__", {})
    for name, annotation in cls.__dict__.get("__annotations__", {}).items():  # noqa: RUF063 - inspect takes 6 ms to import
        assert isinstance(annotation, str), f"{cls.__qualname__} is in a module that evaluates annotations"
        if annotation.startswith("ClassVar"):
            continue
        default = cls.__dict__.get(name, _MISSING)
        if isinstance(default, dataclasses.Field):
            field = default
            if field.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, field.default)
        else:
            field = dataclasses.field(default=default)
        field.name, field.type, field.kw_only = name, annotation, False
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # noqa: SLF001 - how fields() knows them
        fields[name] = field
    return fields


def _with_slots(cls: type, fields: Fields, attributes: Mapping[str, object]) -> type:
    """Return the class again, with slots, which cannot be added to one that is there, and with attributes."""
    inherited = {slot for base in cls.__mro__[1:] for slot in base.__dict__.get("__slots__", ())}
    namespace = {k: v for k, v in cls.__dict__.items() if k not in fields and k not in {"__dict__", "__weakref__"}}
    namespace |= attributes
    namespace["__slots__"] = tuple(name for name in fields if name not in inherited)
    again: type = type(cls)(cls.__name__, cls.__bases__, namespace)
    again.__qualname__ = cls.__qualname__
    return again


def _lazy_init(fields: Fields, *, frozen: bool) -> Callable[..., None]:
    names = tuple(field.name for field in fields.values() if field.init)
    remaining = _FEW

    def __init__(self: object, *arguments: object, **keywords: object) -> None:  # noqa: N807
        nonlocal remaining
        remaining -= 1
        if remaining < 0 or not _assign(self, fields, names, arguments, keywords):
            owner = next(base for base in type(self).__mro__ if base.__dict__.get("__init__") is __init__)
            init = _init(owner, fields, frozen=frozen)
            owner.__init__ = init  # type: ignore[misc]
            init(self, *arguments, **keywords)

    return __init__


def _assign(
    self: object, fields: Fields, names: Sequence[str], arguments: Sequence[object], keywords: Mapping[str, object]
) -> bool:
    """Do what a compiled ``__init__`` does; return False where that has something to say against the arguments."""
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    if len(given) < len(arguments) + len(keywords) or not given.keys() <= set(names):
        return False
    for name, field in fields.items():
        if name in given:
            value = given[name]
        elif field.default is not _MISSING:
            value = field.default
        elif field.default_factory is not _MISSING:
            value = field.default_factory()
        elif field.init:
            return False
        else:
            continue
        object.__setattr__(self, name, value)
    if (finish := getattr(self, "__post_init__", None)) is not None:
        finish()
    return True


def _init(cls: type, fields: Fields, *, frozen: bool) -> Callable[..., None]:
    """Compile the ``__init__`` of a class."""
    names: dict[str, object] = {"_set": object.__setattr__, "_missing": _MISSING}
    parameters, body = ["self"], []
    for name, field in fields.items():
        value = name
        if field.default is not _MISSING:
            names[f"_default_{name}"] = field.default
            parameter, value = f"{name}=_default_{name}", name if field.init else f"_default_{name}"
        elif field.default_factory is not _MISSING:
            names[f"_make_{name}"] = field.default_factory
            parameter, value = f"{name}=_missing", f"_make_{name}()"
            if field.init:
                value += f" if {name} is _missing else {name}"
        else:
            parameter = name
        if field.init:
            parameters.append(parameter)
        elif value == name:
            continue
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(body or ["pass"]), names)  # noqa: S102 - our own text
    init: Callable[..., None] = names["__init__"]  # type: ignore[assignment]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _key(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    match names:
        case ():
            return lambda _: ()
        case (name,):
            value = attrgetter(name)
            return lambda self: (value(self),)
        case several:
            return attrgetter(*several)


def _eq(key: Callable[[object], tuple[object, ...]]) -> Callable[..., Any]:
    def __eq__(self: object, other: object) -> bool:  # noqa: N807
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


# Methods that all classes have in common.


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    names = (field.name for field in self.__dataclass_fields__.values() if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _set_frozen(self: Any, name: str, value: object) -> None:
    if "__dataclass_fields__" in type(self).__dict__ or name in self.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete_frozen(self: Any, name: str) -> None:
    if "__dataclass_fields__" in type(self).__dict__ or name in self.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _get_state(self: Any) -> list[object]:
    """Return what pickles and copies need: they cannot assign to fields."""
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _set_state(self: Any, state: list[object]) -> None:
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        object.__setattr__(self, name, value)
