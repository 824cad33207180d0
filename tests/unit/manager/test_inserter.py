"""Files that several programs are for are held once, and only as long as they are the same."""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path

from dprobes.manager.inserter import HeldFiles, SharingSymbols
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import OWN_SYMBOLS


def test_a_file_that_was_not_changed_is_held_once(tmp_path: Path) -> None:
    copy = tmp_path / "program"
    copy.write_bytes(Path(sys.executable).read_bytes())
    symbols = SharingSymbols(OWN_SYMBOLS, HeldFiles())
    first = symbols.module_of(ElfFile.open(copy))
    assert symbols.module_of(ElfFile.open(copy)).elf is first.elf
    copy.write_bytes(copy.read_bytes()[:-1] + b"\xa5")  # of the same size, with the same build-id
    changed = symbols.module_of(ElfFile.open(copy))
    assert changed.elf is not first.elf
    assert symbols.module_of(ElfFile.open(copy)).elf is changed.elf


def test_a_file_is_given_up_with_its_last_user() -> None:
    files = HeldFiles()
    held = files.same(ElfFile.open(sys.executable))
    assert len(files._files) == 1
    del held
    gc.collect()
    assert len(files._files) == 0


def test_another_process_gets_the_provider_itself() -> None:
    assert pickle.loads(pickle.dumps(SharingSymbols(OWN_SYMBOLS, HeldFiles()))) == OWN_SYMBOLS
