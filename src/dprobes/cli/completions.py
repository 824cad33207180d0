"""
Shell completion: one table from parameters to functions, used only when a shell requests completions.

The shells' scripts call the command with a variable (``cli.COMPLETE_VARIABLE``) in the environment. click finds the
parameter at the cursor. All errors are silent, because messages would disturb the line that the user is editing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import shell_completion
from click.shell_completion import CompletionItem

from dprobes.cli.option_values import all_examples
from dprobes.cli.record_options import LOG_ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.manager.client import ManagerClient
    from dprobes.rpn.rpn_program import Program
    from dprobes.sets.set_description import SetView

__all__ = ["known_modules", "known_symbols", "prepare", "register", "script"]

_MAX = 1000
"""Maximum number of completions that are returned to a shell."""

_PATIENCE = 2.0
"""Seconds to wait for a reply of the manager."""

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} word prefix= type value response
    word=${line##*[[:space:]]}
    # What stands before a ':' or '=' is a word of its own to bash, and is not to be repeated.
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && prefix=${word%%"${word##*:}"}
    [[ $COMP_WORDBREAKS == *=* && ${word#"$prefix"} == *=* ]] && prefix=${word%%"${word##*=}"}
    response=$(env COMP_WORDS="$line" COMP_CWORD=0 %(complete_var)s=bash_complete "$1" 2>/dev/null)
    COMPREPLY=()
    for response in $response; do
        IFS=, read -r type value <<< "$response"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("${value#"$prefix"}")
                [[ $value == *[/:,] ]] && compopt -o nospace ;;
        esac
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a plain open described response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1
    response=("${(@f)$(env COMP_WORDS="${words[1,CURRENT]}" COMP_CWORD=$((CURRENT-1)) \
%(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}")
    for type key descr in ${response}; do
        if [[ $type == dir ]]; then
            _path_files -/
        elif [[ $type == file ]]; then
            _path_files -f
        elif [[ $descr != _ ]]; then
            described+=("$key:$descr")
        elif [[ $key == *[/:,] ]]; then
            open+=("$key")
        elif [[ $type == plain ]]; then
            plain+=("$key")
        fi
    done
    (( $#described )) && _describe -V unsorted described -U
    (( $#open )) && compadd -U -S '' -V unsorted -a open
    (( $#plain )) && compadd -U -V unsorted -a plain
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    set -l response (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \
COMP_CWORD=(commandline -t) %(prog_name)s 2>/dev/null)
    for completion in $response
        # There may be more commas in the value.
        set -l found (string split -m 1 "," -- $completion)
        switch $found[1]
            case dir
                __fish_complete_directories $found[2]
            case file
                __fish_complete_path $found[2]
            case plain
                echo $found[2]
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


class _Silent(shell_completion.ShellComplete):
    """Completion that returns no candidates, and prints no message, if it fails."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        try:
            return super().get_completions(args, incomplete)[:_MAX]
        except Exception:  # noqa: BLE001 - see the module's docstring
            return []


