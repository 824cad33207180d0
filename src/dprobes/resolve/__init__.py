"""
Resolution: from a program and the files of its module, or the kernel, to probepoints.

``probed_space`` has the kinds of targets of a program, and ``local_module`` combines the other modules. Each kind of
probepoint has a function that finds it, in ``breakpoints`` (with returns), ``usdt_probes`` or ``codeless_probes``;
those of kernels are in ``kernel_places``. A new kind needs a member of ``ProbeKind``, a class for its own data, and
such a function.
"""
