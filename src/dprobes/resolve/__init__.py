"""
Resolution: finds the probepoints of a probe program in the files of its module, or in the kernel.

``probepoints`` has the kinds of targets of a program, and ``local_module`` combines the other modules. Each kind of
probepoint has a function that finds it, in ``breakpoints`` (with returns), ``usdt_probes`` or ``codeless_probes``;
those of kernels are in ``kernel_places``. A new kind needs a member of ``ProbeKind``, a class for its own data, and
such a function.
"""
