"""
What instructions do that only move numbers: as data, for those who carry them out in the processor's place.

Known are those that functions begin with, of processors whose programs are probed behind a stub. x86 is elsewhere
(``engines.x86.plan``). Of an instruction that is not known nothing is said.
"""
