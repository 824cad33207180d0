"""
RPN language of probe programs: conversion between text and ``Program``, static checks, and the byte encoding.

This package contains only the language. ``vm`` defines the effects of instructions; ``target`` defines modules and
symbols.

``instruction_set`` has one row for each instruction. The parser matches statements against its syntax, the checker
computes stack depths from its effect, the encoder takes widths from the operand kind, and ``docs/reference/rpn.md`` is
generated from it. A test fails if a row lacks a rule, a case, or a line of documentation. ``word_arithmetic`` defines
the results of operators on words of each size; interpreter, translation and lowering read it. ``;`` separates
statements (not in the original): a macro expands to one line, and so can contain several statements.

The following are omitted on purpose:

* IA-64 registers and a Java-like language: such processors are out of use, and users of probes know C.
* Rules for emulated FPUs: no kernel on which dprobes runs emulates one.
* ``suspend``, ``resume``, ``alloc gv`` and ``free gv``: reserved numbers that no version ever executed.
"""
