"""Registers are where the description of a target puts them, in however many files, or there is an error."""

from __future__ import annotations

import pytest

from dprobes.engines.gdb.stub_registers import RegisterPlace, parse_description
from dprobes.errors import EngineError

HEAD = b'<?xml version="1.0"?><!DOCTYPE target SYSTEM "gdb-target.dtd"><target>'
CORE = b"""<?xml version="1.0"?><!DOCTYPE feature SYSTEM "gdb-target.dtd">
<feature name="org.gnu.gdb.i386.core">
  <!-- <reg name="none" bitsize="32"/> -->
  <reg name="RAX" bitsize="64" type="int64"/>
  <reg name="eflags" bitsize="32" type="i386_eflags"/>
  <reg name="st0" bitsize="80" regnum="24"/>
  <reg name="fctrl" bitsize="32"/>
  <reg name="rip" bitsize="64" regnum="2"/>
</feature>"""


def described(**files: bytes) -> object:
    return parse_description(lambda name: files.get(name.replace(".", "_").replace("-", "_")))


def test_registers_lie_in_the_order_of_their_numbers() -> None:
    target = HEAD + b'<architecture>i386:x86-64</architecture><xi:include href="64bit-core.xml"/></target>'
    found = parse_description({"target.xml": target, "64bit-core.xml": CORE}.get)
    assert found is not None
    assert found.architecture == "i386:x86-64"
    assert found.registers == {
        "rax": RegisterPlace("rax", 0, 0, 8),
        "eflags": RegisterPlace("eflags", 1, 8, 4),
        "rip": RegisterPlace("rip", 2, 12, 8),
        "st0": RegisterPlace("st0", 24, 20, 10),
        "fctrl": RegisterPlace("fctrl", 25, 30, 4),
    }
    assert found.size == 34


def test_there_may_be_none() -> None:
    assert described() is None


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (b"<target>", "the stub's description 'target.xml' is not XML: no element found: line 1, column 8"),
        (
            b'<!DOCTYPE a [<!ENTITY b "cc">]><target>&b;</target>',
            "the stub's description 'target.xml' defines entities, which could be endless",
        ),
        (HEAD + b'<xi:include href="target.xml"/></target>', "the stub's description includes itself"),
        (HEAD + b'<xi:include href="b.xml"/></target>', "the stub's description includes 'b.xml', which there is not"),
        (
            HEAD + b'<reg name="a" bitsize="x"/></target>',
            "the stub's description has a register 'a' with bitsize 'x'",
        ),
        (
            HEAD + b'<reg name="a" bitsize="99999999"/></target>',
            "the stub's description has a register 'a' with bitsize '99999999'",
        ),
        (
            HEAD + b'<reg name="a" bitsize="8" regnum="-1"/></target>',
            "the stub's description has a register 'a' with regnum '-1'",
        ),
    ],
)
def test_bad_descriptions(target: bytes, problem: str) -> None:
    with pytest.raises(EngineError) as caught:
        described(target_xml=target)
    assert caught.value.message == problem
