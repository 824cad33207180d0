"""
The eBPF engine: uprobes in every process that maps a file, with handlers that run in the kernel as BPF programs.

::

    files ─► plan of sites ─► bpf.lower ─► maps, programs, links ─► ring ─► EntryReader ─► HeldRecords ─► RecordBatch

``kernel`` is the engine's interface to the kernel. It finds the kernel's features by trial; tests can override the
results. No code checks the kernel's version. ``attach`` creates maps, BPF programs and links; ``read`` converts the
contents of the ring to events; ``inkernel`` probes the kernel itself and its modules, loaded or not.

* One BPF program with one link serves all sites of one definition in one file with the same placement. The attach
  cookie is the number of the probepoint. To remove single sites from a link, the others get a new link before the old
  one is closed.
* Short-lived processes that share this process' memory attach and detach uprobes, because the kernel fails to remove
  breakpoints for a task that is being killed.
* The code of a kernel module that is not loaded is read from its file. The kernel registers kprobes whenever it loads
  the module; a guard process removes them if dprobes is killed.
* BPF programs on the kernel's tracepoints delete the data about threads and processes that have ended (``tv``, the
  entries of calls).
* While one program replaces another, both are attached. One word in the maps of each decides to which program hits
  belong.
* Handlers record a process before they stop it for a core dump. If the processes that should resume it are killed, a
  guard process does.
* Log on success: a BPF program on the signal tracepoint reports faults, and the record of the faulting instruction is
  dropped.
* Scope: all processes, a cgroup, a user, or a process tree, which BPF programs on fork and exit keep up to date.
* Handlers measure their load and skip hits; the overload guard evaluates the measurements.
* Samplers and watchpoints are perf events. A few hardware breakpoints on all CPUs watch a module's memory; they are
  moved to the module's address in a process. A CPU that comes online gets new events.
* Decoding decides where a uprobe may be. ``target.code.uprobe_sites`` has the kernel's tables and finds a neighboring
  instruction where a hit is cheaper; ``target.module_outline`` finds files in which uretprobes are unsafe.
"""
