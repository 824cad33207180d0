"""
DProbes C: the language that most users write, compiled to the source of RPN programs (``docs/dpc.md``).

::

    text ─► preprocessor ─► tokens ─► parser ─► tree ─► typer, folder ─► typed tree ─► emitter ─► RPN source, templates

``syntax`` is what is written, ``types`` are those of C, ``typedtree`` is what is meant, ``modules`` is what debug
information and BTF tell a program, ``typers`` go from the tree to the typed tree, ``emitters`` from there to RPN. Each
room knows those before it; ``compiler`` has the order of the passes. No engine knows of the language: ``dprobes build
--emit rpn`` prints what is made, which a user could have written.

* Each line of RPN has the place in C that it was made for. So an error of any later stage is shown in C, and in its
  words (``c_source``).
* A value is a cell that holds it exactly: sign-extended or zero-extended to the word. What does not look at high bits
  is computed on whole cells, and cut where somebody looks.
* A number of 64 bits in a program of 32 takes two cells, the low word on top; ``emitters.cell_emitter`` has procedures
  in RPN for what is computed with them.
* A program is compiled for both word sizes. If both come out the same, it is for files of both, else the statement
  ``wordsize`` is in its header. So numbers smaller than a word are cut in 32-bit programs, too.
* Variables of blocks are cells below SBP; a function's parameters and the room for its result lie above.
* Blocks of the tool (``begin``, ``every``, ``end``) are not compiled: ``tool_interpreter`` executes their typed tree.
* A record has one template. So each sequence of ``printf`` that a hit may execute has a minor code of its own, and its
  template names each field by the expression.
"""
