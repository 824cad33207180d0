"""The page dprobes(8): the commands of click, and the sections that no table contains."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import click
from roff import Page, bold, escaped, italic

from dprobes.cli.command_group import VERBS, command_of
from dprobes.cli.original_lines import VERBS as ORIGINAL_VERBS
from dprobes.cli.original_lines import Takes
from dprobes.cli.scope_and_engine import EngineName
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

DATE = "2026-11-20"

DESCRIPTION = """
DProbes (Dynamic Probes) is a dynamic tracer. It places a *probepoint* at any instruction of a running program or
library, without its source and without a restart. When a thread reaches the instruction, the *probe handler* runs: a
small verified program that reads registers and memory, keeps variables, and logs. **dprobes.lang**(8) describes the
language RPN.

`dprobes run` inserts a probe program for the duration of the run. `dprobes insert` inserts a program in the background,
through the *probe manager*, a process of the same user that `dprobes insert` or systemd starts. The manager keeps
programs inserted, counts hits, and writes records to its trace file and to log targets, until the programs are removed
(`dprobes remove`, `dprobes stop`) or the manager ends. When the manager ends or is killed, its probepoints are removed
from all processes.
"""

ORIGINAL = """
If the first argument of a command line is an option other than `--help` and `--version`, the line is interpreted as a
command line of the original `dprobes` of 2000 to 2004. In such a line, one-letter options have the meaning below, not
that of the verbs above. An option and its value may be separated by `=`, with or without blanks. A list extends to
the next option. The verb may be at any position.

