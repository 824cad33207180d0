"""
A process that goes through a probed instruction with registers and memory that are made up (``programs/puppet.c``).

What cannot be made up there is what the processor and the kernel alone set: the instruction pointer, ``cs``, ``ss``,
some flags, and who the process is.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from dprobes.bpf.asm.isa import Register
from dprobes.bpf.lower import Placement
from dprobes.bpf.lower.hosts.host import Host
from dprobes.bpf.lower.hosts.ptregs import REGISTER_OFFSETS
from dprobes.engines.ebpf.attach.handlers import load_handler
from dprobes.engines.ebpf.kernel.features import Features
from dprobes.engines.ebpf.kernel.links import attach_uprobes, uprobe_attach_type
from dprobes.target.elf.file import ElfFile
from dprobes.testing import PAGE, FakeContext
from ebpf_backend import EbpfRunner, Stage
from ebpf_world import write_name, write_words
from integration.ebpf.kernel import file_offset
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.bpf.lower import Lowered, Request
    from dprobes.engines.ebpf.kernel.bpfmaps import ArrayMap
    from dprobes.engines.ebpf.kernel.descriptors import Descriptors

__all__ = ["Puppet", "PuppetSite"]

_POPPED = {
    8: ("eax", "ebx", "ecx", "edx", "esi", "edi", "ebp", *(f"r{n}" for n in range(8, 16)), "esp"),
    4: ("eax", "ebx", "ecx", "edx", "esi", "edi", "ebp", "esp"),
}
"""The registers that the stub takes after the flags, in its order."""

_SELECTORS = {8: (0x33, 0x2B), 4: (0x23, 0x2B)}
"""``cs`` and ``ss`` of user code (arch/x86/include/asm/segment.h)."""

_FREE_FLAGS, _FIXED_FLAGS = 0xCD5, 0x202
"""The flags that code may set as it likes (no trap flag), and those that are always set: bit 1 and interrupts."""

_CLOSERS = 16
"""How many links are closed at the same time: the kernel waits long for each, but for all of them at once."""


class Puppet:
    """Own the process; leaving the context manager ends it. ``sites`` has an emulated and a stepped one in turns."""

    def __init__(self, program: Path) -> None:
        self.path = str(program)
        self._features = Features()
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.cpu = min(os.sched_getaffinity(self.pid))
        os.sched_setaffinity(self.pid, {self.cpu})
        addresses = [int(address, 16) for address in self._output.readline().split()]
        elf = ElfFile.open(program)
        first = file_offset(program, "first_site")
        offsets = [first + address - addresses[0] for address in addresses]
        self.sites = [PuppetSite(self, *each) for each in zip(range(len(addresses)), addresses, offsets, strict=True)]
        self.bias = addresses[0] - (elf.link_address(first) or 0)
        self._closers = ThreadPoolExecutor(_CLOSERS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closers.shutdown()
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT)

    def attach(self, program: int, offset: int, cookie: int) -> Descriptors:
        return attach_uprobes(program, self.path, [(offset, cookie)], self._features)

    def load(self, lowered: Lowered, placement: Placement, maps: dict[Any, int]) -> int:
        return load_handler(lowered, placement, maps, uprobe_attach_type(self._features), "a random program")

    def close_soon(self, links: Descriptors) -> None:
        self._closers.submit(links.close)

    def hit(self, site: int, registers: list[int], context: FakeContext) -> None:
        """Go through a site with these flags and registers, and the memory of the context."""
        pages = context._pages
        message = [struct.pack(f"={len(registers)}QII", *registers, site, len(pages))]
        for page, data in pages.items():
            message += (struct.pack("=QQ", page * PAGE, page in context._read_only), bytes(data))
        self._input.write(b"".join(message))
        self._input.flush()
        assert select.select([self._output], [], [], TIMEOUT)[0], "the puppet has stopped"
        assert self._output.read(1) == b"y", "the puppet cannot have this memory"


class PuppetSite(Stage):
    """Be one of the puppet's instructions as what programs are attached to."""

    def __init__(self, puppet: Puppet, number: int, address: int, offset: int) -> None:
        self.puppet = puppet
        self.number = number
        self.address = address
        self.offset = offset
        self.process = str(puppet.pid)
        self.runner = partial(_SiteRunner, self)

    def arrange(self, context: FakeContext, request: Request) -> None:
        cs, ss = _SELECTORS[context.architecture.word_size]
        context.set_value("cs", cs)
        context.set_value("ss", ss)
        context.set_value("eflags", context.value_of("eflags") & _FREE_FLAGS | _FIXED_FLAGS)
        if request.placement is Placement.BREAKPOINT:
            context.set_value("eip", self.address - request.moved)
        context.traced_fields.clear()  # a breakpoint is no tracepoint
        context.frames_in_kernel.clear()
        pid = self.puppet.pid
        context.ids |= {"pid": pid, "tid": pid, "uid": os.getuid(), "cpu": self.puppet.cpu}


class _SiteRunner(EbpfRunner):
    """Run handlers as programs on a uprobe at a site."""

    def __init__(self, site: PuppetSite, *arguments: Any, request: Request, **options: Any) -> None:
        context: FakeContext = arguments[2]
        bias, mask = site.puppet.bias, context.architecture.word_mask
        link = site.address - bias - (request.moved if request.placement is Placement.BREAKPOINT else 0)
        super().__init__(*arguments, request=replace(request, link=link), host=_host_of(context), **options)
        symbols = {name: address - bias & mask for name, address in context.symbols.items()}
        self._request = replace(self._request, symbols=symbols)
        self._site = site
        self._links: list[Descriptors] = []

    def _load(self, lowered: Lowered, scratch: ArrayMap) -> int:
        program = self._site.puppet.load(lowered, self._request.placement, self._descriptors(scratch))
        self._links.append(self._site.puppet.attach(program, self._site.offset, self._cookie))
        return program

    def _execute(self, program: int) -> None:
        context = self._context
        names = ("eflags", *_POPPED[context.architecture.word_size])
        # What the registers hold at a return is what they are told to; the handler sees the state behind it.
        told = struct.unpack("=21Q", self._registers())
        registers = [told[REGISTER_OFFSETS[name] // 8] for name in names]
        self._site.puppet.hit(self._site.number, registers, context)

    def __exit__(self, *exception: object) -> None:
        for links in self._links:
            self._site.puppet.close_soon(links)
        super().__exit__(*exception)


def _host_of(context: FakeContext) -> type[Host]:
    """Return a host that makes up what a test cannot know."""

    class PuppetHost(Host):
        def task(self) -> None:
            self._asm.mov(Register.R0, context.ids["task"])

        def time(self) -> None:
            self._asm.mov(Register.R0, context.ids["time"])

        def process_name(self) -> None:
            write_name(self._asm, context)

        def user_stack(self, area: int, work: int, log_mask: int, key: int | None = None) -> None:
            """Log the made-up stack: the snapshot of a real one has its own test (``test_user_stacks``)."""
            word_size = context.architecture.word_size if key is None else 8
            write_words(self._asm, context.frames_in_program, word_size)

        def override_return(self) -> None:
            """Let the function run: only the kernel's own can be skipped, in a program for a kprobe."""

        def stop_process(self) -> None:
            """Let the puppet go on: what comes of the stop is for other tests."""

    return PuppetHost
