"""
Resolution: a program against the files of its module gives probepoints.

``resolution`` puts them together. Each kind of probepoint has a module that finds it: ``breakpoints`` (with returns),
``watchpoints``, ``samplers``. A new kind (a USDT marker, say) is a member of ``ProbeKind``, the data that only it has,
and a module here. ``spaces`` says what a program is about; places in kernels and kernel modules are to be found by one
more module here, behind ``Space.KERNEL``.
"""
