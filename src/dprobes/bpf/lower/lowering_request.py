"""Input of the lowering: the probe definition, the kernel's abilities, the filter of hits, the record items."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from dprobes.record.log_record import Item
from dprobes.rpn.performance_counters import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.lower.state.handler_state import StateLayout
    from dprobes.bpf.map_layouts import CallTable
    from dprobes.target.kernel.traced_fields import TracedEvent

__all__ = [
    "ARGUMENT_REGISTERS",
    "Abilities",
    "CounterLayout",
    "Filter",
    "KeptEntry",
    "LoopForm",
    "Lowered",
    "MappedModule",
    "NestingLayout",
    "Placement",
    "PortFilter",
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
    """The mechanisms for backward jumps in an eBPF program, in order of preference."""

    MAY_GOTO = "may_goto"
    """The ``may_goto`` instruction (kernel commit 011832b97b31)."""
    ITERATOR = "iterator"
    """An open-coded number iterator (kernel commit 6018e1f407cc)."""
    CALLBACK = "bpf_loop"
    """A callback of ``bpf_loop``, which runs one step of the handler at each call (kernel commit e6f2dd0f8067)."""


class VmaLayout(NamedTuple):
    """
    Offsets, in bytes, of the members of kernel structures that describe a mapping.

    ``start``, ``pages`` (the first page in the file), ``flags`` and ``file`` are members of ``vm_area_struct``. The
    other members are reached from there: ``inode`` of ``file``, ``number`` and ``super_block`` of ``inode``, ``device``
    of ``super_block``.
    """

    start: int
    pages: int
    flags: int
    file: int
    inode: int
    number: int
    super_block: int
    device: int


class PagingLayout(NamedTuple):
    """
    Offsets, in bytes, of the members of kernel structures that show whether a user-space server delivers a page.

    ``end``, ``file`` and ``userfault`` (None if the kernel lacks it) are members of ``vm_area_struct``. The other
    members are reached from there: ``inode`` of ``file``, ``super_block`` of ``inode``, ``magic`` of ``super_block``.
    """

    end: int
    file: int
    userfault: int | None
    inode: int
    super_block: int
    magic: int


class NestingLayout(NamedTuple):
    """
    Offsets, in bytes, of the members of kernel structures that describe the uretprobes of a thread.

    ``mm`` and ``task`` are members of ``task_struct``. ``area`` of ``mm_struct`` points to a structure that contains,
    at offset ``trampoline``, the address that replaces return addresses. ``depth`` of ``uprobe_task`` is the number of
    pending returns.
    """

    mm: int
    area: int
    trampoline: int
    task: int
    depth: int


class TaskLayout(NamedTuple):
    """
    Offsets, in bytes, of the members of ``task_struct`` that are items of records.

    ``cred`` is a pointer to a structure with the real user id at ``uid``. The ids are ids in the initial namespaces.
    """

    tid: int
    pid: int
    name: int
    cred: int
    uid: int


class StackLayout(NamedTuple):
    """
    Offsets, in bytes, of the members of kernel structures from which the bottom of a user stack is computed.

    ``mm`` and ``base``, the register for thread-local data, are members of ``task_struct``. ``bottom`` of ``mm_struct``
    is the address at which the first stack of a process begins.
    """

    mm: int
    base: int
    bottom: int


class CounterLayout(NamedTuple):
    """
    The sources of performance counters, by their numbers in ``COUNTERS``.

    ``members`` are the offsets, in bytes, of the 64-bit members of ``task_struct`` whose sum is a counter. ``cells``
    are the counters that the CPUs count, in the order of their cells.
    """

    members: Mapping[int, tuple[int, ...]]
    cells: tuple[int, ...] = ()

    def has_event(self, number: int) -> bool:
        """Return True if a counter in ``cells`` is a perf event, or False if it is the clock."""
        return COUNTERS[number].name != "task-clock"


class Abilities(NamedTuple):
    """
    Abilities of the kernel, or of another host of handlers, that the lowering can use.

    * ``iterator``: the BTF ids of bpf_iter_num_new, _next and _destroy, which LoopForm.ITERATOR needs.
    * ``vma``: present if programs can look up the mapping at an address.
    * ``function_ip``: at a URETPROBE, a program can get the address of the function that returns.
    * ``nesting``: the offsets by which a program finds the pending returns of a thread.
    * ``stack``: the offsets by which a program finds the ends of stacks.
    * ``overrides_returns``: a program at a KPROBE can make the function return.
    * ``task``: the offsets by which a program reads the items of a thread, instead of one helper call for each item.
    * ``user``, ``paging``: in processes of the user id ``user``, handlers may wait for all memory that they read. In
      other processes they may wait only for memory that is certain to arrive, according to ``paging``.
    * ``counters``: the sources of the performance counters that a program can read.
    * ``small_states``: a handler that needs little state has it on its stack (``small_state``).
    * ``verified``: the kernel's verifier checks the code, which limits the contents of a small state.
    * ``polled``: the reader of the ring never sleeps, and counts the records itself. Handlers neither wake it nor count
      their output.
    * ``named_later``: the reader also adds the name and the user of a thread. Records have the ids that this needs.
    * ``copies_stacks``: an entry itself contains the data from which its call stacks are unwound (``stack_snapshot``).
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
    counters: CounterLayout | None = None


