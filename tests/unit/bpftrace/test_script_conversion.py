"""Scripts of bpftrace, and the programs in DProbes C that they become; what has no like, with its place."""

from __future__ import annotations

import random
import textwrap
from typing import TYPE_CHECKING

import pytest

from dprobes.bpftrace.script_conversion import Conversion, convert
from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Known:
    """A machine with one library, three tracepoints, and an array in one of them."""

    def library(self, name: str) -> str:
        return {"libc": "libc.so.6"}.get(name, name)

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:
        known = {"sched": ("sched_switch", "sched_wakeup"), "syscalls": ("sys_enter_execve", "sys_enter_execveat")}
        return [name for name in known.get(subsystem, ()) if name.startswith(pattern.rstrip("*"))]

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:
        return {"prev_comm": 16, "filename": 0} if (subsystem, name) == ("sched", "sched_switch") else {}

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:
        return {"rqtp": "struct timespec *"} if (subsystem, name) == ("syscalls", "sys_enter_nanosleep") else {}


def converted(script: str) -> Conversion:
    return convert(SourceFile("s.bt", textwrap.dedent(script).strip()), Known(), Diagnostics())


def body_of(script: str) -> list[str]:
    """Return the lines of the only block of a script."""
    return [line.strip() for line in converted(script).text.splitlines()[1:-1]]


def test_parameters_of_functions_have_their_names() -> None:
    assert body_of("kfunc:vfs_read { @[args->file->f_flags, args.count] = count() }") == [
        "@[file->f_flags, count] = count();"
    ]
    # Variables of the script that are called so have others.
    assert body_of("fentry:f { $size = args.size; $n = $size + 1; @[$size, $n] = count() }") == [
        "long size_ = size;",
        "long n = size_ + 1;",
        "@[size_, n] = count();",
    ]
    assert body_of("kprobe:f { $size = arg0; @[$size] = count() }")[0] == "long size = arg0;"
    assert body_of("kretfunc:f { @ = hist(retval) }") == ["@ = hist(retval);"]
    assert body_of("kretprobe:f { @ = hist(retval) }") == ["@ = hist((long)retval);"]


def test_maps_keep_strings_and_call_stacks() -> None:
    assert body_of('uprobe:libc:f { @p[tid] = str(arg0); @c = comm; @[@p[tid], @c != "sh"] = count() }') == [
        "@p[tid] = str(arg0);",
        "@c = comm;",
        '@[@p[tid], @c != "sh"] = count();',
    ]
    assert body_of("uprobe:f:g { @s[arg0] = ustack; @l = ustack(3); delete(@s[arg0]); }") == [
        "@s[arg0] = ustack();",
        "@l = ustack(3);",
        "delete(@s[arg0]);",
    ]
    assert body_of('kprobe:f { @s[arg0] = kstack; @[@s[arg0]] = count(); printf("%s", @s[arg0]) }') == [
        "@s[arg0] = kstack();",
        "@[@s[arg0]] = count();",
        'printf("%k", @s[arg0]);',
    ]
    # A field that is printed as a string is an array of characters.
    assert body_of('kprobe:f { $d = (struct d *)arg0; @n = $d->name; printf("%-7s %s", @n, $d->name) }') == [
        "struct d *d = (struct d *)arg0;",
        "@n = str(d->name);",
        'printf("%-7s %s", @n, d->name);',
    ]


def test_hits_keep_texts_in_quotes_and_choose_between_them() -> None:
    assert body_of('kprobe:f { @state[tid] = "open"; @n = arg0 > 5 ? "big" : "small"; printf("%s", @n) }') == [
        '@state[tid] = "open";',
        '@n = arg0 > 5 ? "big" : "small";',
        'printf("%s", @n);',
    ]
    script = 'kprobe:f { $s = arg0 ? "a" : "b"; @[$s, pid] = count(); printf("%s %d", $s, pid) }'
    assert body_of(script) == [
        '@[arg0 ? "a" : "b", pid] = count();',
        'printf("%s %d", arg0 ? "a" : "b", pid);',
    ]


