"""
Original's command lines (man page dprobes(8), versions 3.6 to 5; recovered reference, section 4).

A line is the original's if its first argument is an option other than ``--help`` and ``--version``. In such a line,
one-letter options have the old meaning, ``=`` may be between blanks, and a list consists of the words up to the next
option. One table translates it to a modern line. No other module handles the old syntax.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "ORIGINAL_OPTION",
    "VERBS",
    "Option",
    "OriginalLineError",
    "Takes",
    "Translation",
    "is_original",
    "translate",
]


class OriginalLineError(Exception):
    """A command line is invalid in the syntax of the original DProbes."""


class Takes(enum.Enum):
    """Kinds of arguments that an option of the original DProbes command takes."""

    NOTHING = "nothing"
    WORD = "one word"
    LIST = "words up to the next option"
    DEFINITION = "key = value"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the original; ``ours`` is its equivalent, empty for an option that has no effect today."""

    takes: Takes
    ours: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Translation:
    """The translated command line, and messages about the translation."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()


_NOTHING, _WORD, _LIST = Takes.NOTHING, Takes.WORD, Takes.LIST

_STOP_CPUS = Option(_NOTHING, "", "--stop-cpus has no effect: probepoints are inserted without stopping the processors")

_SYMBOLS = {
    ("-D",): Option(Takes.DEFINITION, "-D"),
    ("--sym", "-s"): Option(_WORD, "--sym"),
}

_CHOICE = {
    ("--group", "-u"): Option(_LIST, "--group"),
    ("--type", "-t"): Option(_LIST, "--type"),
    ("--merge", "-m"): Option(_NOTHING, "--merge"),
    ("--replace", "-c"): Option(_NOTHING, "--replace"),
    ("--dont-verify-opcodes",): Option(_NOTHING, "--dont-verify-opcodes"),
    ("--stop-cpus", "-stopcpus", "--stopcpus"): _STOP_CPUS,
    ("--log", "-l"): Option(_LIST, "--log"),
    ("--unformatted-output", "-f"): Option(_NOTHING, "--unformatted-output"),
    ("--log-target",): Option(_WORD, "--log-target"),
    ("--allow-write",): Option(_NOTHING, "--allow-write"),  # a modern option: the hint of a refused line proposes it
}

_NAME = {
    ("--name",): Option(_WORD, "--name"),
    ("--all", "-a"): Option(_NOTHING, "--all"),
}

VERBS: Mapping[tuple[str, ...], tuple[str, Takes, Mapping[tuple[str, ...], Option]]] = {
    ("--insert", "-i"): ("insert", _WORD, _SYMBOLS | _CHOICE),
    ("--remove", "-r"): ("remove", _NOTHING, _NAME),
    ("--getvars", "-g"): (
        "getvars",
        _NOTHING,
        _NAME
        | {
            ("--index", "-i"): Option(_WORD, "--index"),
            ("--local",): Option(_NOTHING, "--local"),
            ("--global",): Option(_NOTHING, "--global"),
            ("--reset",): Option(_NOTHING, "--reset"),
        },
    ),
    ("--query", "-q"): ("query", _NOTHING, _NAME | {("--extended", "-x"): Option(_NOTHING, "--extended")}),
    ("--build-ppdf", "-b"): ("build", _WORD, _SYMBOLS | {("--outfile", "-o"): Option(_WORD, "--output")}),
    ("--apply-ppdf", "-p"): ("apply", _WORD, _CHOICE),
    ("--help", "-h"): ("--help", _NOTHING, {}),
    ("--version", "-v"): ("--version", _NOTHING, {}),
}
"""The verbs of the original: the equivalent, the arguments, and the options that are valid with it."""

_LOGGING_VERBS = ("insert", "apply")

ORIGINAL_OPTION = "--original"
"""The internal option for log targets with records in the original's format; users do not write it."""

_OTHER_PROCESSORS = ("PSW", "UPSW")


def is_original(arguments: Sequence[str]) -> bool:
    """Return whether a command line is written for the original DProbes, and has to be translated (``translate``)."""
    return bool(arguments) and arguments[0].startswith("-") and arguments[0] not in ("-", "--help", "--version", "-h")


