"""Programs for modules that are loaded later, unloaded, and loaded again."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from guests.guest import TIMEOUT, GuestError
from guests.initramfs import PYTHON
from integration.support import await_true
from kernel.module_calls import load, unload

if TYPE_CHECKING:
    from guests.guest import Guest, Process

pytestmark = pytest.mark.shared_guest

HEADER = "name = dummy\nmodtype = kmod\nmajor = 8\n"
LINES = "/sys/kernel/tracing/kprobe_events"
SEND = "import socket\nsocket.socket(2, 2).sendto(b'x', ('10.9.9.2', 9))\n"


def begin(guest: Guest, program: str, awaited: str = "active when it is", *options: str) -> Process:
    """Begin to run a program; return when it has said something."""
    guest.put("/tmp/program.rpn", HEADER + program)
    run = guest.start_dprobes("run", "/tmp/program.rpn", "--format", "json", *options)
    run.await_output(awaited)
    return run


def end(run: Process) -> tuple[list[dict[str, Any]], str]:
    """End a run by Ctrl-C; return its records, and what it has said."""
    run.signal(signal.SIGINT)
    done = run.completed()
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def await_said(guest: Guest, run: Process, text: str, times: int) -> None:
    """Wait until a run has said something so often."""
    guest.wait_until(lambda: run.stderr.count(text) >= times, f"'{text}'", TIMEOUT)


def pushing_symbols(guest: Guest) -> str:
    """Return a probepoint with a kprobe, which does not keep the module, and with an address of it in its handler."""
    inside = {"6.1": 5, "6.12": 9}[guest.machine.kernel]
    return f"offset = dummy_setup + {inside}\nminor = 1\npush numdummies\npush mem, u32\nlog 1\nexit\n"


def minors(records: list[dict[str, Any]]) -> list[int]:
    return [record["minor"] for record in records]


def word(record: dict[str, Any]) -> int:
    return int.from_bytes(bytes.fromhex(record["data"]), "little")


def test_the_load_itself_hits_init_and_what_it_calls(guest: Guest) -> None:
    path = guest.put_module("dummy")
    run = begin(
        guest,
        "offset = dummy_init_module\nminor = 1\npush r, eip\nlog 1\nexit\n"
        "offset = dummy_setup\nminor = 2\nexit\n"
        "offset = dummy_dev_init\nreturn = yes\nminor = 3\npush r, retval\nlog 1\nexit\n",
    )
    assert "the module 'dummy' is not loaded: its 3 probepoints become active when it is" in run.stderr
    assert guest.get(LINES).count(b" dummy:") == 3
    guest.call(load, path, "numdummies=2")
    run.await_output("the module 'dummy' has been loaded: it is probed")
    run.await_output("3 probepoints are active; Ctrl-C ends the run")
    records, _ = end(run)
    assert minors(records) == [1, 2, 3, 2, 3]
    assert word(records[0]) % 16 == 0, "the address of the function, not the one behind its breakpoint"
    assert word(records[2]) == 0
    assert guest.get(LINES) == b""


def test_a_module_that_comes_again_is_probed_again(guest: Guest) -> None:
    path = guest.put_module("dummy")
    run = begin(guest, "offset = dummy_setup\nminor = 1\nexit\n")
    for turn in (1, 2, 3):
        guest.call(load, path, "numdummies=2")
        await_said(guest, run, "has been loaded", turn)
        guest.call(unload, "dummy")
        await_said(guest, run, "has been unloaded", turn)
    records, said = end(run)
    assert minors(records) == [1] * 6
    assert "the module 'dummy' has been unloaded: its probepoints wait until it is loaded again" in said
    assert "dummy_setup" in said


def test_a_loaded_module_may_go_and_come_again(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    inside = {"6.1": 5, "6.12": 9}[guest.machine.kernel]
    run = begin(
        guest,
        "offset = dummy_setup\nminor = 1\nexit\n"
        f"offset = dummy_setup + {inside}\nminor = 2\npush r, eip\nlog 1\nexit\n",
        "2 probepoints are active",
    )
    guest.run("ip link add one type dummy && ip link del one")
    guest.call(unload, "dummy")
    run.await_output("has been unloaded")
    guest.call(load, guest.put_module("dummy"), "numdummies=1")
    run.await_output("has been loaded")
    records, _ = end(run)
    assert minors(records) == [1, 2, 1, 2]
    assert {word(record) % 16 for record in records if record["minor"] == 2} == {inside}


@pytest.mark.each_kernel
def test_a_pattern_in_a_loaded_module_holds_it_if_it_is_one_link(guest: Guest) -> None:
    """Since Linux kernel commit e22061b2d309 ("bpf: Take module reference on kprobe_multi link") (in v6.2)."""
    guest.load_module("dummy", "numdummies=1")
    run = begin(guest, 'offset = "dummy_s*"\nminor = 1\nexit\n', "active; Ctrl-C")
    guest.run("ip link add one type dummy && ip link del one")
    if guest.get(LINES) == b"":  # ftrace calls the handler
        with pytest.raises(GuestError, match="EAGAIN"):
            guest.call(unload, "dummy")
        times = 1
    else:
        guest.call(unload, "dummy")
        run.await_output("has been unloaded")
        guest.call(load, guest.put_module("dummy"), "numdummies=1")
        run.await_output("has been loaded")
        times = 2
    records, _ = end(run)
    assert minors(records) == [1] * times
    guest.call(unload, "dummy")


def test_what_pushes_symbols_of_a_module_ends_with_it(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    run = begin(guest, pushing_symbols(guest), "1 probepoint is active")
    guest.run("ip link add one type dummy && ip link del one")
    assert guest.get(LINES) == b""
    guest.call(unload, "dummy")
    done = run.completed()
    assert (
        "dprobes: note: the module 'dummy' has been unloaded: 1 probepoint depends on addresses in it, and will not "
        "come back\ndprobes: note: all probepoints have been removed or disabled: the run ends\n"
    ) in done.stderr
    assert [word(json.loads(line)) for line in done.stdout.splitlines()] == [1]


def test_what_waits_for_a_module_goes_on_without_what_does_not(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    watched = "address = dummy_link_ops + 16 : dummy_link_ops + 23\nwatchpoint = rw\nminor = 2\nexit\n"
    run = begin(guest, watched + pushing_symbols(guest), "2 probepoints are active")
    guest.call(unload, "dummy")
    run.await_output(
        "the module 'dummy' has been unloaded: 1 probepoint depends on addresses in it, and will not come back; "
        "the other waits until it is loaded again\n"
    )
    guest.call(load, guest.put_module("dummy"), "numdummies=1")
    run.await_output("has been loaded")
    before = run.stdout.count('"minor": 2,')
    guest.run("ip link add one type dummy && ip link del one")
    guest.wait_until(lambda: run.stdout.count('"minor": 2,') > before, "a hit", TIMEOUT)
    records, _ = end(run)
    assert set(minors(records)) == {2}


@pytest.mark.parametrize("is_killed_with_its_guard", [False, True])
def test_nothing_is_left_of_a_run_that_is_killed(guest: Guest, *, is_killed_with_its_guard: bool) -> None:
    path = guest.put_module("dummy")
    run = begin(guest, "offset = dummy_setup\nminor = 1\nexit\noffset = dummy_xmit\nminor = 2\nexit\n")
    if is_killed_with_its_guard:
        [file] = guest.run("grep -la '[g]uard[.]py' /proc/[0-9]*/cmdline").stdout.split()
        guest.run(f"kill -9 {file.split('/')[2]}")
    run.kill()
    run.wait()
    if is_killed_with_its_guard:
        assert guest.get(LINES).count(b" dummy:") == 2
        other = begin(guest, "offset = dummy_setup\nminor = 1\nexit\n")
        assert guest.get(LINES).count(b" dummy:") == 1
        end(other)
    await_true(lambda: guest.get(LINES) == b"", "the removal of the lines")
    guest.call(load, path)
    guest.call(unload, "dummy")


def test_memory_of_a_module_is_watched_from_when_it_is_there(guest: Guest) -> None:
    """The name of a kind of links is compared with those of all kinds."""
    path = guest.put_module("dummy")
    watched = "address = dummy_link_ops + 16 : dummy_link_ops + 23\nwatchpoint = rw\nminor = 1\nexit\n"
    run = begin(guest, watched + "sampler = 97hz\nminor = 2\nexit\n")
    for turn in (1, 2):
        guest.call(load, path)
        await_said(guest, run, "has been loaded", turn)
        before = run.stdout.count('"minor": 1,')
        guest.run("ip link add one type dummy && ip link del one")
        guest.wait_until(lambda: run.stdout.count('"minor": 1,') > before, "a hit", TIMEOUT)  # noqa: B023
        guest.call(unload, "dummy")
        await_said(guest, run, "has been unloaded", turn)
    end(run)


def test_the_driver_of_the_manual_page(guest: Guest) -> None:
    """Example 2 of the original's page: a network driver, whose functions are named by macros; here ``dummy``."""
    path = guest.put_module("dummy")
    guest.put("/tmp/test.rpn", "// included\n")
    program = """
#define func1 dummy_dev_init
offset = func1
minor = 0
push r, eip
push mem, u16
log 1
push r, eax
push r, ebx
log 2

offset = dummy_xmit
minor = 1
push 0x10
push r, eip
log mrf
exit

offset = dummy_get_stats64
minor = 2
push 0x10
push r, eip
log mrf
#include "test.rpn"
exit
"""
    run = begin(guest, program)
    guest.call(load, path, "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 up")
    guest.run([str(PYTHON), "-c", SEND])
    guest.call(unload, "dummy")
    run.await_output("has been unloaded")
    records, _ = end(run)
    assert set(minors(records)) == {0, 1, 2}
    assert minors(records)[0] == 0