def test_what_follows_a_choice_of_strings_is_written_for_each() -> None:
    script = """
    kprobe:f {
        $sk = (struct sock *)arg0;
        $a = ntop(0);
        if ($sk->family == AF_INET) { $a = ntop($sk->v4); } else { $a = ntop(AF_INET6, $sk->v6); }
        $port = $sk->port;
        $port = bswap($port);
        printf("%-15.15s %d\\n", $a, $port);
    }
    """
    assert body_of(script) == [
        "struct sock *sk = (struct sock *)arg0;",
        "if (sk->family == 2) {",
        "long port = sk->port;",
        "port = bswap(sk->port);",
        'printf("%-15s %d", ntop(sk->v4), port);',
        "} else {",
        "long port = sk->port;",
        "port = bswap(sk->port);",
        'printf("%-15s %d", ntop(10, sk->v6), port);',
        "}",
    ]


def test_fields_that_are_pointers_have_their_types() -> None:
    assert body_of("tracepoint:syscalls:sys_enter_nanosleep { @[curtask->pid] = sum(args->rqtp->tv_nsec) }") == [
        "@[curtask->pid] = sum(((struct timespec *)args.rqtp)->tv_nsec);"
    ]


def test_names_may_be_called() -> None:
    assert body_of("uprobe:libc:f { @[pid(), comm()] = count() }") == ["@[pid, comm] = count();"]


def test_variables_may_be_declared_where_they_are_assigned() -> None:
    assert body_of("uprobe:libc:f { let $size = arg0; @ = sum($size) }") == ["long size = arg0;", "@ = sum(size);"]


def test_variables_may_be_declared_before_they_are_assigned() -> None:
    assert body_of("uprobe:libc:f { let $size; $size = arg0; @ = sum($size) }") == [
        "long size = arg0;",
        "@ = sum(size);",
    ]
    assert body_of("uprobe:libc:f { let $n; if (arg0) { $n = 1 } else { $n = arg1 } @ = sum($n) }") == [
        "long n = 0;",
        "if (arg0) {",
        "n = 1;",
        "} else {",
        "n = arg1;",
        "}",
        "@ = sum(n);",
    ]


@pytest.mark.parametrize("equals", ["=", ""])
def test_settings_of_bpftrace_are_left_out(equals: str) -> None:
    script = f'config {equals} {{ missing_probes = "ignore"; max_map_keys = 9 }}\nuprobe:libc:f {{ @ = sum(arg0) }}'
    assert body_of(script) == ["@ = sum(arg0);"]
    assert said_of(script).startswith("s.bt:1:1: note: 'config' is left out: its settings are those of bpftrace\n")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("config { a = 1; uprobe:libc:f", "expected '}' at the end of the settings, found the end of the script"),
        ("config = 1", "expected '{' at the beginning of the settings, found '1'"),
    ],
)
def test_settings_have_braces(script: str, message: str) -> None:
    assert f"error: {message}\n" in said_of(script)


def said_of(script: str) -> str:
    """Return what is said of a script, be it an error or not."""
    diagnostics = Diagnostics()
    try:
        convert(SourceFile("s.bt", textwrap.dedent(script).strip()), Known(), diagnostics)
    except SourceError as error:
        return "\n".join(each.render() for each in error.diagnostics)
    return diagnostics.render()


@pytest.mark.parametrize(
    "point", ["kprobe:f", "kretprobe:m:f", "tracepoint:sched:sched_switch", "tracepoint:syscalls:sys_enter_execve"]
)
def test_structures_of_the_kernel_are_known_where_it_is_probed(point: str) -> None:
    program = converted(f"{point} {{ $t = (struct task_struct *)1; @[$t->pid] = count() }}").text
    assert "    struct task_struct *t = (struct task_struct *)1;\n    @[t->pid] = count();\n" in program


