"""
Scripts of bpftrace, converted to DProbes C (``dprobes convert``).

::

    text ─► directives ─► tokens ─► parser ─► tree ─► uses, writers ─► text in DProbes C, options of run, notes

What has no like there is an error with its place. Nothing here looks at the machine: a ``Machine`` is asked.
"""
