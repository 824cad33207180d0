"""
A function of the kernel, called with chosen arguments, as what random programs are attached to.

The other registers are what the kernel makes of them, so programs read these only.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import Register as BpfRegister
from dprobes.bpf.lower import Placement, Request
from dprobes.bpf.lower.hosts.place_hosts import KernelHost
from dprobes.engines.ebpf.attach.handler_objects import load_handler
from dprobes.engines.ebpf.kernel.bpf_links import attach_kernel, kernel_attach_type
from dprobes.rpn.instruction_set import OperandKind
from dprobes.target.kernel.running_kernel import RunningKernel
from support.case_format import Target, parse_case
from support.case_interpreter import check_compiled_case, compile_case, context_of, is_compiled_case
from support.differential_runs import HERE, Demand, program_agrees
from support.ebpf_abilities import loop_forms
from support.ebpf_backend import EbpfRunner, Stage
from support.ebpf_world import NotMappableError, memory_of, write_counter, write_name, write_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.arch import Register
    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower import Lowered
    from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, Descriptors
    from dprobes.rpn.instruction_set import Row
    from dprobes.testing import FakeContext
    from support.case_format import Case

__all__ = ["agreed", "agreed_cases", "covering_cases", "possible_cases"]

FUNCTION = "process_vm_rw"
"""
It has six arguments in registers, and refuses all flags, its last one of these, before it does anything.

The first one is a ``pid_t``: nothing arrives of the high half of its register.
"""

_SYS_PROCESS_VM_READV = 310
_ARGUMENTS = ("edi", "esi", "edx", "ecx", "r8", "r9")
_READABLE = frozenset({*_ARGUMENTS, "eip"})
_NOT_HERE = ("push u", "push tp", "log kstack", "vfyr", "push elapsed, <counter>")
"""Instructions that need a user context, a tracepoint, a stack, mappings, or counters read at a call's entry."""

_TARGET = Target("x86_64", 8, "little")

_libc = ctypes.CDLL(None, use_errno=True)


class KernelDemand(Demand):
    """Allow what does not depend on where in the kernel the handler runs."""

    def allows(self, row: Row, register: Register | None, stage: Stage = HERE) -> bool:
        """Return whether an instruction may occur."""
        if row.syntax.startswith(_NOT_HERE):
            return False
        if register is not None and (register.name not in _READABLE or not row.syntax.startswith("push r")):
            return False
        return super().allows(row, register, stage)


class KernelSite(Stage):
    """The first instruction of the function."""

    def __init__(self) -> None:
        self.address = RunningKernel().symbol(FUNCTION, "", is_code=True).address
        self.cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {self.cpu})
        self.runner = partial(_SiteRunner, self)

    def arrange(self, context: FakeContext, request: Request) -> None:
        """Put into a made-up world who we are, and what cannot be an argument."""
        context.set_value("eip", self.address)
        context.set_value("r9", context.value_of("r9") | 1)
        pid = os.getpid()
        context.ids |= {"pid": pid, "tid": pid, "uid": os.getuid(), "cpu": self.cpu}


class _SiteRunner(EbpfRunner):
    """Run handlers as programs on a kprobe at a site."""

    def __init__(
        self, site: KernelSite, *arguments: Any, request: Request, are_made_up: bool = False, **options: Any
    ) -> None:
        context: FakeContext = arguments[2]
        host = _host_of(context)
        super().__init__(*arguments, request=request, host=_nobody(context, host) if are_made_up else host, **options)
        self._site = site
        self._links: list[Descriptors] = []

    def _load(self, lowered: Lowered, scratch: ArrayMap) -> int:
        placement = self._request.placement
        maps = self._descriptors(scratch)
        program = load_handler(lowered, placement, maps, kernel_attach_type(placement), "a random program")
        self._links.append(attach_kernel(program, [(self._site.address, self._cookie)], placement))
        return program

    def _execute(self, program: int) -> None:
        arguments = [ctypes.c_ulong(self._context.value_of(name)) for name in _ARGUMENTS]
        with memory_of(self._context):
            _libc.syscall(_SYS_PROCESS_VM_READV, *arguments)

    def __exit__(self, *exception: object) -> None:
        for links in self._links:
            links.close()
        super().__exit__(*exception)


