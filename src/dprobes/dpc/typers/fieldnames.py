"""
The names of what ``printf`` prints, by which records' fields are known: those of the expressions.

Of a chain it is the last member, ``req->head.total`` is ``total``; what is only converted, dereferenced or indexed
keeps the name of what it is of. What is computed has the name ``value``. That two fields of a record have two names is
seen to by who reads the template.
"""

from __future__ import annotations

import re

from dprobes.dpc.syntax import tree
from dprobes.dpc.syntax.token import scoped_parts

__all__ = ["NAME_MAX", "field_name"]

NAME_MAX = 60
"""Characters of a name, so that there is room for a number behind it."""

_UNNAMED = "value"

_OF_THEIR_ARGUMENT = ("str", "mem", "sym")
"""Calls whose values have the name of what they are called with."""


def field_name(expression: tree.Expression) -> str:
    """Return the name of what an expression stands for, a C identifier."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", _name(expression))  # compilers name members ``_vptr.B`` and ``$t0``
    return (f"_{name}" if name[:1].isdigit() else name)[:NAME_MAX] or _UNNAMED


def _name(expression: tree.Expression) -> str:
    match expression:
        case tree.Name(name):
            return scoped_parts(name)[-1]
        case tree.MemberAccess(_, name) | tree.TableAccess(name):
            return name
        case tree.Index(operand) | tree.Cast(_, operand) | tree.Increment(_, operand):
            return _name(operand)
        case tree.Unary("*" | "&", operand):
            return _name(operand)
        case tree.Assignment(_, target):
            return _name(target)
        case tree.Comma(_, last):
            return _name(last)
        case tree.Call("reg", (tree.StringLiteral(register), *_)):
            return register.lower() if register.isidentifier() and register.isascii() else ""
        case tree.Call(function, (argument, *_)) if function in _OF_THEIR_ARGUMENT:
            return _name(argument)
        case tree.Call(function):
            return function
    return ""