class Placement(Enum):
    """Kind of event at which a handler is called. It decides which registers the handler sees."""

    BREAKPOINT = "breakpoint"
    URETPROBE = "uretprobe"
    """After the return, with the registers of the caller."""
    RET_SITE = "ret"
    """At a return instruction, before it is executed. The handler sees the state after it."""
    EVENT = "event"
    """In a perf event: a watchpoint or a sampler."""
    KPROBE = "kprobe"
    """At an instruction of the kernel."""
    KRETPROBE = "kretprobe"
    """After the return of a function of the kernel, with the registers of its caller."""
    ENTRY = "ftrace"
    """At the beginning of a function of the kernel, by the call of ftrace for which the compiler has left room."""
    ENTRY_RETURN = "ftrace return"
    """After the return of a function that is probed as for ENTRY."""
    FENTRY = "fentry"
    """At the beginning of a function of the kernel, by a BPF trampoline. Only its arguments are available."""
    FEXIT = "fexit"
    """After a function of the kernel, by a BPF trampoline. Only its arguments and its return value are available."""
    MODIFY_RETURN = "fmod_ret"
    """As FENTRY, but the function is executed only if the program returns 0."""
    TRACEPOINT = "tracepoint"
    """At a tracepoint of the kernel, or a system call: fields are available, registers are not."""

    @property
    def is_in_kernel(self) -> bool:
        """True if the probed place is in the kernel's code."""
        kprobes = (Placement.KPROBE, Placement.KRETPROBE, Placement.ENTRY, Placement.ENTRY_RETURN)
        return self in kprobes or self.is_trampoline

    @property
    def is_trampoline(self) -> bool:
        """True if a BPF trampoline calls the handler: one program for each function."""
        return self in (Placement.FENTRY, Placement.FEXIT, Placement.MODIFY_RETURN)

    @property
    def is_return(self) -> bool:
        """True if the handler runs at the return of a function whose return address the kernel has replaced."""
        return self in (Placement.URETPROBE, Placement.KRETPROBE, Placement.ENTRY_RETURN)


class Filter(NamedTuple):
    """
    Filter of hits by process. A hit must match every condition that is given.

    ``processes`` requires membership in SCOPE. ``cgroup`` is a cgroup's id and its level in the hierarchy; processes of
    the cgroup and of its descendants match. ``uid`` is a user id. ``excluded`` is a process whose hits never count.
    """

    processes: bool = False
    cgroup: tuple[int, int] | None = None
    uid: int | None = None
    excluded: int | None = None


class MappedModule(NamedTuple):
    """
    Module as the kernel sees it in a mapping.

    ``files`` has the device and inode numbers of each of its copies, in the kernel's internal representation.
    ``segments`` has the file offsets of its executable segments in ascending order, each with the difference of link
    address and file offset.
    """

    files: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int], ...]


class PortFilter(NamedTuple):
    """
    Filter of hits at a port instruction whose port is in ``dx``: only ports from ``first`` to ``last`` count.

    ``count_size`` is the size in bytes of the register with the number of repetitions, or 0 if the instruction is not
    repeated. If that register is 0, there is no access.
    """

    first: int
    last: int
    count_size: int