@pytest.mark.parametrize(
    ("script", "place"),
    [
        ("uprobe:/bin/bash:readline { @ = count() }", "/bin/bash:readline"),
        ("u:libc:malloc { @ = count() }", "libc.so.6:malloc"),
        ("uretprobe:libc:malloc { @ = count() }", "return libc.so.6:malloc"),
        ("uprobe:libc:malloc+8 { @ = count() }", "libc.so.6:malloc+8"),
        ("uprobe:libc:str* { @ = count() }", "libc.so.6:str*"),
        ('uprobe:./go:"main.(*T).f" { @ = count() }', './go:"main.(*T).f"'),
        ("usdt:/bin/py:python:gc__start { @ = count() }", "usdt /bin/py:python:gc__start"),
        ("kprobe:vfs_read { @ = count() }", "kernel:vfs_read"),
        ("kr:vfs_read { @ = count() }", "return kernel:vfs_read"),
        ("kprobe:ext4:ext4_sync_fs { @ = count() }", "kmod ext4:ext4_sync_fs"),
        ("t:sched:sched_switch { @ = count() }", "tracepoint sched:sched_switch"),
        ("tracepoint:sched:* { @ = count() }", "tracepoint sched:sched_switch,\ntracepoint sched:sched_wakeup"),
        ("tracepoint:syscalls:sys_enter_openat { @ = count() }", "syscall openat"),
        ("tracepoint:syscalls:sys_exit_newstat { @ = count() }", "return syscall stat"),
        ("tracepoint:syscalls:sys_enter_exec* { @ = count() }", "syscall execve,\nsyscall execveat"),
        ("kfunc:vfs_read { @ = count() }", "kernel:vfs_read"),
        ("fexit:vfs_read { @ = count() }", "return kernel:vfs_read"),
        ("kretfunc:vmlinux:vfs_read { @ = count() }", "return kernel:vfs_read"),
        ("fentry:ext4:ext4_sync_fs { @ = count() }", "kmod ext4:ext4_sync_fs"),
        ("software:page-faults:1 { @ = count() }", "sample page-faults:1"),
        ("software:faults { @ = count() }", "sample page-faults:100"),
        ("s:cs: { @ = count() }", "sample context-switches:1000"),
        ("hardware:cpu-cycles:2000000 { @ = count() }", "sample cycles:2000000"),
        ("h:branches { @ = count() }", "sample branches:100000"),
        ("profile:hz:99 { @ = count() }", "sample 99hz"),
        ("profile:ms:10 { @ = count() }", "sample 100hz"),
        ("watchpoint:0x1000:4:rw { @ = count() }", "watch rw (int)0x1000"),
        ("kprobe:a, kprobe:b /pid == 1/ { @ = count() }", "kernel:a,\nkernel:b when (pid == 1)"),
    ],
)
def test_places(script: str, place: str) -> None:
    assert converted(script).text == f"{place} {{\n    @ = count();\n}}\n"


