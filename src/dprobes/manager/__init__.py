"""
Probe manager: a background process that owns engines, inserted programs, variables and sinks.

::

    dprobes insert ── PPDF ──► socket ─► server (a thread for each connection) ─► manager ─► runs.run_steps
                                 programs (a thread for each: attachment.poll()) ◄──┘
                                                   └► recorder ─► trace file, log targets (a thread and a bounded queue
                                                   for each)

Each user has one; root's is the system's. The client connects to it, and starts it if none is running.

* It accepts only compiled programs: the client preprocesses, parses and resolves. So the manager needs neither the
  preprocessor nor the user's files. It verifies programs by build ID and by instructions.
* One thread at a time changes programs; queries never wait. A slow log target delays nothing, and counts the records
  that it loses.
* It has a lock as long as it runs, so there is only one. All state is in the process: when it is killed, the kernel and
  the tracers remove the probepoints.
"""
