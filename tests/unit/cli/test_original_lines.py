"""Every command line of the seeds and of the recovered synopsis becomes one of ours."""

from __future__ import annotations

import shlex

import pytest

from dprobes.cli.original_lines import OriginalLineError, is_original, translate

KLOG = "--log-target KLOG"

LINES = [
    # seed 003:1004 and 1601-1619, verbatim (seed-examples/commands.txt)
    ("-i test.rpn -D key = value", f"insert --original test.rpn -D key=value {KLOG}"),
    ("--build-ppdf example.rpn -o example.ppdf", "build example.rpn --output example.ppdf"),
    ("--apply-ppdf example.ppdf", f"apply --original example.ppdf {KLOG}"),
    (
        "--apply-ppdf example.ppdf --group process --type enter",
        f"apply --original example.ppdf --group process --type enter {KLOG}",
    ),
    ("--apply-ppdf example.ppdf --group = filesys", f"apply --original example.ppdf --group filesys {KLOG}"),
    ("--apply-ppdf example.ppdf --type = leave", f"apply --original example.ppdf --type leave {KLOG}"),
    (
        "--apply-ppdf example.ppdf --group process memory --type leave",
        f"apply --original example.ppdf --group process,memory --type leave {KLOG}",
    ),
    # the synopsis of v3.6
    ("--insert a.rpn", f"insert --original a.rpn {KLOG}"),
    ("--insert a.rpn -D key=value --sym System.map", f"insert --original a.rpn -D key=value --sym System.map {KLOG}"),
    ("--insert a.rpn --merge", f"insert --original a.rpn --merge {KLOG}"),
    (
        "--insert a.rpn --replace --dont-verify-opcodes",
        f"insert --original a.rpn --replace --dont-verify-opcodes {KLOG}",
    ),
    (
        "--insert a.rpn --log PROCNAME PID UID SSESP CSEIP TSC",
        f"insert --original a.rpn --log PROCNAME,PID,UID,SSESP,CSEIP,TSC {KLOG}",
    ),
    ("--insert a.rpn --log ALL --log-target COM1", "insert --original a.rpn --log ALL --log-target COM1"),
    ("--insert a.rpn --log-target COM2", "insert --original a.rpn --log-target COM2"),
    ("--insert a.rpn --log-target = LTT", "insert --original a.rpn --log-target LTT"),
    ("--insert a.rpn --log-target EVL", "insert --original a.rpn --log-target EVL"),
    ("--insert a.rpn --log-target KLOG", "insert --original a.rpn --log-target KLOG"),
    ("--remove --name libc.so.6", "remove --name libc.so.6"),
    ("--remove --all", "remove --all"),
    ("--getvars --name = app --index=1-5 --local", "getvars --name app --index 1-5 --local"),
    ("--getvars --all --global --reset", "getvars --all --global --reset"),
    ("--query --name app", "query --name app"),
    ("--query --all --extended", "query --all --extended"),
    ("--build-ppdf a.rpn --outfile b.ppdf -D A = 1 --sym s.map", "build a.rpn --output b.ppdf -D A=1 --sym s.map"),
    ("--apply-ppdf a.ppdf --merge --log ALL", f"apply --original a.ppdf --merge --log ALL {KLOG}"),
    # the short forms of v4 and v5
    (
        "-i a.rpn -s m.map -u fs mm -t enter -m -l PID -f",
        f"insert --original a.rpn --sym m.map --group fs,mm --type enter --merge --log PID --unformatted-output {KLOG}",
    ),
    ("-i a.rpn -c", f"insert --original a.rpn --replace {KLOG}"),
    ("-i a.rpn -u = fs -t=enter", f"insert --original a.rpn --group fs --type enter {KLOG}"),
    ("-r --name m", "remove --name m"),
    ("-r -a", "remove --all"),
    ("-g -a -i=1-2", "getvars --all --index 1-2"),
    ("-g --name m -i 3", "getvars --name m --index 3"),
    ("-q -a -x", "query --all --extended"),
    ("-b a.rpn -o a.ppdf", "build a.rpn --output a.ppdf"),
    ("-p a.ppdf -u fs -t leave -f", f"apply --original a.ppdf --group fs --type leave --unformatted-output {KLOG}"),
    ("-v", "--version"),
    # what the lexer of the original allowed as well: the verb anywhere, names with '-', '=' in all places
    ("--merge --insert a.rpn", f"insert --original a.rpn --merge {KLOG}"),
    ("-D key =value -i a.rpn", f"insert --original a.rpn -D key=value {KLOG}"),
    ("-D key= value -i a.rpn", f"insert --original a.rpn -D key=value {KLOG}"),
    ("-i a.rpn -Dkey=value", f"insert --original a.rpn -D key=value {KLOG}"),
    ("-i a.rpn -D key", f"insert --original a.rpn -D key {KLOG}"),
    ("--insert=a-b.rpn", f"insert --original a-b.rpn {KLOG}"),
    ("--insert = a.rpn", f"insert --original a.rpn {KLOG}"),
    ("-i a.rpn --allow-write", f"insert --original a.rpn --allow-write {KLOG}"),
]


@pytest.mark.parametrize(("original", "ours"), LINES, ids=[original for original, _ in LINES])
def test_a_line_of_the_original_becomes_ours(original: str, ours: str) -> None:
    assert is_original(shlex.split(original))
    found = translate(shlex.split(original), klog_is_writable=True)
    assert list(found.arguments) == shlex.split(ours)
    assert found.notes == ()


@pytest.mark.parametrize("spelling", ["--stop-cpus", "-stopcpus"])
def test_stopping_the_processors_is_not_needed(spelling: str) -> None:
    found = translate(["-i", "a.rpn", spelling], klog_is_writable=True)
    assert found.arguments == ("insert", "--original", "a.rpn", "--log-target", "KLOG")
    assert found.notes == ("--stop-cpus has no effect: probepoints are inserted without stopping the processors",)


def test_without_the_kernels_log_records_go_to_the_managers_file() -> None:
    found = translate(["-i", "a.rpn"], klog_is_writable=False)
    assert found.arguments == ("insert", "--original", "a.rpn")
    assert found.notes == (
        "the kernel's log cannot be written: records go to the manager's file ('dprobes log' shows it)",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-i", "--insert needs the name of a file"),
        ("-i --merge", "--insert needs the name of a file"),
        ("--inser a.rpn", "dprobes has no option '--inser'; did you mean '--insert'?"),
        ("-q -a --extend", "--query has no option '--extend'; did you mean '--extended'?"),
        ("-q libc", "--query: unexpected word 'libc'"),
        ("-i a.rpn b.rpn", "--insert: unexpected word 'b.rpn'"),
        ("-i a.rpn --group", "--group needs at least one name"),
        ("-i a.rpn --log-target", "--log-target needs a value"),
        ("-i a.rpn -D", "-D needs a key and a value: -D key = value"),
        ("-i a.rpn -D key =", "-D key = needs a value"),
        ("-i a.rpn --log PSW", "--log PSW is for S/390; here it is CSEIP or SSESP"),
        ("-r --reset", "--remove has no option '--reset'"),
    ],
)
def test_what_the_original_would_not_take_is_said(line: str, message: str) -> None:
    with pytest.raises(OriginalLineError) as caught:
        translate(shlex.split(line), klog_is_writable=True)
    assert str(caught.value) == message


@pytest.mark.parametrize("line", ["insert a.rpn", "--help", "--version", "-h", "", "run a.rpn -c ls"])
def test_other_lines_are_ours(line: str) -> None:
    assert not is_original(shlex.split(line))
