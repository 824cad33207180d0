"""Compilation of a DProbes C source to RPN programs, one for each module, and their templates."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.emitters.program_emitter import Compilation
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.name_scope import TypeListener
    from dprobes.rpn.compilation_passes import CompileOptions
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import SourceFile

__all__ = ["CompiledSource", "compile_source", "dump_lines", "in_c"]

_ENDINGS = {"1": "debugger()", "2": "crash()", "3": "core()"}
_NAMES = {"procid": "cpu", "time": "nsecs"}
"""DProbes C names of system variables, by their RPN names, where the two differ."""
_VARIABLES = {"vars": "static", "gvars": "global", "cvars": "percpu", "tvars": "thread"}

_OF_SIZE = {1: "char", 2: "short", 4: "int", 8: "long"}
"""C types by the size in bytes of the watched object."""


def _watched(match: re.Match[str]) -> str:
    """Return the C type and symbol of a matched RPN address range, in hexadecimal, of a watchpoint."""
    name, first, last = match[1], match[2] or "", match[3] or match[2] or ""
    size = int(last or "0", 16) - int(first or "0", 16) + 1
    return f"'({_OF_SIZE.get(size, 'char')}){name}{first and '+'}{first}' as what is watched"


_WORDS = (
    # instructions, which messages quote
    (r"'pop [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be changed"""),
    (r"'push [ru]' is not allowed for register '(\w+)' of \w+", r"""'reg("\1")' cannot be read"""),
    (r"^allowed: ('[^']+'(?:, '[^']+')*)$", r"RPN has \1 for it"),
    (r"'push (?:[ru]|entry), (arg[0-5]|retval|pc|sp)'", r"'\1'"),
    (r"'push (?:[ru]|entry), (\w+)'", r"""'reg("\1")'"""),
    (r"'pop r, (\w+)'", r"""'reg("\1") = …'"""),
    (r"'push tp, FIELD', or 'reg\(\"\w+\"\)' for that of the program", "the name of a field"),
    (r"'push tp, FIELD', or '\w+' for that of the program", "the name of a field"),
    (r"'push tp, FIELD': a system call has its arguments at its end as well",
     "the name of a field: a system call has its arguments at its end as well"),
    (r"'push tp, (\w+)'", r"'\1'"),
    (r"'push usdt, (\d+)'", lambda match: f"'arg{int(match[1]) - 1}'"),
    (r"'push (pid|tid|uid|procid|time|elapsed)'", lambda match: f"'{_NAMES.get(match[1], match[1])}'"),
    (r"'push mem, [us]\d+'", "'*p'"),
    (r"'pop mem, [us]\d+'", "'*p = …'"),
    (r"'log ([ku])stack(?:, (\d+))?'", lambda match: f"'{match[1]}stack({match[2] or ''})'"),
    (r"'log str'", "'str(p)'"),
    (r"'log mrf'", "'mem(p, n)'"),
    (r"'match str[^']*'", "a comparison of strings"),
    (r"'exit ([123])'(?: \([^)]*\))?", lambda match: f"'{_ENDINGS[match[1]]}'"),
    (r"; here it acts as 'exit'", "; here it only ends the hit"),
    (r"'tally' cannot look at table", "there is no looking at table"),
    # table keys
    (r"\bthe key 'kstack' of table", "the key 'kstack()' of table"),
    (r"'ustack\[(\d+)\]'", r"'ustack(\1)'"),
    (r"\btable '_'", "table '@'"),
    (r"\btable '(\w+)'", r"table '@\1'"),
    (r"; give it a smaller 'room ='", ""),
    # header statements
    (r"the program has no '(group|type)def ='", r"no probe has a '\1'"),
    (r"write name = (\"[^\"]*/[^\"]*\")", r"write \1: before the place"),
    (r"name = (\"[^\"]+\")", r"'kmod \1:' before the place"),
    (r"'address = ([^']+)' and 'watchpoint = w' \(or rw\)", r"'watch w \1' (or rw)"),
    (r"'address = ([A-Za-z_]\w*)(?: \+ (0x\w+))?(?: : \1(?: \+ (0x\w+))?)?'", _watched),
    (r"'address = ([^']+)'", r"'\1' after 'watch'"),
    (r"'opcode ='", "'opcode'"),
    (r"'opcode = (\w+)'", r"'[opcode \1]' before the place"),
    (r"'(minor|maxhits|passcount|major|jmpmax|logmax) = (\w+)'", r"'\1 \2'"),
    (r"'offset = usdt:PROVIDER:NAME'", "'usdt MODULE:PROVIDER:NAME'"),
    (r"'offset = usdt:([^']+)'", r"'usdt MODULE:\1'"),
    (r"'offset = SUBSYSTEM:NAME' or 'offset = syscall:NAME'", "'tracepoint SUBSYSTEM:NAME' or 'syscall NAME'"),
    (r"'offset = ([^']+)'", r"'\1'"),
    (r"\boffset = (\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+)", r"\1"),
    (r"'offset ='", "a place"),
    (r"'return = yes'", "'return'"),
    (r"'sampler ='", "'sample'"),
    (r"'watchpoint = (\w+)'", r"'watch \1'"),
    (r"'modtype = kernel' and 'name = vmlinux' in the file header", "'kernel:' before the place"),
    (r"'modtype = tracepoint' and 'name = vmlinux' in the file header", "'tracepoint' before the place"),
    (r"'modtype = tracepoint'( in the file header)?", "'tracepoint'"),
    (r"'name = vmlinux' and 'modtype = kernel'", "'kernel:' before the place"),
    (r"'name = (\w+)' and 'modtype = kmod'", r"'kmod \1:' before the place"),
    (r"'name = vmlinux', or 'modtype = kmod' for a module of the kernel",
     "'kernel:', or 'kmod NAME:' for a module of the kernel"),
    (r"'modtype = kernel'", "'kernel:'"),
    (r"'modtype = kmod'", "'kmod'"),
    (r"a program of the type 'user' is hit outside of the kernel", "a probe in a program is hit outside of the kernel"),
    (r"a program about the kernel", "a probe in the kernel"),
    (r"'(g|c|t|)vars = (\d+)'", lambda match: f"at most {match[2]} {_VARIABLES[match[1] + 'vars']} variables"),
    # exceptions
    (r"catch it with 'sx', or see where it is raised with 'autostacktrace = yes'", "catch it with 'try'"),
)  # fmt: skip


