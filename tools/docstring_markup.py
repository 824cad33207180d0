"""An extension of Griffe: docstrings of DProbes mark blocks of code by ``::``, which Markdown does not know."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DocstringMarkup(griffe.Extension):
    """Turn ``::`` at the end of a line into a colon, or remove it where it stands alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self.on_object(obj=pkg)
