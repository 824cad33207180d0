"""A compiled program with companions and blocks of the tool that have something of everything."""

from __future__ import annotations

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source
from dprobes.ppdf.ppdf_file import encode
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile
from unit.ppdf.samples import BUILDS

__all__ = ["TEXT", "joined_sample", "joined_text"]

TEXT = """
static long kept; static char letters[5]; static unsigned long long wide; global int common;
enum color { RED, GREEN = 7 };
int unused(int *p) { return *p; }
long long power(long base, unsigned char exponent) {
    if (!exponent) return 1;
    return base * power(base, exponent - 1);
}
void nothing(void) { kept--; }
libwork.so:work { @sizes[comm] = sum(arg0); @last = last(arg1); @count[pid, arg0] = count(); @name[arg0] = comm; }
begin {
    long i, total = 0;
    printf("begin %d as %d", power(3, 4), (long)pid == 0);
    letters[2] = 200; letters[kept + 3]++; wide = -1; common += 5; common = ~common | (long)GREEN << 3;
    for (i = 0; ; i++) {
        if (i % 2) continue;
        if (i > 8 || kept > 3 && i) break;
        switch (i) { case 0: case 4: total += 2; break; case 6: total *= 3; default: total -= i ? 1 : 10; }
    }
    do total--; while (total > 0);
    while (total < 3) total++;
    printf("total %d, letter %d\\nwide %u, common %d", total, (long)letters[2], wide, -common);
    try { i = 1; total = i / (i - 1); } catch (code, address) { printf("code %x at %p", code, address); }
    nothing(); (void)i, kept += 2; kept = total == 3 ? kept : 0;
}
every 10ms {
    @flags[comm == "dprobes"] = count();
    return;
}
every 1s { print(@last); exit(); }
end {
    @count[pid, common]++; @last = kept ^ 3; @sizes2[comm, 3] += @last; delete(@count[pid, 1]);
    if (startswith(comm, "dpr") && comm != "bash") printf("%s has %d", comm, @last);
    if (@name[pid] || @name[7] == "x") printf("%s", @name[pid]);
    @named[@name[7], 1] = count(); delete(@named[@name[7], 1]);
    @name[8] = comm; @texts[1] = "one"; @texts[2] = @texts[1]; @by["two"] = count();
    if (@texts[2] == "one") printf("%s %s", @texts[1], "three");
    for (t : tasks) {
        if (t.comm == "sh" || startswith(t.state, "D")) continue;
        for (m : maps(t.pid)) { @modes[t.comm] = m.permissions; printf("%d %s %x", t.tid, m.path, m.end); break; }
        for (file : files(t.pid)) printf("%d %s", file.fd, file.path);
    }
    cat("/proc/loadavg"); print(@sizes, 2); clear(@sizes);
}
"""


def joined_text(text: str) -> Ppdf:
    """Return the compiled program of a text, with the builds of the samples for its first module."""
    source = compile_source(SourceFile("joined.dpc", text), Diagnostics(), CompileOptions(), module="libwork.so")
    first, *others = source.programs
    return Ppdf(
        first,
        ("x86_64",),
        BUILDS[1:],
        tool="dprobes test",
        companions=tuple(Ppdf(each, ("x86_64",), tool="dprobes test") for each in others),
        blocks=source.tool,
    )


def joined_sample() -> Ppdf:
    """Return the sample, with a companion."""
    return joined_text(TEXT + "libother.so:helper { @count[pid, 3] = count(); }")


JOINED = encode(joined_sample())