def test_what_is_known_of_a_module_that_is_not_loaded(guest: Guest) -> None:
    path = guest.put_module("dummy")
    located = guest.dprobes("locate", "dummy:dummy_xmit").stdout
    assert f"file      {path}, which is not loaded" in located
    (opcode,) = (line.partition(" = ")[2] for line in located.splitlines() if line.startswith("opcode = "))
    assert "which the kernel registers whenever it loads the module" in located
    assert "ftrace cannot redirect" in guest.dprobes("locate", f"{path}:cleanup_module").stdout
    guest.put("/tmp/program.rpn", HEADER + f"offset = dummy_xmit\nopcode = {opcode}\nminor = 1\nexit\n")
    shown = guest.dprobes("show", "/tmp/program.rpn").stdout
    assert f"// module: 'dummy', which is not loaded ('{path}'), x86_64" in shown
    assert "from where it is loaded, COMPILED" in shown
    for body, said in (
        ("offset = dummy_xmt\nexit\n", "did you mean 'dummy_xmit'"),
        ("offset = dummy_xmit + 1\nexit\n", "dummy_xmit+0x1 is inside an instruction"),
        ("offset = numdummies\nexit\n", "'numdummies' is data of 'dummy', not code"),
        ("offset = dummy_xmit\nopcode = 0xf4\nexit\n", f"MISMATCH: opcode {opcode}"),
        ("offset = cleanup_module\nexit\n", "EXCLUDED: "),
        (
            "offset = dummy_xmit\npush numdummies\nexit\n",
            "'numdummies' has no address before the module 'dummy' is loaded",
        ),
    ):
        guest.put("/tmp/program.rpn", HEADER + body)
        assert said in guest.dprobes("check", "/tmp/program.rpn", check=False).stderr, body
    guest.put("/tmp/program.rpn", "name = dumy\nmodtype = kmod\noffset = 0\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", check=False)
    assert "there is no module 'dumy': it is not loaded, and /lib/modules/" in done.stderr
    assert "did you mean 'dummy'?" in done.stderr


def test_the_manager_waits_for_a_module(guest: Guest) -> None:
    path = guest.put_module("dummy")
    guest.put("/tmp/program.rpn", HEADER + "offset = dummy_setup\nminor = 1\nexit\n")
    inserted = guest.dprobes("insert", "/tmp/program.rpn")
    assert inserted.stdout == "inserted 'dummy': it waits for the module 'dummy'\n"
    assert states(guest) == [("COMPILED", "the module 'dummy' is not loaded", 0)]
    guest.call(load, path, "numdummies=2")
    await_true(lambda: states(guest) == [("ACTIVE", "", 2)], "the load")
    guest.call(unload, "dummy")
    await_true(lambda: states(guest) == [("COMPILED", "the module 'dummy' is not loaded", 2)], "the unload")
    guest.dprobes("remove", "--all")
    guest.dprobes("stop", "--manager")
    assert guest.get(LINES) == b""


def states(guest: Guest) -> list[tuple[str, str, int]]:
    (program,) = json.loads(guest.dprobes("query", "--json").stdout)["programs"]
    return [(probe["state"], probe.get("detail", ""), probe["counts"]["hits"]) for probe in program["probes"]]
