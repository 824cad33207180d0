"""The verb ``run``: insert a program for as long as a command or process lives, or until Ctrl-C."""

from __future__ import annotations

from typing import Any

import click

from dprobes.cli.option_values import word_of_program
from dprobes.cli.record_options import LOG_ITEMS, log_format_option, templates_option
from dprobes.cli.runs.run_execution import RunOptions, run_line
from dprobes.cli.scope_and_engine import engine_option, scope_options, stop_cpus_option, verbose_option
from dprobes.cli.shared_options import (
    PROGRAM,
    PROGRAM_FILE,
    filter_option,
    kernel_types_option,
    overhead_option,
    program_options,
    selection_options,
    stacks_options,
    sum_options,
    symbols_option,
    table_options,
    text_option,
    verification_options,
)
from dprobes.engines.ebpf.ebpf_options import RING_SIZE
from dprobes.formatters import FORMATS

__all__ = ["run_command"]


@click.command("run")
@click.argument("file", type=PROGRAM, required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@text_option("Run")
@scope_options
@program_options
@symbols_option
@kernel_types_option
@templates_option("Print records by the templates in this directory.")
@filter_option
@selection_options
@verification_options
@engine_option("The engine; with auto, dprobes chooses it.", with_arguments=True)
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--log",
    "log_items",
    multiple=True,
    metavar="ITEMS",
    help=f"Log these header items with each record, separated by commas: {', '.join(LOG_ITEMS)}, or ALL. The default "
    "for text is PROCNAME,PID,TSC. Without -p and -c, PROCNAME,PID are added.",
)
@click.option(
    "-o",
    "--output",
    type=PROGRAM_FILE,
    metavar="FILE",
    help="Write records to this file instead of to standard output. A file whose name ends in .dpt is a trace file, "
    "in .dptz a compressed one; records are appended to it.",
)
@click.option(
    "--log-target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="Send records to this log target instead of to standard output; 'dprobes log-target kinds' lists the kinds.",
)
@log_format_option(None)
@click.option("--top", is_flag=True, help="Show a live table of the probepoints instead of records.")
@click.option(
    "--count",
    "counted",
    multiple=True,
    metavar="FIELD[,FIELD...]",
    help="At the end, print how often each value occurred, instead of records.",
)
@click.option(
    "--hist",
    "measured",
    multiple=True,
    metavar="FIELD",
    help="At the end, print a histogram of the field, instead of records.",
)
@sum_options("At the end, print", ", instead of records")
@stacks_options
@table_options
@click.option(
    "--debugger",
    "debugger",
    metavar="COMMAND",
    help="Command that 'exit 1' starts, without a shell; %p is the process id. Default: gdb -p %p at a terminal.",
)
@click.option(
    "--core-dir",
    "core_directory",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    metavar="DIR",
    help="Directory in which 'exit 3' writes core.dprobes.PID.",
)
@click.option(
    "--pid-namespace", is_flag=True, help="Log pid and tid as seen in the process's own PID namespace (ebpf)."
)
@click.option(
    "--exact", is_flag=True, help="Probe exactly the named instruction, even if a neighbour is cheaper (ebpf)."
)
@click.option(
    "--ring-size",
    type=click.IntRange(min=1, max=1024),
    default=RING_SIZE >> 20,
    show_default=True,
    metavar="MIB",
    help="Size of the buffer for records not yet read, in MiB (ebpf).",
)
@overhead_option
@stop_cpus_option
@click.option("--allow-self", is_flag=True, help="Allow -p for a process of another dprobes.")
@verbose_option
@click.option(
    "--explain",
    is_flag=True,
    help="Print all columns of the summary, the engine's own terms in the last one, and a legend.",
)
@click.option("--exit-status", is_flag=True, help="Return the exit status of the command.")
def run_command(**values: Any) -> int:
    """
    Run the probe program FILE on a command or a process and its child processes, or on all processes.

    FILE is the source of a program, - for a source on standard input, a compiled program (dprobes build), the name of
    an instrumentation set, with groups as in SET:GROUP or a view as in SET/VIEW (dprobes sets), or the name of an
    example, which is run with its template (dprobes examples). Records go to standard output; everything else,
    with a summary at the end, goes to standard error. With --format json and csv only records go to standard output,
    and the output of the command goes to standard error. Ctrl-C removes the probepoints; processes that were running
    before continue.
    """  # fmt: skip
    if values["text"] is not None and values["file"] is not None:
        values |= {"file": None, "arguments": (word_of_program(), *values["arguments"])}
    return run_line(RunOptions(**values))