def test_usdt_probes_have_more_arguments_than_functions() -> None:
    assert "    @ = sum(arg11);\n" in converted("usdt:/bin/py:python:line { @ = sum(arg11) }").text
    assert "'arg6' is not known" in said_of("uprobe:/bin/py:line { @ = sum(arg6) }")


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ('printf("%d %s\\n", pid, comm);', 'printf("%d %s", pid, comm);'),
        ('printf("a "); printf("%-8lld|\\n", arg0)', 'printf("a %-8d|", arg0);'),
        ('printf("%s called\\n", func)', 'printf("%s called", func);'),
        ('printf("%s\\n", usym(arg1))', 'printf("%a", arg1);'),
        ('printf("100%% of %s\\n", ustack(3))', 'printf("100%% of %k", ustack(3));'),
        ('printf("%r\\n", buf(arg1, 8))', 'printf("%s", mem(arg1, 8));'),
        ('$s = str(arg0); printf("%s\\n", $s)', 'printf("%s", str(arg0));'),
        ("@[comm, arg0] = sum(arg1 * 2 + 1)", "@[comm, arg0] = sum(arg1 * 2 + 1);"),
        ("@x[func] = lhist(arg1, 0, 100, 10)", "@x[func] = lhist(arg1, 0, 100, 10);"),
        ('@["read", tid] = max(arg0)', '@["read", tid] = max(arg0);'),
        ("@[(pid, tid)] = count()", "@[pid, tid] = count();"),
        ("@x[tid] = nsecs; delete(@x, tid)", "@x[tid] = nsecs;\n    delete(@x[tid]);"),
        ("@ = hist((arg0 + arg1) * arg2)", "@ = hist((arg0 + arg1) * arg2);"),
        ("@ = hist(arg0 - (arg1 - arg2))", "@ = hist(arg0 - (arg1 - arg2));"),
        ("@ = hist(-(-arg0))", "@ = hist(- -arg0);"),
        ("@x++", "@x++;"),
        ("@x--", "@x -= 1;"),
        ("@x += 1e3", "@x += 1000;"),
        ("@x = 0x10 + 010 + 1_000us", "@x = 16L + 8 + 1000000;"),
        ("@x = 1 << 40; @y = 3 * arg0 / 2", "@x = 1L << 40;\n    @y = 3L * arg0 / 2;"),
        (r'printf("%hhd %hx %lld %-9s\n", arg0, arg1, 3, func)', 'printf("%hhd %hx %d %-9s", arg0, arg1, 3, func);'),
        ("if (true) { @x = 1 } @y = false", "if (1) {\n        @x = 1;\n    }\n    @y = 0;"),
        ("@active = 0; @active++; @active--", "@active = 0;\n    @active++;\n    @active -= 1;"),
        ("$pid = (int32)arg0; @x = $pid", "long pid_ = (int)arg0;\n    @x = pid_;"),
        ("if (arg0) { $n = 1 } else if (arg1) { $n = 2 } @x = $n",
         ("long n = 0;\n    if (arg0) {\n        n = 1;\n    } else {\n"
         "        if (arg1) {\n            n = 2;\n        }\n"
         "    }\n    @x = n;")),
        ("unroll(2) { @x++ }", "for (int turn1 = 0; turn1 < 2; turn1++) {\n        @x++;\n    }"),
        ('unroll(2) { printf("x\\n") }', 'printf("x");\n    printf("x");'),
        ("while (arg0 > 1) { @x++ ; break }", "while (arg0 > 1) {\n        @x++;\n        break;\n    }"),
        ('if (comm == "bash" && strncmp(str(arg0), "/etc", 4) == 0) { return }',
         'if (comm == "bash" && !startswith(str(arg0), "/etc") == 0) {\n        return;\n    }'),
        ("@x = AF_INET ? reg(\"di\") : sizeof(uint32)", '@x = 2 ? reg("rdi") : sizeof(unsigned int);'),
        ("@name[tid] = func; @[@name[tid]] = count()", "@name[tid] = pc;\n    @[sym(@name[tid])] = count();"),
        ("override(5)", "skip(5);"),
    ],
)  # fmt: skip
def test_statements(statement: str, line: str) -> None:
    assert converted(f"kprobe:f {{ {statement} }}").text == f"kernel:f {{\n    {line}\n}}\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("tracepoint:sched:sched_switch { @[args->prev_comm] = sum(args.prev_pid) }",
         "tracepoint sched:sched_switch {\n    @[str(args.prev_comm, 16)] = sum(args.prev_pid);\n}\n"),
        ('tracepoint:sched:sched_switch { printf("%s\\n", args.filename) }',
         'tracepoint sched:sched_switch {\n    printf("%s", str(args.filename));\n}\n'),
        ("tracepoint:syscalls:sys_exit_read /args->ret > 0/ { @ = hist(args->ret) }",
         "return syscall read when ((long)retval > 0) {\n    @ = hist((long)retval);\n}\n"),
        ('ur:/bin/bash:readline { printf("%s\\n", str(retval)) }',
         'return /bin/bash:readline {\n    printf("%s", str(retval));\n}\n'),
        ('ur:libc:a, ur:libc:b { printf("%s\\n", func) }',
         'return libc.so.6:a,\nreturn libc.so.6:b {\n    printf("%s", func);\n}\n'),
        (("#define LIMIT 8\n#ifndef BPFTRACE_HAVE_BTF\nstruct no { };\n#endif\nstruct s { int a; struct s *next; };\n"
         "kprobe:f { $s = (struct s *)arg0; @[$s->next->a] = count() /* how often */ }"),
         ("#define LIMIT 8\nstruct s { int a; struct s *next; };\n\n"
         "kernel:f {\n    struct s *s = (struct s *)arg0;\n    @[s->next->a] = count();\n}\n")),
        # Types and enumerators of the kernel are known to who compiles the program.
        (
            ("kprobe:f { $s = (struct sock *)arg0; $d = $s->a.b;"
             " if ($d->c == TCP_ESTABLISHED2) { @[((path *)arg1)->d] = count() } }"),
            (
                "kernel:f {\n    struct sock *s = (struct sock *)arg0;\n    if (s->a.b->c == TCP_ESTABLISHED2) {\n"
                "        @[((struct path *)arg1)->d] = count();\n    }\n}\n"
            ),
        ),
        # What is read is put in before.
        ("kretprobe:f /@start[tid]/ { @ = hist(nsecs - @start[tid]) }\nkprobe:f { @start[tid] = nsecs }",
         ("kernel:f {\n    @start[tid] = nsecs;\n}\nreturn kernel:f when (@start[tid]) {\n"
         "    @ = hist(nsecs - @start[tid]);\n}\n")),
        ("BEGIN { @cap[0] = \"CHOWN\"; } kprobe:f { printf(\"%-9s|\\n\", @cap[arg1]) }",
         'begin {\n    @cap[0] = "CHOWN";\n}\nkernel:f {\n    printf("%-9s|", @cap[arg1]);\n}\n'),
        ("t:syscalls:sys_enter_execve { printf(\"%d \", pid); join(args->argv) }",
         ("syscall execve {\n    char **words1 = (char **)args.argv;\n"
         '    if (!words1[1]) printf("%d %s", pid, words1[0]);\n'
         '    else if (!words1[2]) printf("%d %s %s", pid, words1[0], words1[1]);\n'
         '    else if (!words1[3]) printf("%d %s %s %s", pid, words1[0], words1[1], words1[2]);\n'
         '    else if (!words1[4]) printf("%d %s %s %s %s", pid, words1[0], words1[1], words1[2], words1[3]);\n'
         '    else if (!words1[5]) printf("%d %s %s %s %s %s", pid, words1[0], words1[1], words1[2], words1[3],'
         " words1[4]);\n"
         '    else printf("%d %s %s %s %s %s %s", pid, words1[0], words1[1], words1[2], words1[3], words1[4],'
         " words1[5]);\n"
         "}\n")),
    ],
)  # fmt: skip
def test_programs(script: str, text: str) -> None:
    assert converted(script).text == text


