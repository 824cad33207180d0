"""
Dynamic Probes: safe handlers at any instruction of running processes and of the kernel, without source changes.

::

    import dprobes

    program = dprobes.ProgramBuilder("libc.so.6", major=1)
    program.probe("malloc", minor=1, maxhits=5).push_r("arg0").log(1).exit()

    with dprobes.launch(["ls", "/"]) as session:
        session.insert(program)
        for record in session.records():
            print(record.pid, record.place.symbol, record.words())

Write programs with ``ProgramBuilder``, or compile them with ``compile_file`` or ``compile_source``. Read compiled
programs with ``load_ppdf``. Insert them for the duration of a session with ``attach``, ``launch`` and ``everywhere``,
or until they are removed with ``ManagerClient``. Test handlers without a process with ``dprobes.testing``.
docs/how-to/python.md is the guide; the command ``dprobes`` does the same from a shell.
"""

from __future__ import annotations

from dprobes.version import __version__

TYPE_CHECKING = False  # true for type checkers; importing typing would take longer than all the rest
if TYPE_CHECKING:
    from dprobes.api.compiled_program import CompiledProgram, compile_file, compile_source, load_ppdf
    from dprobes.api.inserted_program import InsertedProgram, Probepoint, RecordList
    from dprobes.api.probe_session import ALL_ITEMS, ProbeSession, attach, everywhere, launch
    from dprobes.api.program_builder import CodeBuilder, HandlerBuilder, ProcedureBuilder, ProgramBuilder
    from dprobes.diagnostics import Diagnostic, Diagnostics, Severity
    from dprobes.engines.engine_interface import Counts, Scope
    from dprobes.errors import (
        DprobesError,
        EngineError,
        FormatError,
        InternalError,
        ManagerError,
        NotSupportedError,
        PrivilegeError,
        SinkError,
        SourceError,
        TargetError,
    )
    from dprobes.formatters.template_library import TemplateLibrary
    from dprobes.keyed.table_text import KeyedTable
    from dprobes.manager.client import ManagerClient
    from dprobes.manager.manager_messages import (
        Insertion,
        ManagedProbepoint,
        ManagedProgram,
        ManagedVariables,
        ManagerStatus,
        Stopped,
    )
    from dprobes.record.log_record import Item, LoggedItems, LogItem, LogRecord, decode_record, encode_record
    from dprobes.record.record_origin import Place
    from dprobes.resolve.probepoints import ProbeState
    from dprobes.rpn.rpn_program import Program
    from dprobes.sinks.sink_thread import TargetStatus

__all__ = [
    "ALL_ITEMS",
    "CodeBuilder",
    "CompiledProgram",
    "Counts",
    "Diagnostic",
    "Diagnostics",
    "DprobesError",
    "EngineError",
    "FormatError",
    "HandlerBuilder",
    "InsertedProgram",
    "Insertion",
    "InternalError",
    "Item",
    "KeyedTable",
    "LogItem",
    "LogRecord",
    "LoggedItems",
    "ManagedProbepoint",
    "ManagedProgram",
    "ManagedVariables",
    "ManagerClient",
    "ManagerError",
    "ManagerStatus",
    "NotSupportedError",
    "Place",
    "PrivilegeError",
    "ProbeSession",
    "ProbeState",
    "Probepoint",
    "ProcedureBuilder",
    "Program",
    "ProgramBuilder",
    "RecordList",
    "Scope",
    "Severity",
    "SinkError",
    "SourceError",
    "Stopped",
    "TargetError",
    "TargetStatus",
    "TemplateLibrary",
    "__version__",
    "attach",
    "compile_file",
    "compile_source",
    "decode_record",
    "encode_record",
    "everywhere",
    "launch",
    "load_ppdf",
]

_HOMES = {
    "api.compiled_program": (
        "CompiledProgram",
        "compile_file",
        "compile_source",
        "load_ppdf",
    ),
    "api.inserted_program": (
        "InsertedProgram",
        "Probepoint",
        "RecordList",
    ),
    "api.probe_session": (
        "ALL_ITEMS",
        "ProbeSession",
        "attach",
        "everywhere",
        "launch",
    ),
    "api.program_builder": (
        "CodeBuilder",
        "HandlerBuilder",
        "ProcedureBuilder",
        "ProgramBuilder",
    ),
    "diagnostics": (
        "Diagnostic",
        "Diagnostics",
        "Severity",
    ),
    "engines.engine_interface": (
        "Counts",
        "Scope",
    ),
    "errors": (
        "DprobesError",
        "EngineError",
        "FormatError",
        "InternalError",
        "ManagerError",
        "NotSupportedError",
        "PrivilegeError",
        "SinkError",
        "SourceError",
        "TargetError",
    ),
    "formatters.template_library": ("TemplateLibrary",),
    "keyed.table_text": ("KeyedTable",),
    "manager.client": ("ManagerClient",),
    "manager.manager_messages": (
        "Insertion",
        "ManagedProbepoint",
        "ManagedProgram",
        "ManagedVariables",
        "ManagerStatus",
        "Stopped",
    ),
    "record.log_record": (
        "Item",
        "LogItem",
        "LogRecord",
        "LoggedItems",
        "decode_record",
        "encode_record",
    ),
    "record.record_origin": ("Place",),
    "resolve.probepoints": ("ProbeState",),
    "rpn.rpn_program": ("Program",),
    "sinks.sink_thread": ("TargetStatus",),
}
"""
The modules that define the public names.

A module is imported at the first use of a name, so that the command starts fast.
"""


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            value: object = getattr(import_module(f"dprobes.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'dprobes' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
