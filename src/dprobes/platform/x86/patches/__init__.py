"""
Jumps to trampolines in place of x86-64 instructions, and the displaced code.

Everything here is computed from bytes, addresses and mappings; no process is accessed. A jump replaces the instruction
itself, shares bytes with the next one (punned), displaces several (a window), or lies in dead bytes.

* Several instructions are safe to displace if no branch leads into their middle. ``branch_targets`` collects all
  possible targets: a superfluous target only rejects a usable plan, a missing one crashes a process.
* A context (signal frame, setjmp) saved in the middle may be resumed. So the jump's displacement contains trapping
    bytes where displaced instructions began, and the tracer moves threads that trap there into the copy.
* Each instruction of the displaced code is mapped to an original one, so that threads can be moved and addresses
  reported.
* Punned jumps rely on the bytes after them, so sites are placed from the highest address down.
* Each jump is decoded at its address before it is accepted. Tests compare displaced code with the original on an
  emulated processor.
"""
