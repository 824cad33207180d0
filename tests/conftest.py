"""Collect the ``.case`` files: two tests for each case, which all back ends run on all processors."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

# Time is never asserted. "make test" runs the same examples each time, "make torture" many new ones.
hypothesis.settings.register_profile("seeded", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("torture", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("DPROBES_EXAMPLES", "seeded"))

pytest.register_assert_rewrite("support.case_interpreter", "support.differential_runs")

from support.case_format import Case, CaseError, Target, parse_case  # noqa: E402
from support.case_interpreter import (  # noqa: E402
    check_a64_case,
    check_case,
    check_compiled_case,
    check_native_case,
    check_translated_case,
    is_compiled_case,
    is_native_case,
)
from support.deselection import DeselectionCount  # noqa: E402
from support.ebpf_backend import obstacle  # noqa: E402
from support.requirements import is_required, required_words  # noqa: E402
from support.slice_times import SliceTimes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

CASES = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class BackEnd:
    """Back end that runs cases; ``obstacle`` returns the reason why it cannot run on this machine."""

    check: Callable[[Case, Target], None]
    can_run: Callable[[Case, Target], bool] = lambda case, target: True
    obstacle: Callable[[], str | None] = lambda: None


INTERPRETED = {"interpreter": BackEnd(check_case), "translator": BackEnd(check_translated_case)}
COMPILED = {
    "ebpf": BackEnd(check_compiled_case, is_compiled_case, functools.cache(obstacle)),
    "native": BackEnd(check_native_case, is_native_case),
    "a64": BackEnd(check_a64_case, is_native_case),
}
"""Back ends that most of the time of cases is spent on, which make quick leaves out."""


# Unit tests that took about a second or more when they were measured; make quick leaves them out.
SLOW = {
    "bpf/test_bpf_disassembler.py",
    "bpf/lower/hosts/test_handler_host.py",
    "bpf/lower/state/test_small_state.py",
    "bpf/lower/hits/test_call_entries_table.py",
    "bpf/lower/test_limits.py",
    "bpf/lower/test_missing_memory.py",
    "bpf/lower/test_random.py",
    "bpf/lower/test_verification.py",
    "bpftrace/test_script_conversion.py",
    "cli/languageserver/test_edited_program_analysis.py",
    "cli/test_console.py",
    "cli/test_verbs.py",
    "cli/verbs/test_log.py",
    "cli/verbs/test_sql.py",
    "dpc/modules/test_corrupt_debug_information.py",
    "dpc/test_against_gcc.py",
    "dpc/test_fields_against_gcc.py",
    "dpc/test_tool_interpreter.py",
    "dpc/typers/test_type_table_specifiers.py",
    "dwarf/test_corrupt_files.py",
    "dwarf/test_debug_entries.py",
    "dwarf/test_entry_search_inlined_calls.py",
    "dwarf/test_debug_file_packages.py",
    "dwarf/test_entry_search.py",
    "dwarf/test_line_table_source_lines.py",
    "engines/ebpf/read/test_image_watch_process_news.py",
    "engines/ebpf/read/test_record_stream_spool.py",
    "engines/ebpf/read/test_stopped_processes.py",
    "platform/foreign/test_examiner.py",
    "engines/gdb/test_hostile.py",
    "engines/gdb/test_stub_restorer.py",
    "engines/inline/test_shared_state_table_stores.py",
    "engines/ptrace/client/test_outside_removal_memory_removal.py",
    "engines/test_engine_registry.py",
    "platform/x86/patches/test_branch_targets_code_bytes.py",
    "platform/x86/patches/test_displaced_code_differential.py",
    "platform/x86/patches/test_patch_placer_coverage.py",
    "platform/x86/test_instruction_emulation.py",
    "filters/test_handler_filter.py",
    "formatters/templates/test_derived_templates.py",
    "formatters/templates/test_hostile.py",
    "formatters/test_each_format.py",
    "formatters/test_line_formatter_lines.py",
    "formatters/test_recorded_names.py",
    "native/a64/test_a64_operations_arithmetic.py",
    "native/a64/test_a64_operations_atomics.py",
    "native/a64/test_a64_operations_translator.py",
    "native/routines/test_shared_hash_table.py",
    "native/routines/test_handler_ring.py",
    "native/test_handler_analysis_well_formed.py",
    "native/x86/test_x86_operations_arithmetic.py",
    "native/x86/test_x86_operations_translator.py",
    "native/x86/test_x86_operations_user_memory.py",
    "ppdf/test_companions_and_blocks.py",
    "ppdf/test_hostile.py",
    "ppdf/test_roundtrip.py",
    "preprocessor/test_mapped_text_clean.py",
    "preprocessor/test_macros.py",
    "record/test_log_record.py",
    "record/test_line_frames.py",
    "record/test_record_table.py",
    "record/test_record_rows.py",
    "resolve/test_portable_program.py",
    "rpn/test_asserted_messages.py",
    "rpn/test_robustness.py",
    "rpn/test_roundtrip.py",
    "sinks/ctf/test_interrupted.py",
    "sinks/ctf/test_typed_fields.py",
    "sinks/local/test_command_target.py",
    "sinks/syslog/test_syslog_target.py",
    "sinks/test_field_columns.py",
    "formatters/templates/test_data_columns_ragged.py",
    "sinks/test_sink_thread.py",
    "tables/test_arrow_columns_packed_columns.py",
    "tables/test_arrow_columns_plain_columns.py",
    "tables/test_table_schema.py",
    "target/code/test_foreign_instructions_code.py",
    "target/code/test_function_exits_call_frames.py",
    "target/elf/test_elf_file.py",
    "target/test_readable_names_rust_names.py",
    "target/test_process_names.py",
    "target/unwind/test_exception_frames_rules.py",
    "target/unwind/test_stack_walk_corrupt.py",
    "test_globs.py",
    "test_requirements.py",
    "trace/test_record_columns.py",
    "trace/test_damaged_files.py",
    "trace/test_trace_reader_parser.py",
    "trace/test_trace_filter_selection.py",
    "trace/test_trace_writer.py",
    "vm/test_random_programs.py",
    "vm/test_rules.py",
    "vm/translate/test_handler_translator.py",
}


# Tests that hold a clock against the machine, or find the files of others that run beside them; guests count as others.
ALONE = {
    "ebpf/test_exact_counts.py",
    "ebpf/test_foreign_files.py",
    "ebpf/test_uprobe_sites.py",
    "test_python_guide.py",
    "test_waits.py",
}

# Where the tests of the eBPF engine put uprobes into files that this machine has, such as its C library. A uprobe is in
# all processes that execute the file, and nowhere if a test beside it has a breakpoint there; nor can that come later.
# So these tests are alone, too. Others of this kind, which have no engine in their name, have the mark themselves.
UPROBING = {
    "manager/test_commands.py",
    "manager/test_companions_inserted.py",
    "test_api_sessions.py",
    "test_companions.py",
    "test_dpc_recipes.py",
    "test_dprobes_c.py",
    "test_entries.py",
    "test_extensions.py",
    "test_filters.py",
    "test_module_names.py",
    "test_one_liners.py",
    "test_random_instructions.py",
    "test_tasks.py",
    "test_tool_blocks.py",
    "test_unreached.py",
    "usdt/test_usdt_libraries.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="run each test of tests/kernel on all of its kernels")
    parser.addoption("--slices", action="store_true", help="show the CPU seconds of slices and files of the suite")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(DeselectionCount(config))
    if config.getoption("--slices"):
        config.pluginmanager.register(SliceTimes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = CASES.parent
    slow = {tests / "unit" / name for name in SLOW}
    alone, uprobing = ({tests / "integration" / name for name in names} for names in (ALONE, UPROBING))
    if missing := [path for path in slow | alone | uprobing if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py names files that are not there: {missing}")
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)
        if item.path in alone:
            item.add_marker(pytest.mark.quiet)
        if item.path in alone or (item.path in uprobing and "ebpf" in item.name):
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("alone") is not None and tests / "integration" not in item.path.parents:
            raise pytest.UsageError(f"tools/test.sh would not run {item.nodeid}: it looks in tests/integration for it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_skip(report)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a skip a failure where what the test lacks is required; an expected failure is no skip."""
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        _, _, reason = report.longrepr
        if is_required(reason, required_words()):
            report.outcome = "failed"
            report.longrepr = (
                f"{reason}\nDPROBES_REQUIRE={os.environ['DPROBES_REQUIRE']} allows no skip for this reason"
            )


