"""
DProbes C: the language that most users write, compiled to the source of RPN programs (``docs/reference/dpc.md``).

::

    text ─► preprocessor ─► tokens ─► parser ─► tree ─► typer, folder ─► typed tree ─► emitter ─► RPN source, templates

``syntax`` has the tree of the source, ``types`` the types of C, ``typedtree`` the typed tree. ``modules`` provides
programs with debug information and BTF. ``typers`` convert the tree to the typed tree, ``emitters`` convert that to
RPN. Each package depends only on those before it. ``compiler`` has the order of the passes. Engines do not know the
language: ``dprobes build --emit rpn`` prints the result, which a user could have written.

* Each line of RPN has the span of C source from which it was compiled. So errors of later stages are reported for the C
  source, with the terms of C (``compiler``).
* A cell contains a value exactly: sign-extended or zero-extended to the word. Operations that do not depend on high
  bits use whole cells, which are truncated before the high bits are read.
* A 64-bit number in a 32-bit program takes two cells, the low word on top. ``emitters.cell_emitter`` has RPN procedures
  for operations on such numbers.
* A program is compiled for both word sizes. If both results are equal, the program suits files of both sizes. Otherwise
  its header has the statement ``wordsize``. To make equal results likely, numbers smaller than a word are truncated in
  32-bit programs, too.
* Variables of blocks are cells below SBP. A function's parameters and the room for its result are above SBP.
* Blocks of the tool (``begin``, ``every``, ``end``) are not compiled: ``tool_interpreter`` executes their typed tree.
* A record has one template. So each sequence of ``printf`` that a hit may execute has its own minor code. The template
  names each field after the printed expression.
"""