def test_blocks_of_the_tool() -> None:
    script = """
    BEGIN { printf("begins\\n"); @limit = 5; }
    kprobe:f /@limit/ { @ = count(); }
    interval:s:2 { time("%H:%M:%S "); print(@, 3); clear(@); }
    interval:hz:10 { $n = @limit; if ($n > 4) { exit(); } }
    END { printf("ends "); printf("%d\\n", @limit); zero(@); }
    """
    text = """\
        begin {
            printf("begins");
            @limit = 5;
        }
        kernel:f when (@limit) {
            @ = count();
        }
        every 2s {
            print(@, 3);
            clear(@);
        }
        every 100ms {
            long n = @limit;
            if (n > 4) {
                exit();
            }
        }
        end {
            printf("ends %d", @limit);
            clear(@);
        }
    """
    assert converted(script).text == textwrap.dedent(text)
    assert said_of(script) == (
        "s.bt:3:16: note: 'time' is left out: the lines of records begin with the time\n"
        '    interval:s:2 { time("%H:%M:%S "); print(@, 3); clear(@); }\n'
        "                   ^~~~~~~~~~~~~~~~~"
    )


def test_names_of_a_dictionary_are_put_there_by_the_tool() -> None:
    text = 'BEGIN { @cap[0] = "CHOWN" } kprobe:f { printf("%s\\n", @cap[arg1]) } END { clear(@cap) }'
    assert converted(text).text == textwrap.dedent("""\
        begin {
            @cap[0] = "CHOWN";
        }
        kernel:f {
            printf("%s", @cap[arg1]);
        }
        end {
            clear(@cap);
        }
    """)