def _host_of(context: FakeContext) -> type[KernelHost]:
    """Return a host that makes up what a test cannot know."""

    class SiteHost(KernelHost):
        def task(self) -> None:
            self._asm.mov(BpfRegister.R0, context.ids["task"])

        def time(self) -> None:
            self._asm.mov(BpfRegister.R0, context.ids["time"])

        def process_name(self) -> None:
            write_name(self._asm, context)

        def counter(self, number: int, room: tuple[BpfRegister, int], unread: Label) -> None:
            write_counter(self._asm, context, number, unread)

        def override_return(self) -> None:
            pass

        def user_stack(self, area: int, work: int, log_mask: int, key: int | None = None) -> None:
            word_size = context.architecture.word_size if key is None else 8
            write_words(self._asm, context.frames_in_program, word_size)

    return SiteHost


def _nobody(context: FakeContext, base: type[KernelHost]) -> type[KernelHost]:
    """Return a host that makes up who is hit, too."""

    class NobodyHost(base):  # type: ignore[misc, valid-type]
        def _answer(self, name: str) -> None:
            self._asm.mov(BpfRegister.R0, context.ids[name])

        def pid(self) -> None:
            self._answer("pid")

        def tid(self) -> None:
            self._answer("tid")

        def uid(self) -> None:
            self._answer("uid")

        def cpu(self) -> None:
            self._answer("cpu")

        def global_pid(self) -> None:
            self._answer("pid")

        def global_tid(self) -> None:
            self._answer("tid")

    return NobodyHost


def agreed(start: int, rounds: int) -> dict[str, int]:
    """Compare random programs with the interpreter, in the guest; return how many were specified, by their kind."""
    site = KernelSite()
    count = {"defined": 0, "wild": 0}
    for seed in range(start, start + rounds):
        request = Request(probe=2, in_kernel=True, placement=Placement.KPROBE)
        demand = KernelDemand(loop_forms()[seed % len(loop_forms())], sleepable=False, request=request)
        for kind in count:
            count[kind] += program_agrees(seed, "x86_64", kind, demand, site, is_extreme=seed % 3 == 0)
    return count


def possible_cases(paths: Iterable[str]) -> list[str]:
    """Return the files of those cases that can be run at the function."""
    return [path for path in paths if _TARGET in (case := _case(path)).targets and _is_possible(case, _TARGET)]


def covering_cases(paths: Iterable[str]) -> list[str]:
    """Return a few of the cases in which each instruction occurs that occurs in any."""
    left = {path: _rows_of(path) for path in paths}
    wanted, chosen = set().union(*left.values()), list[str]()
    while wanted:
        chosen.append(max(left, key=lambda path: len(left[path] & wanted)))
        wanted -= left[chosen[-1]]
    return chosen


def _rows_of(path: str) -> frozenset[str]:
    program, _ = compile_case(_case(path), _TARGET)
    assert program is not None
    return frozenset(each.row.syntax for code in program.bodies() for each in code.instructions)


def agreed_cases(paths: Sequence[str]) -> tuple[int, list[str]]:
    """Run the cases in files at the function, in the guest; return how many there were, and those that differ."""
    site = KernelSite()
    count, differing = 0, []
    for path in paths:
        request = Request(probe=2, in_kernel=True, placement=Placement.KPROBE, link=site.address)
        runner = partial(_SiteRunner, site, sleepable=False, request=request, are_made_up=True)
        count += 1
        try:
            check_compiled_case(_case(path), _TARGET, runner, loop_forms()[:1])
        except NotMappableError:
            count -= 1
        except AssertionError as error:
            differing.append(f"{path}: {error}")
    return count, differing


def _case(path: str) -> Case:
    return parse_case(Path(path), path)


def _is_possible(case: Case, target: Target) -> bool:
    """Return whether a case asks for nothing that the function cannot be given: its flags have to be some."""
    if not is_compiled_case(case, target):
        return False
    program, _ = compile_case(case, target)
    assert program is not None
    if context_of(case, target).value_of("edi") >> 32:
        return False
    allows = KernelDemand(sleepable=False).allows
    x86 = architecture("x86_64")
    for code in program.bodies():
        for instruction in code.instructions:
            operand = instruction.operand
            if instruction.row.syntax == "exit <code>" and operand:
                return False  # the current task, which is this very process, would be stopped
            if instruction.row.syntax.startswith("push elapsed"):
                return False  # nobody has seen the entry, whose time is to be chosen
            is_register = instruction.row.operand_kind is OperandKind.REGISTER and isinstance(operand, (int, str))
            register = x86.register(operand) if is_register else None  # type: ignore[arg-type]
            if not allows(instruction.row, register) or (register is not None and register.name in ("r9", "eip")):
                return False
    return True
