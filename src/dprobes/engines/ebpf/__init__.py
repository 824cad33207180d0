"""
The eBPF engine: breakpoints in every process that maps a file, with handlers that run in the kernel.

::

    files ─► plan of sites ─► bpf.lower ─► maps, programs, links ─► ring ─► EntryReader ─► HeldRecords ─► RecordBatch

``kernel`` is the engine's interface to the kernel; it finds the kernel's features by trial, where tests switch them
off. No code checks the kernel's version. ``attach`` creates what is attached, ``read`` turns the contents of the ring
into events, ``inkernel`` probes the kernel itself and its modules, which are loaded and unloaded.

* One program serves all sites of one definition in one file that are placed alike, with one link; the attach cookie is
  the number of the probepoint. To remove single sites from a link, the others get a new one before the old one is
  closed.
* Short-lived processes that share this process' memory attach and detach uprobes, because the kernel fails to remove
  breakpoints for a task that is being killed.
* The code of a kernel module before it is loaded is read from its file. The kernel registers kprobes whenever it loads
  a module; a guard process removes them if dprobes is killed.
* Data about a thread or a process (``tv``, the entries of calls) are deleted by programs on the kernel's tracepoints.
* While one program replaces another, both are attached, and a word of each decides for all handlers at once.
* Handlers record a process before they stop it for a core dump. A guard process, which is started before them, resumes
  the processes that no other process can resume any more.
* Log on success: a program on the signal tracepoint reports faults, and the record of the faulting instruction is
  dropped.
* Scope: all processes, a cgroup, a user, or a process tree, which small programs on fork and exit keep up to date.
* Handlers measure themselves and skip hits; the overload guard evaluates the measurements.
* Samplers and watchpoints are perf events. Few breakpoints on all CPUs watch a module's memory; they are moved to the
  module's address. A CPU that comes online gets new events.
* Decoding decides where a breakpoint may be: ``target.code.uprobe_sites`` has the kernel's tables and finds the cheap
  neighboring instruction, ``target.module_outline`` the programs that must not get a return trampoline.
"""