def test_a_hit_asks_the_tool_for_what_only_that_can_do() -> None:
    script = 'kprobe:f { @++; print(@, 3); clear(@); cat("/proc/loadavg"); exit() } kretprobe:f { clear(@); exit() }'
    assert converted(script).text == textwrap.dedent("""\
        static long asked_of_tool1;
        static long asked_of_tool2;
        static long asked_of_tool3;
        static long asked_of_tool4;
        kernel:f {
            @++;
            asked_of_tool1 = 1;
            asked_of_tool2 = 1;
            asked_of_tool3 = 1;
            asked_of_tool4 = 1;
        }
        return kernel:f {
            asked_of_tool2 = 1;
            asked_of_tool4 = 1;
        }
        every 100ms {
            if (asked_of_tool1) { asked_of_tool1 = 0; print(@, 3); }
            if (asked_of_tool2) { asked_of_tool2 = 0; clear(@); }
            if (asked_of_tool3) { asked_of_tool3 = 0; cat("/proc/loadavg"); }
            if (asked_of_tool4) { asked_of_tool4 = 0; exit(); }
        }
        end {
            if (asked_of_tool1) print(@, 3);
            if (asked_of_tool3) cat("/proc/loadavg");
        }
    """)
    assert said_of("kprobe:f { exit() }") == (
        "s.bt:1:12: note: 'exit' is done by the tool, up to 100 ms after the hit\n    kprobe:f { exit() }\n"
        "               ^~~~~~"
    )


def test_samplers_know_the_types_of_the_kernel() -> None:
    text = "sample 99hz {\n    struct task_struct *t = (struct task_struct *)curtask;\n    @ = sum(t->pid);\n}\n"
    assert converted("profile:hz:99 { $t = (struct task_struct *)curtask; @ = sum($t->pid) }").text == text


