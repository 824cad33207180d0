"""A puppet whose instructions random programs are attached to, as uprobes."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dprobes.bpf.bpf_instructions import Register
from dprobes.bpf.lower import Placement
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.engines.ebpf.attach.handler_objects import load_handler
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.kernel_features import Features
from dprobes.target.elf.elf_file import ElfFile
from integration.ebpf.kernel import file_offset
from integration.puppet_process import FIXED_FLAGS, FREE_FLAGS, SELECTORS, TAKEN, PuppetProcess
from support.ebpf_backend import EbpfRunner, Stage
from support.ebpf_world import write_counter, write_name, write_words

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.bpf.bpf_assembler import Label
    from dprobes.bpf.lower import Lowered, Request
    from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, Descriptors
    from dprobes.testing import FakeContext

__all__ = ["Puppet", "PuppetSite"]

_CLOSERS = 16
"""How many links are closed at the same time: the kernel waits long for each, but for all of them at once."""


class Puppet(PuppetProcess):
    """Own the process; leaving the context manager ends it. ``sites`` has emulated and stepped ones in turns."""

    def __init__(self, program: Path) -> None:
        super().__init__(program)
        self._features = Features()
        elf = ElfFile.open(program)
        first = file_offset(program, "first_site")
        addresses = self.addresses
        offsets = [first + address - addresses[0] for address in addresses]
        self.sites = [PuppetSite(self, *each) for each in zip(range(len(addresses)), addresses, offsets, strict=True)]
        self.bias = addresses[0] - (elf.link_address(first) or 0)
        self._closers = ThreadPoolExecutor(_CLOSERS)

    def __exit__(self, *exception: object) -> None:
        self._closers.shutdown()
        super().__exit__(*exception)

    def attach(self, program: int, offset: int, cookie: int) -> Descriptors:
        return attach_uprobes(program, self.path, [(offset, cookie)], self._features)

    def load(self, lowered: Lowered, placement: Placement, maps: dict[Any, int]) -> int:
        return load_handler(lowered, placement, maps, uprobe_attach_type(self._features), "a random program")

    def close_soon(self, links: Descriptors) -> None:
        self._closers.submit(links.close)


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
        cs, ss = SELECTORS[context.architecture.word_size]
        context.set_value("cs", cs)
        context.set_value("ss", ss)
        context.set_value("eflags", context.value_of("eflags") & FREE_FLAGS | FIXED_FLAGS)
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
        names = TAKEN[context.architecture.word_size]
        # What the registers hold at a return is what they are told to; the handler sees the state behind it.
        told = struct.unpack("=21Q", self._registers())
        registers = [told[REGISTER_OFFSETS[name] // 8] for name in names]
        self._site.puppet.hit(self._site.number, registers, context._pages, context._read_only)

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

        def counter(self, number: int, room: tuple[Register, int], unread: Label) -> None:
            write_counter(self._asm, context, number, unread)

        def user_stack(self, area: int, work: int, log_mask: int, key: int | None = None) -> None:
            """Log the made-up stack: the snapshot of a real one has its own test (``test_user_stacks``)."""
            word_size = context.architecture.word_size if key is None else 8
            write_words(self._asm, context.frames_in_program, word_size)

        def override_return(self) -> None:
            """Let the function run: only the kernel's own can be skipped, in a program for a kprobe."""

        def note_stop(self, refused: Label) -> None:
            """Note nothing, as nobody is stopped."""

        def stop_process(self) -> None:
            """Let the puppet go on: what comes of the stop is for other tests."""

    return PuppetHost
