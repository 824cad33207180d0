"""
Templates: how the data of a record is to be read, and what it says (docs/templates.md).

Template files are text: ``parser.py`` and ``placeholders.py`` turn them into the values of ``model.py``, ``reading.py``
takes a record's data apart as a template says. Of that, ``rendering.py`` makes text for people, and ``fields.py``
names and numbers for files and databases. ``collection.py`` holds the templates of one directory.
"""
