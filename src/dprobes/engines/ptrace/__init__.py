"""
The ptrace engine: breakpoints in the processes of one process tree, without privileges.

::

    dprobes run ──────────────── pipes ─────────────── tracer (own process, own session)
      client: files, symbols, output                     threads, breakpoints, interpreter
      parent of the command                              ptrace, /proc/PID/mem

The *tracer* stops threads, runs handlers and keeps the target's code right. It is small and knows neither files nor
symbols. When a process maps a new file, the tracer asks the *client* for the *sites* in it, and the process stands
still until the answer comes: so libraries that are loaded later are probed. The tracer learns of mappings from a
breakpoint on the linker's ``_dl_debug_state``.

When the client disappears, its pipe ends; the tracer then restores all code and detaches. When the tracer is killed,
the kernel holds it at its end (PTRACE_O_TRACEEXIT) until the client has restored the bytes. The tracer puts a thread
that has run into a breakpoint right before it takes the thread's stop from the kernel, so that the thread can go on
alone. A third process, the restorer, outlives both; the tracer tells it of breakpoints and jumps before it writes
them.

* Memory is compared with the file before a byte is written (MISMATCH, CONFLICT), and only a byte that is still ours is
  restored.
* A hit: the thread stops at the ``int3``; handlers run from one saved state; then the original instruction is
  emulated, or executed as a copy in an out-of-line slot, or in its place with all other threads stopped; then the
  records are emitted. An instruction that faults leaves no record, unless the program has ``logonfault = yes``.
* What a thread brings about, such as calls that fail, ends the tracing of its process, not the session.
* A thread that is stopped while it waits in the kernel goes on waiting.
* System calls in the target are made between syscall stops, over a signal frame that brings the thread back if the
  tracer dies.
* A probepoint has counts and a state, not the definition. Counts and variables are in memory that the tracer writes
  and the client reads, so looking at a run costs it nothing.
* A tracer has several programs: the client has one conversation for a tracer, and a run for each program.
* Address spaces own breakpoints, not processes: a fork copies them, a vfork child shares them, an exec ends them.
  Watchpoints belong to address spaces, too, but debug registers to threads.
* Semaphores of USDT probes are raised after the first breakpoint that needs them was written, and lowered before the
  last one goes. So a breakpoint that is found after a crash means that its semaphore is raised.
* A return is found where it happens: at return instructions, and at jumps that may be tail calls, whose return is
  awaited at the return address. What a handler asks of the entry of the call is kept by its frame, the address of the
  return address.
"""