def translate(arguments: Sequence[str], *, klog_is_writable: bool) -> Translation:
    """
    Return the modern command line for one of the original; raise ``OriginalLineError`` for an invalid one.

    ``klog_is_writable`` is true if records can be written to the kernel's log, the original's default.
    """
    words = list(_words(arguments))
    verb_at, names = _find_verb(words)
    ours, follows, options = VERBS[names]
    words.pop(verb_at)
    result = [ours, *([ORIGINAL_OPTION] if ours in _LOGGING_VERBS else [])]
    if follows is Takes.WORD:
        if verb_at >= len(words) or words[verb_at].startswith("-"):
            raise OriginalLineError(f"{names[0]} needs the name of a file")
        result.append(words.pop(verb_at))
    notes: list[str] = []
    by_name = {name: option for all_names, option in options.items() for name in all_names}
    while words:
        name = words.pop(0)
        option = by_name.get(name)
        if option is None:
            raise OriginalLineError(_unknown(name, names[0], [name for name in by_name if name.startswith("--")]))
        result += _values(name, option, words)
        if option.remark:
            notes.append(option.remark)
    if ours in _LOGGING_VERBS and "--log-target" not in result:
        if klog_is_writable:
            result += ["--log-target", "KLOG"]
        else:
            notes.append(
                "the kernel's log cannot be written: records go to the manager's file ('dprobes log' shows it)"
            )
    return Translation(tuple(result), tuple(notes))


def _words(arguments: Sequence[str]) -> Iterator[str]:
    """Split words like the original's lexer: ``=`` is a separator after an option, as are blanks around it."""
    follows_option = is_key = False
    for argument in arguments:
        if argument.startswith("-D") and len(argument) > 2 and not argument.startswith("--"):
            yield "-D"
            argument, is_key = argument[2:], True  # noqa: PLW2901 - the rest is a word of its own
        if is_key:  # the '=' of a definition is part of it
            yield argument
            follows_option = is_key = False
            continue
        if argument.startswith("-") and argument != "-":
            name, equals, value = argument.partition("=")
            yield name
            is_key = name == "-D"
            follows_option = True
            if equals and value:
                yield value
            continue
        if follows_option and argument.startswith("="):
            argument = argument[1:]  # noqa: PLW2901 - as above
            if not argument:
                continue
        follows_option = False
        yield argument


def _find_verb(words: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    by_name = {name: names for names in VERBS for name in names}
    for at, word in enumerate(words):
        if word in by_name:
            return at, by_name[word]
    long_names = [name for name in by_name if name.startswith("--")]
    raise OriginalLineError(_unknown(words[0], "dprobes", long_names))


_OF_VERBS = {
    "-e": "dprobes run -e 'TEXT'",
    "-p": "dprobes run FILE -p PID",
    "--pid": "dprobes run FILE -p PID",
    "-c": 'dprobes run FILE -c "COMMAND"',
    "-l": "dprobes list MODULE:PATTERN",
}
"""Options of other tools, and of modern verbs, in the position of a verb."""


def _unknown(name: str, context: str, known: Sequence[str]) -> str:
    what = f"{context} has no option '{name}'" if name.startswith("-") else f"{context}: unexpected word '{name}'"
    hint = did_you_mean(name, known) if name.startswith("-") else None
    if context == "dprobes" and (ours := _OF_VERBS.get(name)) is not None:
        hint = f"the verb comes first: {ours}"
    return what + (f"; {hint}" if hint else "")


def _values(name: str, option: Option, words: list[str]) -> list[str]:
    """Remove the arguments of an option from ``words``, and return them in the modern form."""
    match option.takes:
        case Takes.NOTHING:
            return [option.ours] if option.ours else []
        case Takes.WORD:
            if not words or words[0].startswith("-"):
                raise OriginalLineError(f"{name} needs a value")
            return [option.ours, words.pop(0)]
        case Takes.DEFINITION:
            return [option.ours, _definition(name, words)]
        case Takes.LIST:
            values: list[str] = []
            while words and not words[0].startswith("-"):
                values += [value for value in words.pop(0).split(",") if value]
            if not values:
                raise OriginalLineError(f"{name} needs at least one name")
            for value in values:
                if name in ("--log", "-l") and value.upper() in _OTHER_PROCESSORS:
                    raise OriginalLineError(f"--log {value} is for S/390; here it is CSEIP or SSESP")
            return [option.ours, ",".join(values)]


def _definition(name: str, words: list[str]) -> str:
    if not words:
        raise OriginalLineError(f"{name} needs a key and a value: {name} key = value")
    key, equals, value = words.pop(0).partition("=")
    if not equals and words and words[0].startswith("="):
        equals, value = "=", words.pop(0)[1:]
    if equals and not value:
        if not words:
            raise OriginalLineError(f"{name} {key} = needs a value")
        value = words.pop(0)
    return f"{key}={value}" if equals else key
