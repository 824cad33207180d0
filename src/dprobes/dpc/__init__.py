"""
DProbes C: the language that most users write, compiled to the source of RPN programs (``docs/dpc.md``).

::

    text ─► preprocessor ─► tokens ─► parser ─► tree ─► typer, folder ─► typed tree ─► emitter ─► RPN source, templates

Nothing behind it needs to know that it exists: what it makes is what a user could have written.
"""