Without `--log-target`, records are sent to KLOG if the kernel's log can be written. If it cannot, they are written to
the manager's trace file, and a note reports this.
"""

EXAMPLES = (
    (
        "Print how much memory a command asks for:",
        (
            "dprobes run - -c \"ls /\" <<'END'\n"
            'name = "libc.so.6"\n'
            "offset = malloc\n"
            "maxhits = 5       // then the probepoint is removed\n"
            "    push r, arg0  // malloc's first argument: the number of bytes\n"
            "    log 1\n"
            "END"
        ),
    ),
    (
        "Insert a program, and look at its records later:",
        "dprobes insert shells.rpn\ndprobes query\ndprobes log\ndprobes remove --all",
    ),
    (
        "Compile a program on a machine with symbols, and insert a part of it on a machine without:",
        (
            "dprobes build example.rpn --for libexample.so.1 -o example.ppdf\n"
            "dprobes apply example.ppdf --group process,memory --type leave"
        ),
    ),
    ("The same in the words of the original:", "dprobes --apply-ppdf example.ppdf --group process memory --type leave"),
)

EXIT_STATUS = (
    ("0", "Success."),
    ("1", "A failure; standard error describes it, and what to do about it."),
    ("2", "The command line or the probe program has an error."),
    ("130", "The command was interrupted before it did anything."),
)

ENVIRONMENT = (
    (
        "DPROBES_RUNTIME_DIR",
        (
            "The directory of the manager's socket and lock. It is made with mode 0700 and must belong to the user. "
            "Default: `/run/dprobes` for root, else `$XDG_RUNTIME_DIR/dprobes`, else `/tmp/dprobes-UID`, "
            "or `run` in the state directory if another user has created `/tmp/dprobes-UID`."
        ),
    ),
    (
        "DPROBES_STATE_DIR",
        (
            "The directory of the manager's trace file. Default: `/var/lib/dprobes` for root, else "
            "`$XDG_STATE_HOME/dprobes`, else `~/.local/state/dprobes`."
        ),
    ),
    (
        "XDG_CACHE_HOME",
        (
            "The directory of `dprobes/`, which caches data about the running kernel until the next boot, and about "
            "the kernels of machines. It is used only if no user other than the owner and root can change it, and the "
            "directories and links that lead to it. So root's run in the home of another user (`sudo -E`) caches "
            "nothing. Files in it may be removed at any time. Default: `~/.cache`."
        ),
    ),
)

FILES = (
    ("manager.sock", "in the run-time directory: the manager's socket, mode 0600. Only the user and root may connect."),
    ("manager.lock", "in the run-time directory: locked as long as the manager runs; contains its process id."),
    ("manager.log", "in the run-time directory: the standard error of a manager that a client started."),
    (
        "trace.dpt",
        (
            "in the state directory: the records of all inserted programs, for `dprobes log`. At 128 MiB it is renamed "
            "to `trace.dpt.1`, and a new file is begun."
        ),
    ),
    (
        "dprobes.socket, dprobes.service",
        (
            "systemd units, for the system and for users: `systemctl enable --now dprobes.socket`, or "
            "`systemctl --user enable --now dprobes.socket`."
        ),
    ),
    (
        "share/dprobes/examples",
        (
            "below the installation prefix: example probe programs, called `examples/` in the documentation. "
            "`dprobes examples` prints the path."
        ),
    ),
    (
        "~/.config/dprobes/sets, /etc/dprobes/sets",
        (
            "instrumentation sets of the user, in `$XDG_CONFIG_HOME/dprobes/sets` if that is set, and of the machine. "
            "Root reads only those that no other user can change."
        ),
    ),
    ("core.dprobes.PID", "the core file that `exit 3` writes to the directory of `--core-dir`."),
)


def page() -> str:
    result = Page("DPROBES", 8, DATE, f"dprobes {__version__}", "System administration")
    result.section("Name")
    result.raw(escaped("dprobes - put safe handlers on instructions of running programs"))
    result.section("Synopsis")
    result.synopsis(usage(words, command) for words, command in commands())
    result.section("Description")
    paragraphs(result, DESCRIPTION)
    result.section("Verbs")
    for words, command in commands():
        describe(result, words, command)
    result.section("The original's command line")
    original(result)
    for name, rows in (("Exit status", EXIT_STATUS), ("Environment", ENVIRONMENT), ("Files", FILES)):
        result.section(name)
        if name == "Exit status":
            result.paragraph("`dprobes run --exit-status` returns the status of the command. All others return:")
        for term, text in rows:
            result.item(bold(term), text)
    result.section("Examples")
    for text, lines in EXAMPLES:
        result.paragraph(text)
        result.example(lines)
    result.section("See also")
    result.raw(", ".join(f"{bold(name)}({number})" for name, number in SEE_ALSO))
    return result.text()


SEE_ALSO = (("dprobes.lang", 8), ("gdb", 1), ("systemd.socket", 5), ("ptrace", 2), ("bpf", 2), ("perf_event_open", 2))


def commands() -> Iterator[tuple[str, click.Command]]:
    """Iterate over all commands with the words that call them, those of a group separately."""
    for verb in VERBS:
        command = command_of(verb)
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield f"{verb} {name}", inner
        else:
            yield verb, command


def usage(words: str, command: click.Command) -> str:
    parts = [bold(f"dprobes {words}")]
    if any(isinstance(parameter, click.Option) for parameter in command.params):
        parts.append("[" + italic("option") + " ...]")
    for argument in command.params:
        if isinstance(argument, click.Argument):
            name = argument.metavar or (argument.name or "").upper()
            parts.append(italic(name if argument.required or name.startswith("[") else f"[{name}]"))
    return " ".join(parts)


def paragraphs(result: Page, text: str) -> None:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        result.paragraph(paragraph)


def describe(result: Page, words: str, command: click.Command) -> None:
    result.subsection(f"dprobes {words}")
    result.synopsis([usage(words, command)])
    for paragraph in (command.help or "").split("\n\n"):
        result.paragraph(paragraph)
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            result.item(tag(option), said(option))


def tag(option: click.Option) -> str:
    """Return the names of an option, followed by its value."""
    names = ", ".join(bold(name) for name in sorted(option.opts, key=len))
    if option.secondary_opts:
        names += ", " + ", ".join(bold(name) for name in option.secondary_opts)
    if option.is_flag:
        return names
    if isinstance(option.type, click.Choice | EngineName):
        return names + " " + "|".join(bold(str(choice)) for choice in option.type.choices)
    return names + " " + italic(option.metavar or (option.name or "").upper())


def said(option: click.Option) -> str:
    text = option.help or DEFAULT_HELP[option.name or ""]
    if option.multiple and "several times" not in text:
        text += " May be given several times."
    if isinstance(option.type, click.IntRange) and option.type.max is not None:
        text += f" From {option.type.min} to {option.type.max}."
    if option.show_default:
        default = option.default
        if option.is_flag:
            default = option.opts[0] if default else option.secondary_opts[0]
        text += f" Default: `{default}`."
    return text


DEFAULT_HELP = {"format_name": "The format in which records are printed."}
"""Descriptions of options that have no help on the command line."""


FOLLOWS = {Takes.NOTHING: "", Takes.WORD: " WORD", Takes.LIST: " LIST", Takes.DEFINITION: " KEY = VALUE"}


def original(result: Page) -> None:
    paragraphs(result, ORIGINAL)
    result.table(
        "lx l",
        ("verb", "here"),
        (
            (", ".join(names) + (" FILE" if follows is Takes.WORD else ""), "dprobes " + ours)
            for names, (ours, follows, _) in ORIGINAL_VERBS.items()
        ),
    )
    known: dict[tuple[str, ...], tuple[Takes, str, list[str]]] = {}
    for ours, _, options in ORIGINAL_VERBS.values():
        for names, option in options.items():
            known.setdefault(names, (option.takes, option.ours or "no effect", []))[2].append(ours)
    result.paragraph("Options, and the verbs that accept them:")
    result.table(
        "lw(26n) lw(22n) lx",
        ("option", "here", "with"),
        ((", ".join(names) + FOLLOWS[takes], ours, ", ".join(verbs)) for names, (takes, ours, verbs) in known.items()),
    )
