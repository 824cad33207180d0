"""
Jumps to trampolines in place of x86-64 instructions, and the displaced code.

Everything here is computed from bytes, addresses and mappings; no process is touched. A jump is in the instruction
itself, a punned jump, over several instructions, or in dead bytes.

* Several instructions are safe to displace if no branch leads into their middle. ``branch_targets`` collects all
  possible targets: one too many costs a plan, one too few crashes a process.
* Contexts saved in the middle may be resumed. So where displaced instructions began, the distance of the jump has bytes
  that trap, and the tracer moves threads that stop there into the copy.
* Each instruction of the displaced code is mapped to an original one, so that threads can be moved and addresses
  reported.
* Punned jumps rely on the bytes after them, so sites are placed from the highest address down.
* Each jump is decoded in its place before it counts. Tests compare displaced code with the original on an emulated
  processor.
"""
