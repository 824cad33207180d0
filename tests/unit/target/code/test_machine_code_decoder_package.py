"""The decoder's package, made without its modules of names, is to everybody the package that it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARED = "from dprobes.target.code.machine_code import prepare_decoder; prepare_decoder();"


def _printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_name_imports_what_it_needs_only() -> None:
    code = "from iced_x86 import Decoder, FlowControl; import sys"
    names = "print(*sorted(name for name in sys.modules if name.startswith('iced_x86')))"
    assert _printed(f"{PREPARED} {code}; {names}") == "iced_x86 iced_x86.FlowControl iced_x86._iced_x86_py\n"


@pytest.mark.parametrize(
    "code",
    [
        "from iced_x86 import Decoder, FlowControl; print(Decoder(64, b'\\x55').decode(), FlowControl.CALL)",
        "import iced_x86; print(iced_x86.Mnemonic.PUSH, iced_x86.Code_, iced_x86.__all__, iced_x86.__file__)",
        "import iced_x86.Register as r; print(r.RAX, r.__name__)",
        "from iced_x86 import *; print(Mnemonic.PUSH, Decoder, FlowControl, sorted(dir()))",
        "import iced_x86, importlib; print(importlib.reload(iced_x86).Code.NOPD)",
        "import iced_x86; print(hasattr(iced_x86, 'nothing'), hasattr(iced_x86, '__nothing__'))",
    ],
)
def test_all_names_are_those_of_the_package(code: str) -> None:
    found = _printed(f"{PREPARED} del prepare_decoder; {code}")
    assert found == _printed(code)
    assert found


def test_without_room_for_it_there_is_a_memory_error() -> None:
    code = """
import mmap, resource
from dprobes.target.code.machine_code import prepare_decoder
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))
try:
    prepare_decoder()
except MemoryError:
    print("there is no memory")
"""
    assert _printed(code) == "there is no memory\n"
