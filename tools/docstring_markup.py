"""An extension of Griffe for the ``::`` before blocks of code in docstrings, which Markdown does not support."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringMarkup(griffe.Extension):
    """Converter of ``::``: a colon at the end of a line, removed on a line of its own."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.on_object(obj=pkg)
