"""
Templates: how the data of a record is to be read, and what it says (docs/templates.md).

Template files are text: ``parser.py`` and ``placeholders.py`` turn them into the values of ``model.py``, ``reading.py``
takes a record's data apart as a template says. Of that, ``rendering.py`` makes text for people, and ``fields.py``
names and numbers for files and databases. ``collection.py`` holds the templates of one directory.
"""

from __future__ import annotations

from dprobes.formatters.templates.collection import Templates
from dprobes.formatters.templates.directory import DIRECTORY_FILE
from dprobes.formatters.templates.model import Template

__all__ = ["DIRECTORY_FILE", "Template", "Templates"]
