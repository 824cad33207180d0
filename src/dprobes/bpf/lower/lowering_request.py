"""What the lowering is asked for: the probe, the kernel's abilities, whose hits count, and what records carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.lower.state.handler_state import StateLayout
    from dprobes.bpf.map_layouts import CallTable
    from dprobes.target.kernel.traced_fields import TracedEvent

__all__ = [
    "ARGUMENT_REGISTERS",
    "Abilities",
    "Filter",
    "KeptEntry",
    "LoopForm",
    "Lowered",
    "MappedModule",
    "NestingLayout",
    "Placement",
    "Request",
    "StackLayout",
    "Tables",
    "TaskLayout",
    "VmaLayout",
    "Watched",
]

ARGUMENT_REGISTERS = ("edi", "esi", "edx", "ecx", "r8", "r9")
"""The registers in which functions of x86-64 take arguments, in their order."""


class LoopForm(Enum):
    """The ways in which a program may go back, the best one first."""

    MAY_GOTO = "may_goto"
    """The instruction; kernel commit 011832b97b31."""
    ITERATOR = "iterator"
    """An open-coded number iterator; kernel commit 6018e1f407cc."""
    CALLBACK = "bpf_loop"
    """The handler is a callback of ``bpf_loop`` that does a step each time; kernel commit e6f2dd0f8067."""


@dataclass(frozen=True, slots=True)
class VmaLayout:
    """
    Where the kernel has what it knows of a mapping, in bytes from the start of the structure.

    ``start``, ``pages`` (the first page in the file), ``flags`` and ``file`` are members of ``vm_area_struct``; from
    there it goes on by ``inode`` of ``file``, ``number`` and ``super_block`` of ``inode``, and ``device`` of
    ``super_block``.
    """

    start: int
    pages: int
    flags: int
    file: int
    inode: int
    number: int
    super_block: int
    device: int


@dataclass(frozen=True, slots=True)
class PagingLayout:
    """
    Offsets in bytes of the members of kernel structures that tell whether a user-space server delivers a page.

    ``end``, ``file`` and ``userfault`` (None: there is none) are members of ``vm_area_struct``; from there it goes on
    by ``inode`` of ``file``, ``super_block`` of ``inode``, and ``magic`` of ``super_block``.
    """

    end: int
    file: int
    userfault: int | None
    inode: int
    super_block: int
    magic: int


@dataclass(frozen=True, slots=True)
class NestingLayout:
    """
    Where the kernel has what it knows of the uretprobes of a thread, in bytes from the start of the structure.

    ``mm`` and ``task`` are members of ``task_struct``; ``area`` of ``mm_struct`` leads to what holds at ``trampoline``
    the address that stands for return addresses; ``depth`` of ``uprobe_task`` is how many returns are awaited.
    """

    mm: int
    area: int
    trampoline: int
    task: int
    depth: int


@dataclass(frozen=True, slots=True)
class TaskLayout:
    """
    Where ``task_struct`` has what records say of a thread, in bytes.

    ``cred`` leads to a structure that has the real user id at ``uid``. The ids are those of the initial namespaces.
    """

    tid: int
    pid: int
    name: int
    cred: int
    uid: int


@dataclass(frozen=True, slots=True)
class StackLayout:
    """
    Offsets in bytes of the members of kernel structures that tell where a stack ends.

    ``mm`` and ``base``, the register for thread-local data, are members of ``task_struct``; ``bottom`` of ``mm_struct``
    is where the first stack of a process begins.
    """

    mm: int
    base: int
    bottom: int


@dataclass(frozen=True, slots=True)
class Abilities:
    """
    What the kernel offers.

    ``iterator`` are the BTF ids of bpf_iter_num_new, _next and _destroy, which LoopForm.ITERATOR needs. ``vma`` is
    there if programs can find out what is mapped at an address. ``function_ip`` says that a program knows at a
    URETPROBE which function returns, ``nesting`` how it knows which returns are awaited, ``stack`` how it
    knows where stacks end. ``overrides_returns`` says that a program at a KPROBE can let a function return. With
    ``task`` a program reads of the thread what it would otherwise ask of a helper for each.

    In processes of ``user`` handlers may wait for all memory that they read, in others for that of which ``paging``
    tells that it comes.

    With ``small_states`` handlers that need little of a state have it on their stack (``small_state``), and with
    ``verified`` only such as the kernel's verifier takes. With ``polled`` nobody sleeps until a record comes, and who
    reads records counts them: handlers neither wake anybody nor count what they have put into the ring. With
    ``named_later`` that one also adds what a thread is called and whose it is: records have what it is found by. With
    ``copies_stacks`` an entry has in itself what its call stacks are found by (``stack_snapshot``); no other has.
    """

    loops: LoopForm = LoopForm.MAY_GOTO
    sleepable: bool = True
    writes_memory: bool = False
    writes_registers: bool = False
    iterator: tuple[int, int, int] = (0, 0, 0)
    vma: VmaLayout | None = None
    function_ip: bool = True
    overrides_returns: bool = False
    nesting: NestingLayout | None = None
    task: TaskLayout | None = None
    stack: StackLayout | None = None
    user: int = 0
    paging: PagingLayout | None = None
    small_states: bool = False
    verified: bool = True
    polled: bool = False
    calls: CallTable | None = None
    named_later: bool = False
    copies_stacks: bool = False


class Placement(Enum):
    """The ways in which a handler comes to run: they differ in what the registers show."""

    BREAKPOINT = "breakpoint"
    URETPROBE = "uretprobe"
    """After the return: the registers are those of the caller."""
    RET_SITE = "ret"
    """At a return instruction, which is still to be executed; the handler sees the state after it."""
    EVENT = "event"
    """In a perf event: a watchpoint or a sampler."""
    KPROBE = "kprobe"
    """At an instruction of the kernel."""
    KRETPROBE = "kretprobe"
    """After the return of a function of the kernel: the registers are those of its caller."""
    ENTRY = "ftrace"
    """Where a function of the kernel begins, by the call of ftrace that the compiler has left room for."""
    ENTRY_RETURN = "ftrace return"
    """After the return of such a function."""
    FENTRY = "fentry"
    """Where a function of the kernel begins, by a BPF trampoline: there are its arguments only."""
    FEXIT = "fexit"
    """After a function of the kernel, by a BPF trampoline: there are its arguments, and what it returns."""
    MODIFY_RETURN = "fmod_ret"
    """As FENTRY; the function is executed only if the program returns 0."""
    TRACEPOINT = "tracepoint"
    """At a tracepoint of the kernel, or a system call: there are no registers, but fields."""

    @property
    def is_in_kernel(self) -> bool:
        """Whether a place in the kernel's code is probed."""
        kprobes = (Placement.KPROBE, Placement.KRETPROBE, Placement.ENTRY, Placement.ENTRY_RETURN)
        return self in kprobes or self.is_trampoline

    @property
    def is_trampoline(self) -> bool:
        """Whether a BPF trampoline calls the handler: one program for each function."""
        return self in (Placement.FENTRY, Placement.FEXIT, Placement.MODIFY_RETURN)

    @property
    def is_return(self) -> bool:
        """Whether it is a return from a function, by a changed return address."""
        return self in (Placement.URETPROBE, Placement.KRETPROBE, Placement.ENTRY_RETURN)


