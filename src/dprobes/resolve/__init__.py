"""
Resolution: a program against the files of its module, or the kernel, gives probepoints.

``probed_space`` says what a program is about, and ``local_module`` puts the rest together. Each kind of probepoint has
a function that finds it, in ``breakpoints`` (with returns), ``usdt_probes`` or ``codeless_probes``; those of kernels
are in ``kernel_places``. A new kind is a member of ``ProbeKind``, the data that only it has, and such a function.
"""
