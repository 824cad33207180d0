"""
Where a jump to a trampoline can take the place of an instruction of x86-64 code, and what is executed instead of it.

Everything here is computed from bytes, addresses and mappings; no process is touched. A jump stands in the instruction
itself, as a punned jump, over several instructions, or in dead bytes.

* Several instructions are safe to displace if nothing leads into their middle. ``branch_targets`` collects whatever
  may: a target too many costs a plan, one too few a process.
* Contexts that were saved there may be resumed. So where instructions began, the distance of the jump has bytes that
  trap, and the tracer leads threads that stop there into the copy.
* For each instruction of the displaced code it is known which original one it stands for, so that threads can be moved
  and addresses be reported.
* Punned jumps rely on the bytes that follow them, so sites are placed from the highest address down.
* Each jump is decoded in its place before it counts; displaced code is compared with the original on an emulated
  processor.
"""
