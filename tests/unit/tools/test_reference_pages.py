"""The generated pages of the reference: every error has an anchor, every capability a row, every message a place."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes import errors
from dprobes.engines.engine_capabilities import Capability
from dprobes.engines.engine_registry import rows
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.instruction_set import ExceptionCode

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading of the third level."""
    parts = re.split(r"^### (.+)\n", (REFERENCE / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def error_classes() -> list[str]:
    found = [getattr(errors, name) for name in errors.__all__]
    return [each.__name__ for each in found if isinstance(each, type) and each is not errors.DprobesError]


@pytest.mark.parametrize(
    "name",
    [
        *error_classes(),
        *(state.value for state in ProbeState if state.is_obstacle),
        *(code.name for code in ExceptionCode),
    ],
)
def test_every_error_has_a_section_with_cause_and_remedy(name: str) -> None:
    text = sections("errors.md")[name]
    assert re.search(r"^\* Cause: \S", text, re.MULTILINE)
    assert re.search(r"^\* Remedy: \S", text, re.MULTILINE)


def test_the_support_matrix_has_a_row_for_each_capability_with_a_cell_for_each_engine() -> None:
    table = (REFERENCE / "support.md").read_text().split("## Capabilities\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    engines = [row.name for row in rows()]
    assert ["a program with", *(f"`{name}`" for name in engines)] == cells[0]
    assert [capability.value for capability in Capability] == [row[0] for row in cells[1:]]
    ptrace = {row[0]: row[1 + engines.index("ptrace")] for row in cells[1:]}
    assert ptrace["writing registers"] == "yes"
    assert ptrace["sampler probes"] == "no"


def test_messages_are_read_from_calls_with_their_hints() -> None:
    catalogue = tool("message_catalogue")
    source = """
raise TargetError(f"'{path}' has no symbol '{name}'", hint="use --sym")
diagnostics.error(span, "no such thing")
self.diagnostics.warning(span, f"{n} things", hint=f"write {other}")
raise EngineError(message)
raise ValueError("not ours")
"""
    found = [(each.kind, each.text, each.hint, each.anchor) for each in catalogue.messages_of(source)]
    expected = [
        ("TargetError", "'…' has no symbol '…'", "use --sym", "has-no-symbol"),
        ("SourceError", "no such thing", "", "no-such-thing"),
        ("warning", "… things", "write …", "things"),
    ]
    assert expected == found


def test_the_page_of_messages_has_a_place_for_each() -> None:
    catalogue = tool("message_catalogue")
    page = catalogue.page((REFERENCE / "messages.md").read_text())
    anchors = re.findall(r'<a id="([^"]*)">', page)
    assert {message.anchor for message in catalogue.messages()} == set(anchors)
    assert len(set(anchors)) == len(anchors)
    assert '<a id="there-is-no-process"></a><code>there is no process …</code>' in page
    assert "\n## SinkError\n" in page
