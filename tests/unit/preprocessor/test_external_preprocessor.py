"""The output of another preprocessor: line markers, messages, and failure."""

from __future__ import annotations

from pathlib import Path

from dprobes.diagnostics import Diagnostic, Severity
from dprobes.errors import SourceError
from dprobes.preprocessor import ExternalPreprocessor, ExternalRequest, ExternalResult

from .support import messages, origin, run


def writes(stdout: str = "", stderr: str = "", exit_status: int = 0) -> ExternalPreprocessor:
    return lambda request: ExternalResult("cpp x", exit_status, stdout, stderr)


def test_line_markers_lead_back_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "i.h").write_text("\nincluded here\n")
    text = '#include "i.h"\n#define A 7\npush A // x\nexact 123\n'
    made = f'# 1 "<stdin>"\n# 1 "{tmp_path}/i.h" 1\n\nincluded here\n# 3 "<stdin>" 2\npush 7\nexact 123\n'
    result, errors = run(text, external=writes(made))
    assert (errors, result.text) == ("", "\nincluded here\npush 7\nexact 123\n")
    assert str(origin(result, "here")) == f"{tmp_path}/i.h:2:10"
    assert str(origin(result, "123")) == "t.rpn:4:7"
    assert (str(origin(result, "7")), origin(result, "7").text) == ("t.rpn:3:1", "push A // x")


def test_lines_before_all_markers_are_those_of_the_source() -> None:
    result, errors = run("push A // x\nexact 123\n", external=writes("push 1\nexact 123\n"))
    assert (errors, result.text) == ("", "push 1\nexact 123\n")
    assert (str(origin(result, "push")), str(origin(result, "123"))) == ("t.rpn:1:1", "t.rpn:2:7")


def test_a_line_of_a_file_that_cannot_be_read_has_its_name() -> None:
    result, _ = run("x", external=writes('# 5 "./no/such.h"\ny\n'))
    assert (str(origin(result, "y")), origin(result, "y").text) == ("no/such.h:5:1", "y")


def test_what_is_meant_for_a_compiler_is_left_out() -> None:
    made = '# 1 "<stdin>"\n#pragma pack(1)\nx\n  # ident "1"\n#pragmatic\n'
    result, errors = run("#pragma pack(1)\nx\n", external=writes(made))
    assert (errors, result.text) == ("", "\nx\n\n#pragmatic\n")


def test_messages_become_diagnostics_and_failure_is_reported_only_without_them() -> None:
    expected = """\
t.rpn:1:1: warning: hm
    push 1
    ^~~~~~
t.rpn:2:2: error: #error no
    #error no
     ^~~~~~~~"""
    said = "<stdin>:2:2: error: #error no\n    2 | #error no\n<stdin>:1: warning: hm\n"
    assert expected == messages("push 1\n#error no\n", external=writes(stderr=said, exit_status=1))
    expected = "error: 'cpp x' failed with exit status 3\nnote: oops"
    assert expected == messages("push 1\n", external=writes(stderr="oops\n\n", exit_status=3))


def test_the_request_has_the_directory_of_the_source_first() -> None:
    requests: list[ExternalRequest] = []

    def record(request: ExternalRequest) -> ExternalResult:
        requests.append(request)
        return ExternalResult("cpp", 0, "", "")

    run("text", name="d/t.rpn", defines=[("A", "1")], include_dirs=[Path("i")], external=record)
    assert requests == [ExternalRequest("text", (("A", "1"),), (Path("d"), Path("i")))]


def test_a_preprocessor_that_cannot_be_run_is_an_error() -> None:
    def fail(request: ExternalRequest) -> ExternalResult:
        raise SourceError([Diagnostic(Severity.ERROR, "no")])

    result, errors = run("text", external=fail)
    assert (result.text, errors) == ("", "error: no")
