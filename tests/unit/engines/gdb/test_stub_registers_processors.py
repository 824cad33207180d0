"""Each processor's registers are found in what stubs describe."""

from __future__ import annotations

import pytest

from dprobes.arch import ARCHITECTURE_NAMES, RegisterClass, architecture
from dprobes.engines.gdb.stub_registers import RegisterPlace, TargetDescription, processor_of, registers_of


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
def test_general_registers_are_among_those_that_nobody_describes(name: str) -> None:
    arch = architecture(name)
    processor = processor_of(arch)
    assert processor is not None
    found = registers_of(arch, processor, processor.default_description())
    lacking = {"pstate"} if name == "x" else {"mq", "dar", "dsisr", "cpuid"}
    lacking |= {f"arg{n}" for n in range(6)} | {f"acr{n}" for n in range(16)}
    wanted = {r.index for r in arch.registers if r.kind is RegisterClass.GENERAL and r.name not in lacking}
    if name == "x86_64":
        wanted -= {register.index for register in arch.registers if register.name == "eflags"}
        assert found[0x0C] == "eflags"
    assert wanted <= found.keys()
    for portable in ("pc", "sp"):
        register = arch.register(portable)
        assert register is not None
        assert found[register.index] == getattr(processor, portable)
    if processor.link:
        assert processor.link in processor.default_description().registers


def test_a_register_may_have_several_names() -> None:
    arch = architecture("aarch64")
    processor = processor_of(arch)
    assert processor is not None
    scalable = TargetDescription("aarch64", {"z3": RegisterPlace("z3", 37, 0, 256)})
    assert registers_of(arch, processor, scalable) == {0x43: "z3"}
    plain = TargetDescription("aarch64", {"v3": RegisterPlace("v3", 37, 0, 16)})
    assert registers_of(arch, processor, plain) == {0x43: "v3"}


def test_sizes_without_a_description() -> None:
    processor = processor_of(architecture("ppc64"))
    assert processor is not None
    description = processor.default_description()
    assert description.registers["f0"] == RegisterPlace("f0", 32, 256, 8)
    assert description.registers["pc"] == RegisterPlace("pc", 64, 512, 8)
    assert description.registers["cr"] == RegisterPlace("cr", 66, 528, 4)