@pytest.fixture(scope="session")
def all_cases() -> list[Case]:
    """Return all cases, whatever is selected on pytest's command line."""
    return [parse_case(path, path.stem) for path in sorted(CASES.rglob("*.case"))]


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> CaseFile | None:
    if file_path.suffix == ".case":
        return CaseFile.from_parent(parent, path=file_path)
    return None


class CaseFile(pytest.File):
    """A case: what defines it is one test, and what it is compiled to another one, on all processors."""

    def collect(self) -> Iterator[CaseItem]:
        try:
            case = parse_case(self.path, self.path.stem)
        except CaseError as error:
            raise self.CollectError(str(error)) from None
        for name, back_ends in (("interpreted", INTERPRETED), ("compiled", COMPILED)):
            if back_ends is COMPILED and not case.is_run:
                continue
            item = CaseItem.from_parent(self, name=name, case=case, back_ends=back_ends)
            if back_ends is COMPILED:
                item.add_marker(pytest.mark.slow)
            yield item


class CaseItem(pytest.Item):
    """A case with some of the back ends: all that fail are named."""

    def __init__(self, *, case: Case, back_ends: Mapping[str, BackEnd], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.case = case
        self.back_ends = back_ends

    def runtest(self) -> None:
        problems, obstacles = [], set()
        for name, back_end in self.back_ends.items():
            for target in self.case.targets:
                if not back_end.can_run(self.case, target):
                    continue
                if (obstacle := back_end.obstacle()) is not None:
                    obstacles.add(obstacle)
                    continue
                try:
                    back_end.check(self.case, target)
                except AssertionError as error:
                    problems.append(f"{name}, {target.architecture}:\n{error}")
                except Exception as error:
                    error.add_note(f"{name}, {target.architecture}")
                    raise
        if problems:
            raise AssertionError("\n".join(problems))
        if obstacles:
            pytest.skip("; ".join(obstacles))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if isinstance(excinfo.value, AssertionError):
            return f"{self.path}: {self.case.title}\n{excinfo.value}\n--\n{self.case.program}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.path.stem} [{self.name}]: {self.case.title}"
