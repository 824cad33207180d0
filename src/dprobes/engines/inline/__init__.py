"""
Inline engine: handlers run as machine code in the probed process, at the cost of a function call.

::

    breakpoints placed ─► ShareMemory ─► memory mapped ─► code and jumps planned ─► PatchSites ─► jumps written
      tracer                client         tracer           client                                tracer

The engine extends ``ptrace``: a jump is a faster way to run the handler of a breakpoint. A probepoint for which a jump
is unsuitable keeps its breakpoint, and the tracer may replace a jump by the breakpoint at any time. The client plans
and generates code for each process, because it has the files. The tracer maps memory, writes bytes and handles faults.

* A jump may displace several instructions, with a handler before each probed one. Threads in the middle of the
  overwritten code continue in the copy, and faults in the copy are reported at the original instruction. Such a jump
  is written only when no signal handler returns to the overwritten code.
* Jumps for several programs are planned by the program that is inserted last, in its own memory, for all programs with
  instructions nearby. The tracer keeps all jumps whose code is mapped. After each change it writes the latest jumps
  that serve all probepoints, in which the handlers of ended programs are switched off. So the end of a program needs no
  new plan.
* A handler runs before its instruction, so a *trial* before the handler tests whether the instruction will complete. If
  the trial fails, the thread stops. The tracer sets its registers as at a breakpoint, and handles the hit.
* A handler that ends with ``exit N`` or ``skip`` writes this ending to a word of its context. The trampoline returns
  from the function, or stops the thread before the instruction, and the tracer carries out the ``exit``.
* Handlers are the eBPF of ``bpf.lower``, translated by ``native``. Their maps are parts of one file in memory, which
  each process maps. The tracer makes the process create a socket, through which the file's descriptor is passed.
* A probepoint at a return has a piece of eBPF for each return instruction, and one for the function's entry if its
  handler reads registers at the entry. The entries of calls are in a table of the process, which a forked child does
  not inherit.
* A signal handler may leave a handler in the process by siglongjmp(3). A ring entry or a claim of a state that the
  handler has not released is released when each thread was seen outside of handlers.
* Handlers read the life mark, a word that the kernel changes when the client ends.
* The tracer also lists its changes in a manifest in the process itself: if tracer, client and restorer are all killed,
  the next run removes the changes.
* When one program has ended and others continue, its memory is unmapped as soon as no thread can return to it.
* Handlers make no system calls, except to stop a process. The reader adds the names and user ids of threads to records,
  from ``/proc``; the tracer reports those of short-lived threads.
* In a nested PID namespace, threads have other ids for the C library than in the client's namespace. The tracer writes
  both ids into the process before a thread runs.
* For call stacks, handlers copy the thread's stack after the record, and the reader unwinds the copy. The reader and
  the tracer, not handlers, write tables with stacks as keys.
* No Python code runs for each record: routines in eBPF, translated like handlers, walk over entries, sort them by time
  and pack them. If older records may still arrive, a record waits for the next reading.
* In a process that ran before it was attached to, breakpoints that jumps will replace are not written: if the tracer
  were killed, a breakpoint would kill a thread. A thread that has just mapped code waits for its jumps.
* While programs are inserted or removed, breakpoints replace the jumps, and all threads are stopped. They continue when
  the jumps are written again.
* Counts of probepoints are the sum of the tracer's and of those in the shared memory. Variables, keyed tables and the
  numbers of hits for limits exist once; handlers and the tracer change them by atomic instructions.
"""
