"""
The inline engine: handlers run as machine code in the probed process, for the price of a function call.

::

    breakpoints placed ─► ShareMemory ─► memory mapped ─► code and jumps planned ─► PatchSites ─► jumps in their place
      tracer                client         tracer           client                                 tracer

The engine stands on ``ptrace``. A jump is a faster way from a breakpoint's place to the same handler; whatever a jump
is not good for is left to the breakpoint, and may come back to it at any time. The client plans and generates code,
for each process anew, since it has the files; the tracer maps memory, writes bytes and handles faults.

* A jump may displace several instructions, with a handler before each of them that is probed. Threads in the middle of
  what it overwrites go on in the copy, and faults in the copy are reported at the original. Such a jump waits until no
  signal handler returns there.
* Jumps for several programs are planned by the program that comes last, in its own memory, for all that is near. The
  tracer keeps all jumps whose code is there, and takes the latest ones that do what is needed after each change;
  handlers of programs that have ended are switched off in them. So the end of a program needs no plan.
* A handler runs before it is known whether its instruction completes, so a *trial* comes before it. Where one fails,
  the tracer makes the thread one that has run into the breakpoint, before it takes the thread's stop from the kernel.
* A handler that ends with ``exit N`` or ``skip`` writes so into a word of its context. The trampoline returns from the
  function, or stops the thread before the instruction, and the tracer does the rest.
* Handlers are the eBPF of ``bpf.lower``, translated by ``native``. Their maps are parts of one file in memory, which
  each process maps; the file is handed over through a socket that the process is made to create.
* A probepoint at a return has a piece of eBPF for each return instruction, and one for the entry if its handler asks
  for that. What is kept of a call is in a table of the process alone, which its child does not inherit.
* A signal handler may jump away from a handler in the process. What that has left, an entry of a ring or a claim of a
  state, is given up once each thread was seen outside of handlers.
* Handlers look at a word that the kernel changes when the client ends, so they need no clock for it.
* The tracer also lists in the process itself what it writes: the next run takes out what was left when tracer, client
  and restorer were killed together.
* Memory of a program that has ended is unmapped while others go on, once no thread can come back into it.
* Handlers make no system calls. The reader adds names and owners of threads to records, from ``/proc``; of threads
  that are there only for a moment the tracer tells.
* The C library of a process in a nested PID namespace has other ids of threads than we. The tracer writes both into
  the process before a thread runs.
* A call stack is found by a copy of the program's stack, which stands after the record, and is followed by the reader.
  Tables with stacks as keys are written by the reader and the tracer.
* Python does nothing for a single record: routines in eBPF, translated as handlers are, walk over entries, sort them
  by time and make packed records of them. What is younger than what may still come waits for the next reading.
* Where a process is attached to, breakpoints for which jumps will come are not written: so no thread dies of one if
  the tracer is killed meanwhile. A thread that has just mapped code waits for its jumps.
* While programs come and go there are breakpoints in the place of jumps, and all threads stand still. They go on when
  the jumps are back.
* Counts of probepoints are those of the tracer plus those in the shared memory. Variables, keyed tables and the hits
  of limits are there once. Each change of a cell is one instruction on both sides.
"""