def test_what_a_program_is_run_with() -> None:
    found = converted("kprobe:f { override($1 + $2 + $1) }").options
    assert found == ("-D ARG1=VALUE", "-D ARG2=VALUE", "--allow-write")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("software:alignment-faults:100 { }",
         ("s.bt:1:1: error: 'software:alignment-faults:100' has no equivalent in DProbes C: there is no such counter\n"
         "    software:alignment-faults:100 { }\n    ^~~~~~~~~~~~~~~~~~~~~~~~~~~~~")),
        ("s:task-clock { }",
         ("s.bt:1:1: error: a period of 0 task-clock is outside 10000 to 4294967295\n"
         "    s:task-clock { }\n    ^~~~~~~~~~~~\nhint: write s:task-clock:NUMBER")),
        ("fentry:f { @ = sum(args.pid) }",
         ("s.bt:1:20: error: 'pid' is something else in DProbes C\n    fentry:f { @ = sum(args.pid) }\n"
         "                       ^~~~~~~~\nhint: write kprobe:FUNCTION, and arg0, arg1 for its arguments")),
        ('kprobe:f { printf("%-2000000000s", "a") }',
         ("s.bt:1:12: error: a width or precision is at most 4095: '%-2000000000s'\n"
         '    kprobe:f { printf("%-2000000000s", "a") }\n               ^~~~~~~~~~~~~~~~~~~~~~~~~~~~')),
        ("kprobe:f { @[cgroup] = count() }",
         ("s.bt:1:14: error: 'cgroup' has no equivalent in DProbes C: the cgroup of a process\n"
         "    kprobe:f { @[cgroup] = count() }\n                 ^~~~~~\nhint: run it with --cgroup PATH")),
        ("uprobe:f:g { $s = (struct sock *)arg0; @ = sum($s->x) }",
         ("s.bt:1:19: error: 'struct sock' is not declared in the script\n"
         "    uprobe:f:g { $s = (struct sock *)arg0; @ = sum($s->x) }\n                      ^~~~~~~~~~~~~~~~~~~\n"
         "hint: declare it with the fields that are used: its place in memory counts")),
        ("uprobe:libc:f { @n[tid] = ustack; @[@n[tid]] = count() }",
         ("s.bt:1:37: error: '@n' keeps call stacks of programs, which only printing the table shows\n"
         "    uprobe:libc:f { @n[tid] = ustack; @[@n[tid]] = count() }\n"
         "                                        ^~~~~~~\n"
         "hint: have 'ustack' as a key where you print or count")),
        ('kprobe:f { @["a"] = count(); @[arg0 ? "b" : "c"] = count(); @[comm] = count() }',
         ("s.bt:1:63: error: the keys of '@' are string literals and other strings\n"
         '    kprobe:f { @["a"] = count(); @[arg0 ? "b" : "c"] = count(); @[comm] = count() }\n'
         "                                                                  ^~~~\n"
         "hint: use a second map for the string literals")),
        ('kprobe:f { @[arg0 ? "a" : 3] = count() }',
         ("s.bt:1:21: error: a text in quotes cannot be chosen by a condition\n"
         '    kprobe:f { @[arg0 ? "a" : 3] = count() }\n                        ^~~\nhint: use \'if\'')),
        ('kprobe:f / (arg0 ? "a" : "b") == "a" / { @ = count() }',
         ("s.bt:1:12: error: a string that a condition chooses cannot be compared\n"
         '    kprobe:f / (arg0 ? "a" : "b") == "a" / { @ = count() }\n'
         "               ^~~~~~~~~~~~~~~~~~~~~~~~~\nhint: use 'if'")),
        ("kprobe:f { $p = arg0; $p = bswap($p); @ = sum($p) }",
         ("s.bt:1:34: error: how many bytes '$p' has is not known\n"
         "    kprobe:f { $p = arg0; $p = bswap($p); @ = sum($p) }\n                                     ^~\n"
         "hint: write how large it is: bswap((uint16)$p)")),
        ('kprobe:f { cat("/proc/%d/maps", pid) }',
         ("s.bt:1:12: error: the path of a file is written as it is\n"
         '    kprobe:f { cat("/proc/%d/maps", pid) }\n               ^~~~~~~~~~~~~~~~~~~~~~~~~')),
        ("kprobe:f { system(\"ls\") }",
         ("s.bt:1:12: error: no commands are run\n    kprobe:f { system(\"ls\") }\n               ^~~~~~~~~~~~")),
        ("kprobe:f { printf(\"%d %d\\n\", 1) }",
         ("s.bt:1:12: error: there is no value for '%d'\n"
         "    kprobe:f { printf(\"%d %d\\n\", 1) }\n               ^~~~~~~~~~~~~~~~~~~~")),
        ("kprobe:f { @x = ntop(arg0) }",
         ("s.bt:1:17: error: a table does not keep a network address\n"
         "    kprobe:f { @x = ntop(arg0) }\n                    ^~~~~~~~~~")),
        ("uprobe:f:g { if (FOO) { @x++ } }",
         ("s.bt:1:18: error: 'FOO' is not known; it may be a constant of a header of the kernel\n"
         "    uprobe:f:g { if (FOO) { @x++ } }\n                     ^~~\n"
         "hint: define it in the script: #define FOO 1")),
        ("interval:s:1000000000000 { exit() } kprobe:f { }", (
         "s.bt:1:1: error: this is not a time\n"
         "    interval:s:1000000000000 { exit() } kprobe:f { }\n"
         "    ^~~~~~~~~~~~~~~~~~~~~~~~\nhint: write interval:s:1")),
        ("#define X 5", "error: there is no probe in the script"),
        ("kprobe:f { @x = $y = 1; @a[1 = 2 } kprobe:g { 08z; }",
         ("s.bt:1:20: error: expected ';' after a statement, found '='\n"
         "    kprobe:f { @x = $y = 1; @a[1 = 2 } kprobe:g { 08z; }\n                       ^\n"
         "s.bt:1:30: error: expected ']' after the values, found '='\n"
         "    kprobe:f { @x = $y = 1; @a[1 = 2 } kprobe:g { 08z; }\n                                 ^\n"
         "s.bt:1:47: error: '08z' is not a number\n"
         "    kprobe:f { @x = $y = 1; @a[1 = 2 } kprobe:g { 08z; }\n"
         "                                                  ^~~")),
        ("tracepoint:nothing:x* { }",
         ("s.bt:1:1: error: no tracepoint of this machine matches 'tracepoint:nothing:x*'\n"
         "    tracepoint:nothing:x* { }\n    ^~~~~~~~~~~~~~~~~~~~~")),
    ],
)  # fmt: skip
def test_what_has_no_like_is_said_with_its_place(script: str, message: str) -> None:
    assert said_of(script) == message


