"""
Attach Frida's Interceptor to a function of a process, with a callback in C (CModule); see live.py.

With "replace", the function is replaced by one in C that counts its calls (replaceFast). Before that, it is replaced
and restored many times, and the median of the microseconds for both is printed.
"""

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

REPLACEMENT = """
const n = Memory.alloc(8);
const module = new CModule('extern volatile long n; void hot(long a, long b, long c, long d) { n++; }', {n: n});
const target = Process.mainModule.base.add(%d);
const clock = new NativeFunction(Module.getGlobalExportByName('clock_gettime'), 'int', ['int', 'pointer']);
const time = Memory.alloc(16);
function now() { clock(1, time); return time.readU64().toNumber() * 1e6 + time.add(8).readU64().toNumber() / 1e3; }
const took = [];
for (let i = 0; i < %d; i++) {
    const begin = now();
    Interceptor.replaceFast(target, module.hot);
    Interceptor.flush();
    Interceptor.revert(target);
    Interceptor.flush();
    took.push(now() - begin);
}
took.sort((a, b) => a - b);
Interceptor.replaceFast(target, module.hot);
Interceptor.flush();
send(took[took.length >> 1]);
"""
ROUNDS = 100


def main(pid: int, offset: int, what: str) -> None:
    """Attach, say so, and stay until standard input ends."""
    session = frida.attach(pid)
    if what == "replace":
        script = session.create_script(REPLACEMENT % (offset, ROUNDS))
        script.on("message", lambda message, _: print("microseconds", message.get("payload"), flush=True))
    else:
        script = session.create_script(SCRIPT % ("#include <gum/guminterceptor.h>\n" + MODULES[what], offset))
    script.load()
    print("ready", flush=True)
    sys.stdin.read()
    session.detach()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2], 0), sys.argv[3])
