"""
Inline engine: handlers run as machine code in the probed process, at the cost of a function call.

::

    breakpoints placed ─► ShareMemory ─► memory mapped ─► code and jumps planned ─► PatchSites ─► jumps written
      tracer                client         tracer           client                                tracer

The engine extends ``ptrace``. A jump is a faster way to run the handler of a breakpoint. A probepoint for which a jump
is unsuitable keeps its breakpoint, and a jump may be replaced by the breakpoint again at any time. The client plans and
generates code for each process, because it has the files. The tracer maps memory, writes bytes and handles faults.

* A jump may displace several instructions, with a handler before each probed one. Threads in the middle of the
  overwritten code continue in the copy, and faults in the copy are reported at the original instruction. Such a jump
  waits until no signal handler returns to its place.
* Jumps for several programs are planned by the program that is inserted last, in its own memory, for all programs with
  instructions nearby. The tracer keeps all jumps whose code is mapped, and after each change writes the latest ones
  that serve all probepoints. Handlers of programs that have ended are switched off in them. So the end of a program
  needs no new plan.
* A handler runs before it is known whether its instruction completes, so a *trial* precedes it. If the trial fails, the
  tracer makes the thread look as if it had hit the breakpoint, before it reads the thread's stop from the kernel.
* A handler that ends with ``exit N`` or ``skip`` writes that to a word of its context. The trampoline returns from the
  function, or stops the thread before the instruction, and the tracer does the rest.
* Handlers are the eBPF of ``bpf.lower``, translated by ``native``. Their maps are parts of one file in memory, which
  each process maps. The tracer makes the process create a socket, through which the file's descriptor is passed.
* A probepoint at a return has a piece of eBPF for each return instruction, and one for the entry if its handler reads
  that. The entries of calls are in a table of the single process, which its child does not inherit.
* A signal handler may jump away from a handler in the process. An entry of a ring or a claim of a state that the
  handler has left behind is released once each thread was seen outside of handlers.
* Handlers read a word that the kernel changes when the client ends, so they need no clock to detect that.
* The tracer also lists its changes in the process itself: if tracer, client and restorer are killed together, the next
  run removes them.
* When one program has ended and others continue, its memory is unmapped once no thread can return to it.
* Handlers make no system calls. The reader adds the names and owners of threads to records, from ``/proc``; the tracer
  reports those of short-lived threads.
* In a nested PID namespace, threads have other ids for the C library than in the client's namespace. The tracer writes
  both ids into the process before a thread runs.
* For call stacks, handlers copy the program's stack after the record, and the reader unwinds the copy. The reader and
  the tracer, not handlers, write tables with stacks as keys.
* No Python code runs for each record: routines in eBPF, translated like handlers, walk over entries, sort them by time
  and pack them. Records younger than others that may still arrive wait for the next reading.
* In a process that is attached to, breakpoints that jumps will replace are not written. So no thread dies of one if the
  tracer is killed in between. A thread that has just mapped code waits for its jumps.
* While programs are inserted or removed, breakpoints replace the jumps, and all threads are stopped. They continue when
  the jumps are back.
* Counts of probepoints are the tracer's plus those in the shared memory. Variables, keyed tables and the hits for
  limits exist once. Each change of a cell is one instruction on both sides.
"""