class KeptEntry(NamedTuple):
    """
    Data that is stored from the entry of a call until its return: the time, and registers.

    Each register has a name, an index, and its distance from the stack pointer if it is in memory. ``nests`` is True if
    tail calls can enter a function again, with the same frame, before it has returned.
    """

    registers: tuple[tuple[str, int, int | None], ...] = ()
    nests: bool = False
    counters: tuple[int, ...] = ()
    """Performance counters by their index in ``COUNTERS``. COUNTER_UNREAD is the value if one could not be read."""

    @property
    def words(self) -> int:
        """The number of words besides the time: the registers, then the counters."""
        return len(self.registers) + len(self.counters)


class Watched(Enum):
    """The kinds of address of a watchpoint in the processes that map a module (MAPPERS)."""

    SYMBOL = "symbol"
    """A link address of the module: a hit counts where the module's load bias makes it the watched address."""
    NUMBER = "number"
    """The same address in each process."""


class Tables(NamedTuple):
    """Sizes of shared maps, all powers of two: number of states, CPUs, and entries of the probe table."""

    states: int = 64
    cpus: int = 64
    probes: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """
    Request for the code of one probe definition.

    * ``items`` are the header items of its records; ``wants_tid`` puts the thread id into ring entries.
    * ``probe`` is the index of its only probepoint, ``link`` the probepoint's link address, and ``moved`` the distance
      of the breakpoint from there. If ``probe`` is None, the index is in the attach cookie, and the rest is in the
      probe table.
    * ``symbols`` has link addresses by name. ``per_cpu`` has the address of the kernel's array of per-CPU offsets, and
      the set of the symbol addresses that are per-CPU.
    * ``namespace`` has the device and inode of the PID namespace whose ids records show, or is None for the initial
      namespace.
    * ``return_bytes`` is the number of bytes that a RET_SITE pops besides the return address.
    * ``note`` is the index of this handler's pair in NOTES; it is set if a hit does not count when its instruction
      faults.
    * ``extensions`` has the eBPF forms of the functions that ``callk`` may call: functions of a ``Composer``.
    * An EVENT has one probepoint (``probe``). With a ``module``, only events that interrupt the module's code count,
      and the event shows where the module is mapped. With ``watched``, only events of processes in MAPPERS count, and
      ``link`` is the link address of the watched data.
    * With ``replaceable``, another program can replace this one while it is attached. With ``replaces``, this program
      can itself replace another one (``session_switchover``).
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
    """Numbers of the keyed tables that all CPUs share. Other tables have values for each CPU."""
    return_bytes: int = 0
    wants_tid: bool = False
    note: int | None = None
    extensions: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    entry: KeptEntry | None = None
    """The data of the call's entry that a handler of a return has."""
    replaceable: bool = False
    replaces: bool = False
    in_kernel: bool = False
    """True if the probe program is for the kernel: addresses may be the kernel's, ``push u`` pushes user registers."""
    reads_kernel: bool = False
    """True if the handler is hit in user mode and in the kernel, and may read memory of both."""
    kernel_code: tuple[int, int] | None = None
    """Range of addresses (end excluded) of the kernel's code in which events count, or None for all code."""
    ports: PortFilter | None = None
    """Ports for which hits at a KPROBE count, or None for all ports."""
    follows_module: bool = False
    """True if a KPROBE is at every place where its module is loaded. Its address is then known only at the hit."""
    arguments: int = 0
    """Number of words that the function at a trampoline takes in registers."""
    traced: TracedEvent | None = None
    """The event of a TRACEPOINT."""
    shared: bool = False
    """True if the code becomes part of a BPF program with other handlers (``dispatch``). ``probe`` is None then."""
    load_limit: int | None = None
    """Nanoseconds of CPU time that handlers may take in a window before they are skipped (``Overload``), or None."""
    diverts: bool = False
    """True if a handler in a process may stop the thread or skip the function, which its trampoline then does."""
    keeps_stack: bool = False
    """True if the stack must be in memory at the end, for tests that read it."""


class Lowered(NamedTuple):
    """
    The eBPF code of a handler, as ``lower`` returns it.

    The origins of ``assembled`` are byte offsets of the encoded program, or -1 for instructions that belong to none.
    """

    assembled: Assembled
    state: StateLayout
    sleepable: bool
    word_size: Literal[4, 8]
