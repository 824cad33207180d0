"""
ptrace engine: breakpoints in the processes of one process tree, without privileges.

::

    dprobes run ──────────────── pipes ─────────────── tracer (own process, own session)
      client: files, symbols, output                     threads, breakpoints, handlers in Python
      parent of the command                              ptrace, /proc/PID/mem

The *tracer* stops threads, runs handlers, and writes and restores breakpoints. It reads neither files nor symbols. When
a process maps a new file, the tracer requests the *sites* in the file from the *client*. The process remains stopped
until the reply arrives, so libraries that are loaded later are probed from the start. The tracer detects mappings by a
breakpoint at the dynamic linker's ``_dl_debug_state``.

When the client exits or is killed, its pipe is closed; the tracer then restores all code and detaches. When the tracer
is killed, the kernel stops its exit (PTRACE_O_TRACEEXIT) until the client has restored the bytes. When a thread has
executed a breakpoint, the tracer corrects the instruction pointer before it waits for the stop, so that the thread can
continue without the tracer. With the inline engine, a third process, the restorer, outlives tracer and client. The
tracer reports breakpoints and jumps to the restorer before it writes them.

* Memory is compared with the file before a byte is written (MISMATCH, CONFLICT). Only a byte that the tracer wrote is
  restored.
* At a hit, the thread stops at the ``int3``, and each handler sees the registers saved there. Then the original
  instruction is emulated, or executed as a copy in an out-of-line slot, or in place with all other threads stopped.
  Then the records are emitted. An instruction that faults leaves no record, unless the program has ``logonfault =
  yes``.
* If a thread causes an error, such as a failed ptrace request, its process is detached, and the session continues.
* A system call that a stop interrupts continues to wait afterwards.
* System calls are injected between syscall stops. If the tracer is killed meanwhile, the thread returns through a
  signal frame to its original state.
* Counts and state belong to a probepoint, not to its definition. Counts and variables are in memory that the tracer
  writes and the client reads, so reading them does not delay the run.
* A tracer can serve several programs: the client has one conversation for each tracer, and one run for each program.
* Breakpoints belong to address spaces, not to processes: a fork copies them, a vfork child shares them, an execve
  discards them. Watchpoints belong to address spaces, too, but debug registers to threads.
* Semaphores of USDT probes are incremented after the first breakpoint that needs them was written, and decremented
  before the last one is removed. So if the tracer is killed, an incremented semaphore has a breakpoint in memory.
* Returns are probed at return instructions, and at jumps that may be tail calls. The return of a tail call is detected
  by a breakpoint at the return address. Data that a handler needs from the entry of the call is stored by frame, the
  address of the return address.
"""