def test_what_differs_is_noted() -> None:
    assert said_of('#include <linux/sched.h>\nkprobe:f { @[$1] = sum(elapsed); printf("%d", arg0) }') == (
        "s.bt:1:1: note: the header <linux/sched.h> is not read: what is used of it has to be declared\n"
        "    #include <linux/sched.h>\n    ^~~~~~~~~~~~~~~~~~~~~~~~\n"
        "s.bt:2:24: note: 'elapsed' counts from another moment here: from the start of the machine\n"
        '    kprobe:f { @[$1] = sum(elapsed); printf("%d", arg0) }\n                           ^~~~~~~'
    )


@pytest.mark.parametrize(
    "script",
    [
        "kprobe:f { @ = sum(" + "(" * 5000 + "1" + ")" * 5000 + ") }",
        "kprobe:f { @ = sum(1" + " + 1" * 5000 + ") }",
        "kprobe:f { @ = sum($x" + "->x" * 5000 + ") }",
        "kprobe:f { @ = sum(" + "-" * 5000 + "1) }",
        "kprobe:f { " + "if (1) {" * 5000,
        "kprobe:f { if (1) { }" + " else if (1) { }" * 5000 + "}",
        "kprobe:f { @ = sum(" + "1 ? " * 5000 + "1) }",
    ],
)
def test_what_is_nested_too_deeply_is_an_error(script: str) -> None:
    with pytest.raises(SourceError) as caught:
        converted(script)
    assert "levels" in caught.value.diagnostics[0].message


_WORDS = r"""
kprobe:f uprobe:/bin/a:b tracepoint:sched:sched_switch interval:s:1 BEGIN END / { } ( ) [ ] ; , @ @x $v $1 =
+= ++ -- + - * / % ? : . -> args->x args.prev_comm pid comm func retval str( printf("%d %s\n", hist( lhist(
count() "text" 1 0x 1e9 1e99 if else while unroll(2) return delete(@x) print(@x) clear(@x) (struct s *) struct
s { int a; }; sizeof( #define #if #endif #ifdef /* */ // ustack usym( (uint8) ! ~ && || == time( join( exit()
é
"""
PIECES = (*_WORDS.split(), "\0", "\u2028")


def test_any_text_is_converted_or_refused() -> None:
    choose = random.Random(15)
    for _ in range(3000):
        pieces = choose.choices(PIECES, k=choose.randrange(1, 30))
        script = choose.choice(("", "kprobe:f { ", "kprobe:f /")) + " ".join(pieces) + choose.choice(("", " }", "\n"))
        try:
            converted(script)
        except SourceError as error:
            assert error.diagnostics  # noqa: PT017 - what else may be raised ends the test


DIGITS = "9" * 6000
"""More than Python makes a number of."""


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f"kprobe:f {{ @ = {DIGITS}; }}", f"s.bt:1:16: error: '{DIGITS[:8]}"),
        (f"kprobe:f {{ @ = arg{DIGITS}; }}", f"s.bt:1:16: error: 'arg{DIGITS[:8]}"),
        (f"profile:hz:{DIGITS} {{ @ = count(); }}", f"s.bt:1:1: error: 'profile:hz:{DIGITS[:8]}"),
        (f'kprobe:f {{ printf("%{DIGITS}d", 1) }}', "s.bt:1:12: error: a width or precision is at most 4095"),
    ],
)
def test_numbers_have_few_digits(script: str, problem: str) -> None:
    assert said_of(script).startswith(problem)


def test_a_script_without_probes_is_converted() -> None:
    assert converted('BEGIN { printf("hello\\n"); @a = 1 } interval:s:1 { exit(); }').text == (
        'begin {\n    printf("hello");\n    @a = 1;\n}\nevery 1s {\n    exit();\n}\n'
    )
