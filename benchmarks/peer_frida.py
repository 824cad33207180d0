"""Attach Frida's Interceptor to a function of a process, with a callback in C (CModule); see live.py."""

from __future__ import annotations

import importlib
import sys
from typing import Any

frida: Any = importlib.import_module("frida")

MODULES = {
    "empty": "void onEnter(GumInvocationContext *c) { }",
    "count": "extern volatile long n;\nvoid onEnter(GumInvocationContext *c) { n++; }",
    "words": "extern volatile long n; extern long ring[];\n"
    "void onEnter(GumInvocationContext *c) { long *r = ring + 4 * (n++ & 1023);\n"
    "for (int i = 0; i != 4; i++) r[i] = (long)gum_invocation_context_get_nth_argument(c, i); }",
}
SCRIPT = """
const ring = Memory.alloc(65536), n = Memory.alloc(8);
const module = new CModule(%r, {n: n, ring: ring});
Interceptor.attach(Process.mainModule.base.add(%d), {onEnter: module.onEnter});
Interceptor.flush();
"""


def main(pid: int, offset: int, what: str) -> None:
    """Attach, say so, and stay until standard input ends."""
    session = frida.attach(pid)
    script = session.create_script(SCRIPT % ("#include <gum/guminterceptor.h>\n" + MODULES[what], offset))
    script.load()
    print("ready", flush=True)
    sys.stdin.read()
    session.detach()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2], 0), sys.argv[3])
