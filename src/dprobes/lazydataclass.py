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
import inspect
import reprlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
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
        fields = _fields_of(cls)
        if slots:
            cls = _with_slots(cls, fields)
        methods = {"__init__": _lazy_init(cls, fields, frozen=frozen), "__repr__": _repr(fields)}
        if eq:
            key = _key(field.name for field in fields.values() if field.compare)
            methods["__eq__"] = _eq(key)
            if frozen:
                methods["__hash__"] = lambda self: hash(key(self))
        if frozen:
            methods |= _frozen(cls, fields)
            if slots:
                methods |= _state(fields)
        own = cls.__dict__
        for name, method in methods.items():
            # Python itself sets __hash__ to None where there is an __eq__.
            if name not in own or (name == "__hash__" and own[name] is None and "__eq__" not in own):
                method.__qualname__ = f"{cls.__qualname__}.{name}"
                setattr(cls, name, method)
        attributes: dict[str, object] = {
            "__match_args__": tuple(field.name for field in fields.values() if field.init),
            "__dataclass_fields__": fields,
        }
        if eq and not frozen and "__hash__" not in own:
            attributes["__hash__"] = None  # equal objects that change have none
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
    for name, annotation in inspect.get_annotations(cls).items():
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


def _with_slots(cls: type, fields: Fields) -> type:
    """Return the class again, with slots: they cannot be added to one that is there."""
    inherited = {slot for base in cls.__mro__[1:] for slot in base.__dict__.get("__slots__", ())}
    namespace = {k: v for k, v in cls.__dict__.items() if k not in fields and k not in {"__dict__", "__weakref__"}}
    namespace["__slots__"] = tuple(name for name in fields if name not in inherited)
    again: type = type(cls)(cls.__name__, cls.__bases__, namespace)
    again.__qualname__ = cls.__qualname__
    return again


def _lazy_init(cls: type, fields: Fields, *, frozen: bool) -> Callable[..., None]:
    names = tuple(field.name for field in fields.values() if field.init)
    remaining = _FEW

    def __init__(self: object, *arguments: object, **keywords: object) -> None:  # noqa: N807
        nonlocal remaining
        remaining -= 1
        if remaining < 0 or not _assign(self, fields, names, arguments, keywords):
            init = _init(cls, fields, frozen=frozen)
            cls.__init__ = init  # type: ignore[misc]
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


def _key(names: Iterable[str]) -> Callable[[object], tuple[object, ...]]:
    match tuple(names):
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


def _repr(fields: Fields) -> Callable[..., Any]:
    names = [field.name for field in fields.values() if field.repr]

    @reprlib.recursive_repr()
    def __repr__(self: object) -> str:  # noqa: N807
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _frozen(cls: Any, fields: Fields) -> dict[str, Callable[..., Any]]:
    def __setattr__(self: object, name: str, value: object) -> None:  # noqa: N807
        if type(self) is cls or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:  # noqa: N807
        if type(self) is cls or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _state(fields: Fields) -> dict[str, Callable[..., Any]]:
    """Return what pickles and copies need: they cannot assign to fields."""
    names = tuple(fields)

    def __getstate__(self: object) -> list[object]:  # noqa: N807
        return [getattr(self, name) for name in names]

    def __setstate__(self: object, state: list[object]) -> None:  # noqa: N807
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {"__getstate__": __getstate__, "__setstate__": __setstate__}
