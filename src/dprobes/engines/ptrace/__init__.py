"""
The ptrace engine: breakpoints in the processes of one process tree, without privileges.

::

    dprobes run ──────────────── pipes ─────────────── tracer (own process, own session)
      client: files, symbols, output                     threads, breakpoints, handlers in Python
      parent of the command                              ptrace, /proc/PID/mem

The *tracer* stops threads, runs handlers and keeps the target's code consistent. It is small and handles neither files
nor symbols. When a process maps a new file, the tracer asks the *client* for the *sites* in it. The process stays
stopped until the answer arrives, so libraries that are loaded later are probed. The tracer detects mappings by a
breakpoint on the linker's ``_dl_debug_state``.

When the client ends, its pipe is closed; the tracer then restores all code and detaches. When the tracer is killed,
the kernel stops its exit (PTRACE_O_TRACEEXIT) until the client has restored the bytes. When a thread has run into a
breakpoint, the tracer corrects its instruction pointer before it takes the stop from the kernel. The thread can then
continue without the tracer. With ``inline``, a third process, the restorer, outlives both; the tracer reports
breakpoints and jumps to it before it writes them.

* Memory is compared with the file before a byte is written (MISMATCH, CONFLICT), and only a byte that the tracer wrote
  is restored.
* At a hit the thread stops at the ``int3``, and handlers run from one saved state. Then the original instruction is
  emulated, or executed as a copy in an out-of-line slot, or in place with all other threads stopped. Then the records
  are emitted. An instruction that faults leaves no record, unless the program has ``logonfault = yes``.
* An error that a thread causes, such as a call that fails, ends the tracing of its process, not the session.
* A thread that is stopped while it waits in the kernel continues to wait afterwards.
* System calls in the target are made between syscall stops, over a signal frame that brings the thread back if the
  tracer dies.
* Counts and state belong to a probepoint, not to its definition. Counts and variables are in memory that the tracer
  writes and the client reads, so reading them does not delay the run.
* A tracer can serve several programs: the client has one conversation for each tracer, and one run for each program.
* Breakpoints belong to address spaces, not to processes: a fork copies them, a vfork child shares them, an execve
  discards them. Watchpoints belong to address spaces, too, but debug registers to threads.
* Semaphores of USDT probes are raised after the first breakpoint that needs them was written, and lowered before the
  last one is removed. After a crash, a semaphore that the tracer raised thus still has its breakpoint in memory.
* Returns are probed at return instructions, and at jumps that may be tail calls; a tail call's return is detected by a
  breakpoint at the return address. Data that a handler needs from the entry of the call is stored by frame: the address
  of the return address.
"""
