"""
Conversion of bpftrace scripts to DProbes C (``dprobes convert``).

::

    text ─► directives ─► tokens ─► parser ─► tree ─► uses, writers ─► text in DProbes C, options of run, notes

A construct without an equivalent is an error at its place. The package does not access the machine itself: a
``Machine`` provides the facts about it.
"""