class _Bash(_Silent, shell_completion.BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = shell_completion.split_arg_string(line)[1:]
        return (words, "") if not words or line[-1:].isspace() else (words[:-1], words[-1])


class _Zsh(_Silent, shell_completion.ZshComplete):
    source_template = _ZSH


class _Fish(_Silent, shell_completion.FishComplete):
    source_template = _FISH


_SHELLS = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def script(shell: str, command: click.Command, variable: str) -> str:
    """Return the script of a shell, which calls a command with ``variable`` in the environment."""
    return _SHELLS[shell](command, {}, "dprobes", variable).source()


def register() -> None:
    """Register with click the shells whose completion scripts this module generates."""
    for name, shell in _SHELLS.items():
        shell_completion.add_completion_class(shell, name)


def prepare(command: click.Command, verb: str) -> None:
    """Set the shell completion functions of a command's parameters; ``verb`` is the command's name."""
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for each in commands:
        words = verb if each is command else f"{verb} {each.name}"
        for parameter in each.params:
            function = _FUNCTIONS.get(f"{words} {parameter.name}") or _FUNCTIONS.get(parameter.name or "")
            if function is not None:
                _complete_with(parameter, function)


def _complete_with(parameter: click.Parameter, function: Callable[[click.Context, str], Iterable[str]]) -> None:
    def complete(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = (value for value in function(ctx, incomplete) if value.startswith(incomplete))
        # Names are untrusted: a line end in one would make two, and the shell prints them.
        return [CompletionItem(value) for value in found if value.isprintable()]

    parameter.shell_complete = complete  # type: ignore[method-assign]


def _files(*suffixes: str) -> Callable[[click.Context, str], Iterable[str]]:
    """Return a function that completes paths of files with one of these suffixes, and of directories."""

    def find(_ctx: click.Context, incomplete: str) -> Iterator[str]:
        head, slash, start = incomplete.rpartition("/")
        directory = Path(os.path.expanduser(head + slash or "."))  # noqa: PTH111 - '~' stays as it is in the answer
        for entry in sorted(directory.iterdir()):
            if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
                continue
            if entry.is_dir():
                yield f"{head}{slash}{entry.name}/"
            elif not suffixes or entry.suffix in suffixes:
                yield f"{head}{slash}{entry.name}"

    return find


def _or_examples(find: Callable[[click.Context, str], Iterable[str]]) -> Callable[[click.Context, str], Iterable[str]]:
    """Return a completion function that yields the names of example programs after the results of ``find``."""

    def complete(ctx: click.Context, incomplete: str) -> Iterator[str]:
        yield from find(ctx, incomplete)
        yield from _examples(ctx, incomplete)

    return complete


def _or_sets(find: Callable[[click.Context, str], Iterable[str]]) -> Callable[[click.Context, str], Iterable[str]]:
    """
    Return a completion function that yields the results of ``find`` and sets.

    It yields the groups of a set after ``:``, and its programs among the views after ``/``.
    """

    def complete(ctx: click.Context, incomplete: str) -> Iterator[str]:
        name, slash, _ = incomplete.rpartition("/")
        if slash and (views := [each.name for each in _views_of(name) if each.file]):
            yield from (f"{name}/{view}" for view in views)
            return
        name, colon, start = incomplete.partition(":")
        if colon:
            before = start.rpartition(",")[0]
            head = f"{name}:{before}," if before else f"{name}:"
            yield from (f"{head}{group}" for group in _groups_of(name) if group not in before.split(","))
        else:
            yield from find(ctx, incomplete)
            if "/" not in incomplete:
                yield from _sets(ctx, incomplete)

    return complete


def _or_queries(find: Callable[[click.Context, str], Iterable[str]]) -> Callable[[click.Context, str], Iterable[str]]:
    """Return a completion function that yields the results of ``find``, and the views in SQL of sets."""

    def complete(ctx: click.Context, incomplete: str) -> Iterator[str]:
        from dprobes.errors import DprobesError
        from dprobes.sets.set_library import listed_sets

        with contextlib.suppress(OSError):  # there need not be a directory with the name of a set
            yield from find(ctx, incomplete)
        name, slash, _ = incomplete.rpartition("/")
        if slash:
            yield from (f"{name}/{view.name}" for view in _views_of(name) if view.sql)
            return
        for each in listed_sets():
            if not isinstance(each.content, DprobesError):
                yield from (f"{each.name}/{view.name}" for view in each.content.views if view.sql)

    return complete


def _sets(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    from dprobes.sets.set_library import listed_sets

    return [each.name for each in listed_sets()]


def _sets_and_views(ctx: click.Context, incomplete: str) -> Iterable[str]:
    name, slash, _ = incomplete.rpartition("/")
    return [f"{name}/{view.name}" for view in _views_of(name)] if slash else _sets(ctx, incomplete)


def _groups_of(name: str) -> Iterable[str]:
    from dprobes.sets.set_library import choose_set, load_set

    chosen = choose_set(name)
    return () if chosen is None else load_set(chosen.path).groups


def _views_of(name: str) -> Sequence[SetView]:
    """Return the views of a set."""
    from dprobes.sets import view_in
    from dprobes.sets.set_library import choose_set, load_set

    chosen = choose_set(name)
    if chosen is None or view_in(chosen.path) is not None:
        return ()
    return load_set(chosen.path).views


def _examples(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    return (each.name for each in all_examples())


def _listed(find: Callable[[click.Context], Iterable[str]]) -> Callable[[click.Context, str], Iterable[str]]:
    """
    Return a completion function for a comma-separated list, which completes the text after the last comma.

    ``find`` returns all possible elements. Those already in the list are omitted.
    """

    def complete(ctx: click.Context, incomplete: str) -> Iterable[str]:
        before, comma, start = incomplete.rpartition(",")
        given = before.lower().split(",")
        found = [name for name in find(ctx) if name.lower() not in given]
        if start.islower():
            found = [name for name in found if name.startswith(start)] or [name.lower() for name in found]
        return [f"{before}{comma}{name}" for name in found]

    return complete


def _program(ctx: click.Context) -> Program:
    """Return the parsed program that the command line names, for the completion of names in it."""
    from dprobes.api.compiled_program import is_compiled
    from dprobes.cli.option_values import compile_options
    from dprobes.diagnostics import Diagnostics
    from dprobes.ppdf.ppdf_file import decode
    from dprobes.rpn.compilation_passes import parse_file

    # If an option at the end lacks its value, click leaves the arguments before it unparsed.
    path = Path(ctx.params.get("file") or ctx.args[0])
    if is_compiled(path):
        return decode(path.read_bytes()).program
    options = compile_options(ctx.params.get("defines") or (), ctx.params.get("includes") or (), None, allow_write=True)
    return parse_file(path, Diagnostics(), options)


def _manager() -> ManagerClient:
    from dprobes.manager.client import ManagerClient

    return ManagerClient(patience=_PATIENCE)


def _inserted(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    with _manager() as manager:
        return dict.fromkeys(program.name for program in manager.programs())


def _codes(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    with _manager() as manager:
        probes = [probe for program in manager.programs() for probe in program.probepoints]
    return dict.fromkeys(f"{probe.major},{probe.minor}" for probe in probes)


def _targets_there(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    with _manager() as manager:
        return dict.fromkeys(target.name for target in manager.targets())


def _targets(ctx: click.Context, incomplete: str) -> Iterable[str]:
    if "/" in incomplete or incomplete.startswith("."):
        return _files()(ctx, incomplete)
    from dprobes.sinks.target_kinds import ALIASES, kinds

    return [*ALIASES, *(kind.name if kind.syntax == kind.name else f"{kind.name}:" for kind in kinds())]


def _processes(_ctx: click.Context, incomplete: str) -> Iterator[str]:
    for name in sorted((name for name in os.listdir("/proc") if name.isdecimal()), key=int):  # noqa: PTH208 - names
        with contextlib.suppress(OSError):
            if name.startswith(incomplete) and os.geteuid() in (0, Path(f"/proc/{name}").stat().st_uid):
                yield name


def _users(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    import pwd

    return sorted(entry.pw_name for entry in pwd.getpwall())


def _cgroups(ctx: click.Context, incomplete: str) -> Iterable[str]:
    return (path for path in _files()(ctx, incomplete or "/sys/fs/cgroup/") if path.endswith("/"))


def _places(ctx: click.Context, incomplete: str) -> Iterator[str]:
    """Iterate over the names of modules, or after ``MODULE:`` over the symbols of that module."""
    module, colon, start = incomplete.rpartition(":")
    if colon:
        yield from (f"{module}:{name}" for name in known_symbols(module, ctx.params.get("pid"), start))
    elif "/" in incomplete or incomplete.startswith("."):
        yield from _files()(ctx, incomplete)
    else:
        yield from sorted({name for name in known_modules(ctx.params.get("pid")) if name.startswith(incomplete)})


def known_modules(pid: int | None) -> Iterator[str]:
    """
    Return the names of the modules that a process maps, and of libraries. There may be duplicates.

    Without ``pid``, return those of all processes.
    """
    from dprobes.target.module_lookup import read_ld_cache
    from dprobes.target.process_maps import code_mappings

    pids = [str(pid)] if pid is not None else [name for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    for name in pids:
        with contextlib.suppress(Exception):  # it has ended, or is another user's
            yield from (Path(each.path).name for each in code_mappings(int(name))[0] if "/" in each.path)
    if pid is None:
        yield from (library.name for library in read_ld_cache())


def known_symbols(module: str, pid: int | None, start: str) -> Iterable[str]:
    """Return the symbols of a module that begin with ``start``, in order; none if the module does not exist."""
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.elf.symbol_table import elf_symbols
    from dprobes.target.module_lookup import find_module

    path = find_module(module, pid=pid)
    if path is None:
        return ()
    names = {name.partition("@")[0] for table in elf_symbols(ElfFile.open(path)) for name in table.names()}
    return sorted(name for name in names if name.startswith(start))


_SOURCES = _files(".rpn", ".dpc")
_PROGRAMS = _files(".rpn", ".dpc", ".ppdf")

_FUNCTIONS: dict[str, Callable[[click.Context, str], Iterable[str]]] = {
    "file": _or_sets(_or_examples(_PROGRAMS)),
    "apply file": _files(".ppdf"),
    "build file": _or_sets(_or_examples(_SOURCES)),
    "convert file": _files(".bt"),
    "examples name": _examples,
    "sets words": _sets_and_views,
    "log files": _files(".dpt", ".dptz", ".1"),
    "sql words": _or_queries(_files(".dpt", ".dptz", ".1", ".parquet")),
    "symbols": _files(),
    "kernel_types": _files(),
    "modules": _files(),
    "groups": _listed(lambda ctx: _program(ctx).groups),
    "types": _listed(lambda ctx: _program(ctx).types),
    "log_items": _listed(lambda _ctx: [*LOG_ITEMS, "ALL"]),
    "name": _inserted,
    "probe": _codes,
    "pid": _processes,
    "user": _users,
    "cgroup": _cgroups,
    "place": _places,
    "list what": _places,
    "targets": _targets,
    "target": _targets,
    "log-target remove target": _targets_there,
}
"""The completion functions of parameters: of a single verb, or of all parameters with a name."""
