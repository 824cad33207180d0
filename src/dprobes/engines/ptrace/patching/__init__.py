"""
Live patches: functions of a running process replaced by functions of a shared object.

::

    PatchObject ──► ProcessSymbols ──► PlannedPatch ──► insert: one stop of all threads ──► PatchRecord in the process
      file           names             code and jump      map, write, protect, jump           remove: the file's bytes

No code of the process loads the object: the thread that would call the dynamic linker may have taken its locks.
dprobes maps memory by injected system calls, writes the object relocated, and then one jump of five bytes at the
function's entry. This write is in one page, so it is made as a whole or not at all. If dprobes is killed at any moment,
the process executes either the former function or the new one.

* A patch has no handler and needs no tracer: between insertion and removal, dprobes traces nothing.
* The memory of a patch stays mapped after its removal: a thread may be in it, and the program may have kept a pointer.
* A record in the process's own memory describes the patch, so any later run can list and remove it.
* Patches of one function are a stack: each calls the former one, or the original, and any of them can be removed.
"""
