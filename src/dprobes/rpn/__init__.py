"""
The RPN probe language: text to ``Program`` and back, static checks, and the byte encoding.

Only the language lives here. What instructions do is in ``vm``; what modules and symbols are is in ``target``.

``instruction_set`` has one row for each instruction. The parser matches statements against its syntax, the checker
computes stack depths from its effect, the encoder takes widths from the operand kind, ``docs/language.md`` is
generated from it. A test fails if a row lacks a rule, a case, or a line of documentation. ``word_arithmetic`` defines
what operators do to words of each size; interpreter, translation and lowering read it. ``;`` separates statements
(ours): a macro expands to one line, and so can contain several.

Left out on purpose: IA-64 registers and a Java-like language (the processor is gone, and C is what people who probe
know), rules for emulated FPUs (no kernel that this runs on emulates one), and ``suspend``, ``resume``, ``alloc gv``
and ``free gv``, reserved numbers that no version ever executed.
"""