@dataclass(frozen=True, slots=True)
class Filter:
    """
    Whose hits count; a hit must pass all that is given.

    ``processes`` asks for membership in SCOPE. ``cgroup`` is a cgroup's id and its level in the hierarchy: it and those
    below it count. ``excluded`` is a process whose hits never count.
    """

    processes: bool = False
    cgroup: tuple[int, int] | None = None
    uid: int | None = None
    excluded: int | None = None


@dataclass(frozen=True, slots=True)
class MappedModule:
    """
    A module as the kernel knows it where it is mapped.

    ``files`` are the numbers of device and inode of each of its copies, as the kernel has them inside. ``segments`` are
    the file offsets of its executable segments in ascending order, each with how much higher its link addresses are.
    """

    files: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class KeptEntry:
    """
    What is kept from the entry of a call to its return: the time, and registers.

    These are given by name and index, with their distance from the stack pointer if they lie in memory. ``nests`` says
    that a function may be entered again, with the same frame, before it has returned: by tail calls.
    """

    registers: tuple[tuple[str, int, int | None], ...] = ()
    nests: bool = False


class Watched(Enum):
    """What a watchpoint watches in the processes that map a module (MAPPERS)."""

    SYMBOL = "symbol"
    """A link address of the module: hits count where the module lies so that this is the watched address."""
    NUMBER = "number"
    """The same address in each of them."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The sizes of shared maps, all powers of two: states, CPUs, and entries of the probe table."""

    states: int = 64
    cpus: int = 64
    probes: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """
    The request for the code of one probe definition.

    ``items`` are those of its records. ``probe`` is the index of its only probepoint, ``link`` that one's link address
    and ``moved`` how far its breakpoint is from there; with ``probe`` None the attach cookie is the index and the table
    holds the rest. ``symbols`` are link addresses. ``per_cpu`` says where the kernel has the offset of each CPU's
    copies, and which of those addresses mean such copies. ``namespace`` is the device and inode of the PID namespace in
    which processes are to be named, None for the initial one. ``return_bytes`` is what a RET_SITE takes from the stack
    besides the return address. ``wants_tid`` puts the thread id into ring entries.
    ``note`` is given where a hit does not count if its instruction faults: the pair in NOTES that is this handler's.
    ``extensions`` are the eBPF forms of what ``callk`` may call: functions of a ``Composer``.

    An EVENT has one probepoint (``probe``). With a ``module`` only those events count that interrupt its code, which
    then says where it lies. With ``watched`` only those of processes in MAPPERS count, and ``link`` is the link address
    of what is watched.

    With ``replaceable`` another program can take the place of this one while it is attached, and with ``replaces`` it
    can take the place of another one (``session_switchover``).
    """

    items: Item = Item.MAJOR | Item.MINOR
    abilities: Abilities = field(default_factory=Abilities)
    placement: Placement = Placement.BREAKPOINT
    filter: Filter = field(default_factory=Filter)
    tables: Tables = field(default_factory=Tables)
    probe: int | None = 0
    link: int = 0
    module: MappedModule | None = None
    watched: Watched | None = None
    moved: int = 0
    symbols: Mapping[str, int] = field(default_factory=dict)
    per_cpu: tuple[int, frozenset[int]] = (0, frozenset())
    namespace: tuple[int, int] | None = None
    passcount: int = 0
    maxhits: int = 0
    vars: int = 0
    gvars: int = 0
    cvars: int = 0
    tvars: int = 0
    shared_tables: frozenset[int] = frozenset()
    """The numbers of the keyed tables that all CPUs share; the others have values for each of them."""
    return_bytes: int = 0
    wants_tid: bool = False
    note: int | None = None
    extensions: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    entry: KeptEntry | None = None
    """What a handler of a return knows of the entry."""
    replaceable: bool = False
    replaces: bool = False
    in_kernel: bool = False
    """Whether the program is about the kernel: addresses may be the kernel's, ``push u`` shows another context."""
    reads_kernel: bool = False
    """Whether a handler that is about programs may read the kernel's memory all the same: it interrupts anything."""
    kernel_code: tuple[int, int] | None = None
    """The addresses, the last one excluded, of the kernel's code in which an event counts; None: anywhere."""
    follows_module: bool = False
    """Whether a KPROBE is wherever its module is loaded, so that only the hit tells its address."""
    arguments: int = 0
    """How many words the function at a trampoline takes in registers."""
    traced: TracedEvent | None = None
    """What a TRACEPOINT is."""
    shared: bool = False
    """Whether the code becomes part of a program with other handlers (``dispatch``); ``probe`` is None then."""
    load_limit: int | None = None
    """
    Nanoseconds of a window that handlers may take of a CPU before they are skipped (``overload``); None: no guard.
    """
    diverts: bool = False
    """Whether a handler in a process may stop the thread, or skip the function, which its trampoline sees to."""
    keeps_stack: bool = False
    """Whether the stack is in memory at the end: for tests that look at it."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """
    The code of a handler.

    The origins of ``assembled`` are byte offsets of the encoded program, -1 where an instruction belongs to none.
    """

    assembled: Assembled
    state: StateLayout
    sleepable: bool
    word_size: Literal[4, 8]
