"""
Replacement of x86-64 instructions by jumps to trampolines, and the code that executes the displaced instructions.

All results are computed from bytes, addresses and mappings; no process is accessed. A jump replaces the probed
instruction alone, shares bytes with the next one (punned), displaces several instructions (a window), or lies in dead
bytes.

* Several instructions are safe to displace if no branch leads into their middle. ``branch_targets`` collects all
  possible targets. A superfluous target only rejects a usable plan, but a missing one crashes a process.
* A context (signal frame, setjmp) that was saved in the middle may be resumed. So the jump's displacement contains
  trapping bytes where displaced instructions began. The tracer moves threads that trap there into the copy.
* Each instruction of the displaced code has a corresponding original instruction. By this, threads are moved and
  addresses are reported.
* Punned jumps rely on the bytes after them, so jumps are placed from the highest address downwards.
* Each jump is decoded at its address before it is accepted. Tests compare displaced code with the original on an
  emulated processor.
"""
