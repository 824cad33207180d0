"""``--engine replay``: handlers on recorded hits give the records that the interpreter gives."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.rpn.instruction_set import UNSEEN_ENTRY
from dprobes.testing import FakeContext, run_handler
from integration.support import TIMEOUT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

HEAD = "name = hotloop\nvars = 2\ngvars = 1\ncvars = 1\ntvars = 1\n"


def replay(
    tmp_path: Path, program: Path, text: str, hits: list[dict[str, Any]], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on recorded hits of a module."""
    source, recording = tmp_path / "x.rpn", tmp_path / "hits.jsonl"
    source.write_text(text.replace("name = hotloop", f'name = "{program}"'))
    recording.write_text("".join(json.dumps(hit) + "\n" for hit in hits))
    command = [sys.executable, "-m", "dprobes", "run", str(source), "--engine", f"replay={recording}", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())


def records(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


REGISTERS = {"rdi": 7, "rsi": 0x7FFE0010, "rax": 1 << 63, "rsp": 0x7FFE0000}
MEMORY = {0x7FFE0010: b"/etc/passwd\0", 0x7FFF0000: bytes(range(64))}


@pytest.mark.parametrize(
    "handler",
    [
        "push r, rdi; push r, rax; log 2",
        "push 64; push r, rsi; log str; push 4; push r, rsi; log mrf",
        "push r, rsi; push mem, u64; push 0x10; add; log 1",
        "push 0; push mem, u32; log 1",
        "push 5; pop lv, 0; inc lv, 0; push lv, 0; inc gv, 0; push gv, 0; inc cv, 0; push cv, 0; log 3",
        "push 0x42; push r, rsi; pop mem, u8; push r, rsi; push mem, u64; log 1",
        "push 3; pop r, rdi; push r, rdi; log 1",
        "push pid; push tid; push uid; push procid; push task; push time; log 6",
        "sx wrong; push 0; push mem, u8; ux; exit; wrong: log 3",
        "push 1; push 0; div; log 1",
        "push r, pc; log 1",
        "inc tv, 0; push tv, 0; log 1",
    ],
)
def test_a_record_is_that_of_the_interpreter(build: Builder, tmp_path: Path, handler: str) -> None:
    ids: dict[str, Any] = {"pid": 11, "tid": 12, "uid": 13, "cpu": 0, "task": 15, "time": 16}
    hit = {
        "symbol": "tick",
        "registers": {**REGISTERS, "rip": 0x1000},
        "memory": {hex(address): data.hex() for address, data in MEMORY.items()},
        **ids,
    }
    text = f"{HEAD}offset = tick\nminor = 1\nex_mask = 0x1fff\n" + handler.replace("; ", "\n") + "\nexit\n"
    done = replay(tmp_path, build("hotloop.c"), text, [hit], "--format", "json", "--log", "ALL", "--allow-write")
    context = FakeContext(
        registers={**REGISTERS, "rip": 0x1000},
        memory=MEMORY,
        local_variables=[0, 0],
        global_variables=[0],
        cpu_variables=[0],
        thread_variables=[0],
        **ids,
    )
    outcome = run_handler(handler.replace("; ", "\n") + "\nexit\n", context, ex_mask=0x1FFF)
    (record,) = records(done)
    assert record["data"] == outcome.log.hex()
    assert {name: record[name] for name in ("pid", "tid", "uid", "time")} == {
        name: ids[name] for name in ("pid", "tid", "uid", "time")
    }
    assert (record["ip"], record["sp"]) == ("0x1000", "0x7ffe0000")


def test_hits_count_as_always(build: Builder, tmp_path: Path) -> None:
    text = (
        HEAD + "offset = tick\nminor = 1\npasscount = 1\nmaxhits = 2\ninc lv, 0\npush lv, 0\nlog 1\n"
        "offset = main\nminor = 2\npush lv, 0\nlog 1\nremove\n"
    )
    hits = [{"symbol": "tick"}] * 5 + [{"symbol": "main", "name": "one"}] * 2
    done = replay(tmp_path, build("hotloop.c"), text, hits, "--format", "json", "--log", "ALL")
    found = [(each["minor"], int.from_bytes(bytes.fromhex(each["data"]), "little")) for each in records(done)]
    assert found == [(1, 1), (1, 2), (2, 2)]
    assert records(done)[-1]["name"] == "one"
    rows = [line.split() for line in done.stderr.splitlines() if line.startswith("0,")]
    assert [row[:6] for row in rows] == [
        ["0,1", "tick", "3", "2", "0", "1"],
        ["0,2", "main", "1", "1", "0", "0"],
    ]


def test_places_are_named_in_four_ways(build: Builder, tmp_path: Path) -> None:
    program = build("hotloop.c")
    listed = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    address = next(int(line.split()[0], 16) for line in listed.splitlines() if line.endswith(" T tick"))
    text = HEAD + "offset = tick\nminor = 1\npush tick\npush r, pc\nlog 2\n"
    text += "offset = tick\nminor = 2\nreturn = yes\npush 2\nlog 1\n"
    hits: list[dict[str, Any]] = [{"address": address}, {"probe": 0}, {"symbol": "tick", "base": 0x5000}]
    hits += [{"address": hex(address), "return": True}, {"probe": 1}]
    done = replay(tmp_path, program, text, hits, "--format", "json")
    words = [bytes.fromhex(each["data"]) for each in records(done)]
    at_entry = [address.to_bytes(8, "little") * 2, (address + 0x5000).to_bytes(8, "little") * 2]
    assert words == [at_entry[0], at_entry[0], at_entry[1], *[(2).to_bytes(8, "little")] * 2]


@pytest.mark.parametrize(
    ("hit", "error"),
    [
        ({"symbol": "tock"}, "the program has no probepoint at symbol tock"),
        ({"offset": 5}, "the program has no probepoint at offset 0x5"),
        ({"probe": 2}, "the program has no probepoint at probe 2"),
        ({"symbol": "tick", "return": True}, "the program has no probepoint at symbol tick"),
        ({"symbol": "tick", "registers": {"r99": 1}}, "x86_64 has no register 'r99'"),
        (
            {"symbol": "tick", "registers": {"rax": "five"}},
            """'registers': expected a number of up to 64 bits, found "five\"""",
        ),
    ],
)
def test_nothing_runs_where_a_line_is_wrong(build: Builder, tmp_path: Path, hit: dict[str, Any], error: str) -> None:
    text = HEAD + "offset = tick\nlog 0\nexit\n"
    done = replay(tmp_path, build("hotloop.c"), text, [{"symbol": "tick"}, hit])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"dprobes: error: {tmp_path}/hits.jsonl:2: {error}\n"


def test_a_handler_that_ends_badly_is_reported(build: Builder, tmp_path: Path) -> None:
    text = HEAD + "offset = tick\nminor = 1\npush 1\npush 0\ndiv\nlog 1\nexit\noffset = main\nminor = 2\nexit 1\n"
    hits = [{"symbol": "tick"}, {"symbol": "main"}, {"symbol": "main"}]
    done = replay(tmp_path, build("hotloop.c"), text, hits, "--allow-write")
    assert done.returncode == 0
    assert done.stderr.splitlines()[:2] == [
        f"dprobes: warning: {tmp_path}/hits.jsonl:1: the handler was ended by DIVIDE_BY_ZERO, which nothing catches",
        f"dprobes: note: {tmp_path}/hits.jsonl:2: 'exit 1' removes the probepoint; there is no process to stop",
    ]


def test_what_a_recording_cannot_hold_is_refused(build: Builder, tmp_path: Path) -> None:
    text = HEAD + "offset = tick\npush u, xmm0\nlog 4\nexit\n"
    done = replay(tmp_path, build("hotloop.c"), text, [])
    assert done.returncode == 2
    assert "needs floating-point and SSE registers, which the replay engine lacks" in done.stderr
    assert "use --engine ptrace with -c COMMAND or -p PID" in done.stderr


def test_an_absent_module_is_an_error(tmp_path: Path) -> None:
    done = replay(tmp_path, tmp_path / "absent", HEAD + "offset = 4\nexit\n", [])
    assert done.returncode == 1
    assert f"the replay engine needs the module '{tmp_path}/absent' on this machine" in done.stderr


@pytest.mark.parametrize("verb", ["run", "insert"])
def test_engines_with_arguments_are_asked_for_in_one_way(tmp_path: Path, verb: str) -> None:
    source = tmp_path / "x.rpn"
    source.write_text("name = x\noffset = 4\nexit\n")

    def error(*options: str) -> str:
        command = [sys.executable, "-m", "dprobes", verb, str(source), *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    assert error("--engine", "replay=x", "-c", "true") == (
        "Error: --engine replay=x names the target: leave out -c, -p, --cgroup and --uid"
    )
    assert error("--engine", "none") == (
        "Error: Invalid value for '--engine': there is no engine 'none'; "
        "engines are auto, ebpf, gdb=ENDPOINT, inline, ptrace, replay=FILE"
    )
    assert error("--engine", "ptrace", "--uid", "0") == (
        "Error: the ptrace engine needs a command (-c COMMAND) or a process (-p PID); other scopes need --engine ebpf"
    )


def test_a_return_knows_the_entry_that_was_recorded(build: Builder, tmp_path: Path) -> None:
    entry = {"time": 100, "rdi": 9, "rsp": "0x7000"}
    hits = [
        {"symbol": "tick", "return": True, "registers": {"rdi": 7}, "time": 350, "tid": 1, "entry": entry},
        {"symbol": "tick", "return": True, "registers": {"rdi": 7}, "time": 400, "tid": 2},
    ]
    handler = "sx unseen\npush elapsed\npush entry, arg0\npush entry, sp\nlog 3\nexit\nunseen: log 3\nexit\n"
    text = f"{HEAD}offset = tick\nreturn = yes\n{handler}"
    seen, unseen = records(replay(tmp_path, build("hotloop.c"), text, hits, "--format", "json"))
    assert seen["data"] == b"".join(n.to_bytes(8, "little") for n in (0x7000, 9, 250)).hex()
    words = (1, UNSEEN_ENTRY & (1 << 64) - 1, 0)
    assert unseen["data"] == b"".join(n.to_bytes(8, "little") for n in words).hex()


def test_a_register_of_the_entry_must_be_one(build: Builder, tmp_path: Path) -> None:
    hits = [{"symbol": "tick", "return": True, "entry": {"rdx0": 1}}]
    done = replay(tmp_path, build("hotloop.c"), f"{HEAD}offset = tick\nreturn = yes\nexit\n", hits)
    assert done.returncode != 0
    assert "hits.jsonl:1: x86_64 has no register 'rdx0'" in done.stderr
