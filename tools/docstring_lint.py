"""
Find docstrings that begin with an unsuitable word, and references in prose to names that do not exist.

A class's docstring begins with a noun, a function's with an imperative; none begins with a word of ``BEGINNINGS``,
because these words hide the term that a reader searches for.

A reference is a name in double backquotes, such as ``probe_manager``, ``Manager.stop`` or ``rpn.instruction_set``. Each
of its words must be a name of the code, a module, a word of a string, or a word of the documentation of users.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PLACES = ("src", "tools", "benchmarks")

REFERENCE = re.compile(r"``([A-Za-z_][\w.]*?)(?:\(\))?``")
WORD = re.compile(r"[A-Za-z_]\w*")

BEGINNINGS = re.compile(
    r'[rb]*"+\s*'
    r"(Behind|Hold|How|Know|Nobody|Say|Tell|What|Where|Whether|Which|Who|Whoever|Why)\b"
)

ELSEWHERE = frozenset(
    """
    1 BPF_ENABLE_STATS BPF_PROG_TEST_RUN DESCRIPTOR DT_GNU_HASH DT_HASH DT_NEEDED DT_RPATH DT_RUNPATH DT_SONAME
    FIELD_name FIELD_names _RNvNtCs1234_4core3fmt5write _ZN4core3fmt5write17h0123456789abcdefE __USER32_CS
    access_remote_vm add_new_kprobe alternatives_smp_unlock apply_alternatives apply_paravirt apply_retpolines
    apply_returns apply_seal_endbr arch_build_bp_info arch_rethook_prepare arch_uprobe_abort_xol
    arch_uprobe_analyze_insn arch_uprobe_optimize arch_uprobe_xol_was_trapped at_8_arg0 bpf_get_attach_cookie
    branch_setup_xol_ops cN can_boost can_optimize check_kprobe_address_safe check_xstate_in_sigframe consumer_add
    copy_optimized_instructions data1 data8 date_trunc device_online dwarf2 e_machine fatal_signal_pending fsmount
    fsopen ftrace_regs get_signal handle_userfault handle_xfd_event invalid_selector is_prefix_bad java l_addr
    l_name layout_sections lddw load_elf_phdrs mangleABIName maximum_operations_per_instruction module_finalize
    module_init_section orc_fp_entry parse_lsda_header percpu_down_write perf_event_alloc
    perf_event_exit_cpu_context pr_fpvalid pre_handler_kretprobe prepare_emulation probes_profile_seq_show
    proc_kcore_text_init proc_pid_syscall ptrace_stop push_setup_xol_ops putreg r_brk r_state register_kprobe
    relative_base report_probe seqs_of_names sf show_map_vma siginfo siginfo_t signal_setup_done sigset_t sigsuspend
    tcpi_bytes_acked thaw_secondary_cpus token_index token_table trace_kprobe_module_callback trap_nr
    twobyte_is_boostable ucontext_t uprobe_init_insn uprobe_unregister uprobe_unregister_sync user_regs_struct
    wait_task_stopped warn_report xa_is_node
    """.split()  # noqa: SIM905 - a list of words is read as one
)
"""Names of the kernel, of C and of other programs that occur only in docstrings and comments."""


def files() -> list[Path]:
    """Return the files to check."""
    return [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]


def docstrings(text: str) -> set[tuple[int, int]]:
    """Return the lines and columns at which docstrings begin, also those of constants."""
    found = set()
    left: list[ast.AST] = [ast.parse(text)]
    while left:
        match left.pop():
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                found.add((constant.lineno, constant.col_offset))
            case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.Return() | ast.Assert():
                pass  # no statement is in it
            case node:
                left += (
                    child
                    for child in ast.iter_child_nodes(node)
                    if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
                )
    return found


@functools.cache
def prose_and_names(text: str) -> tuple[list[tuple[int, str]], set[str]]:
    """Return docstrings and comments with their lines, and all words of the rest; the caller changes neither."""
    places = docstrings(text)
    prose: list[tuple[int, str]] = []
    names: set[str] = set()
    for kind, string, start, _, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind == tokenize.COMMENT or (kind == tokenize.STRING and start in places):
            prose.append((start[0], string))
        elif kind == tokenize.NAME:
            names.add(string)
        elif kind == tokenize.STRING:
            names.update(WORD.findall(string))
    return prose, names


def known_names() -> set[str]:
    """Return the words of the code, the tests and the documentation, and the names of modules."""
    names = set(ELSEWHERE)
    for path in [*files(), *sorted((ROOT / "tests").rglob("*.py"))]:
        names |= prose_and_names(path.read_text(encoding="utf-8"))[1] | {path.stem, path.parent.name}
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        names.update(WORD.findall(path.read_text(encoding="utf-8")))
    return names


def stale(path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Iterate over the references of a file to names that do not exist, with their lines."""
    for line, text in prose_and_names(path.read_text(encoding="utf-8"))[0]:
        for found in REFERENCE.finditer(text):
            if not set(found[1].strip(".").split(".")) <= known:
                yield line + text.count("\n", 0, found.start()), found[1]


def beginnings(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over docstrings that begin with a word of ``BEGINNINGS``, with their lines."""
    for line, text in prose_and_names(path.read_text(encoding="utf-8"))[0]:
        if (found := BEGINNINGS.match(text)) is not None:
            yield line, found[1]


def main() -> int:
    """Print each unsuitable docstring and each reference to a name that does not exist; return 1 if there is one."""
    known = known_names()
    problems = [
        f"{path.relative_to(ROOT)}:{line}: a docstring begins with '{word}'"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, word in beginnings(path)
    ]
    problems += [
        f"{path.relative_to(ROOT)}:{line}: there is no '{name}'"
        for path in files()
        for line, name in stale(path, known)
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