def in_c(message: str) -> str:
    """Return a message with the terms of RPN replaced by those of C."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


class CompiledSource(NamedTuple):
    """
    The programs of the modules, in the order in which the source names the modules, and the RPN source of each.

    The programs share their variables and tables. ``templates`` is the text of their template file, empty without
    output. ``tool`` is the program that the tool executes, None if the source has no ``begin``, ``every`` or ``end``.
    """

    programs: tuple[Program, ...]
    sources: tuple[str, ...]
    templates: str
    tool: ToolProgram | None = None

    @property
    def rpn(self) -> str:
        """The RPN sources as one text, with a line before each if there are several."""
        if len(self.sources) == 1:
            return self.sources[0]
        count = len(self.sources)
        return "\n".join(f"// program {number} of {count}\n{text}" for number, text in enumerate(self.sources, 1))


def compile_source(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    *,
    module: str = "",
    files: ModuleFiles | None = None,
    tell_type: TypeListener | None = None,
) -> CompiledSource:
    """
    Compile a source to RPN programs, one for each module.

    ``module`` is the module of probepoints that name none, ``files`` finds the files of modules. ``tell_type`` receives
    the types of expressions and parameters, also for a source with errors. Raise ``SourceError`` for errors. If only
    handlers have errors, the exception has an outline: the programs with empty handlers.
    """
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.compiler import compile_text
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.errors import SourceError
    from dprobes.preprocessor import preprocess
    from dprobes.rpn.rpn_parser import parse

    if source.wording is None:
        source = replace(source, wording=in_c)
    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    files = files or ModuleFiles()
    try:
        found, tool = compile_text(
            text,
            diagnostics,
            module=module,
            word_size_of=files.word_size_of,
            module_of=files.module_of,
            places=files.places,
            tell_modules=files.tell_modules,
            allow_write=options.allow_write,
            tell_type=tell_type,
        )
    except SourceError as error:
        outline = [parse(compilation.preprocessed(), Diagnostics()) for compilation in error.outline]
        raise SourceError(error.diagnostics, [each for each in outline if each is not None]) from None
    if not found:
        hint = "'begin', 'every' and 'end' go with probes" if tool is not None else None
        diagnostics.error(text.span(0, 0), "there is no probe", hint=hint)
    programs = [parse(compilation.preprocessed(), diagnostics) for compilation in found]
    diagnostics.raise_if_errors()
    return CompiledSource(
        tuple(program for program in programs if program is not None),
        tuple(compilation.source for compilation in found),
        _templates_of(found),
        tool,
    )


def dump_lines(
    source: SourceFile,
    diagnostics: Diagnostics,
    options: CompileOptions,
    name: str,
    files: ModuleFiles | None = None,
) -> list[str]:
    """
    Return the result of the pass ``name`` for a source, as lines (``compiler.PASSES``).

    ``files`` finds the files of modules. Raise ``SourceError`` if the pass has no result because of errors.
    """
    from dprobes.dpc.compiler import Passes, compile_text, token_lines, tree_lines
    from dprobes.dpc.modules.probed_modules import ModuleFiles
    from dprobes.errors import SourceError
    from dprobes.preprocessor import preprocess

    text = preprocess(
        source, diagnostics, defines=options.defines, include_dirs=options.include_dirs, external=options.cpp
    )
    diagnostics.raise_if_errors()
    if name == "source":
        return text.text.splitlines()
    if name == "tokens":
        lines = list(token_lines(text, diagnostics))
        diagnostics.raise_if_errors()
        return lines
    passes = Passes()
    files = files or ModuleFiles()
    try:
        found, _ = compile_text(
            text,
            diagnostics,
            word_size_of=files.word_size_of,
            module_of=files.module_of,
            places=files.places,
            tell_modules=files.tell_modules,
            allow_write=options.allow_write,
            note=passes.note,
        )
    except SourceError:
        if name not in passes.found or name == "typed":
            raise
        return list(tree_lines(passes.found[name]))
    if name == "rpn":
        return CompiledSource((), tuple(each.source for each in found), "").rpn.splitlines()
    return list(tree_lines(passes.found[name]))


def _templates_of(found: list[Compilation]) -> str:
    from dprobes.dpc.emitters.program_emitter import template_file

    templates = {minor: text for compilation in found for minor, text in compilation.templates.items()}
    return template_file(found[0].major, templates) if templates else ""
