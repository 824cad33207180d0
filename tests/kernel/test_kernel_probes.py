"""Probepoints in the kernel of a guest: where they stand, what handlers see there, and that counts are exact."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

KERNEL = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
CALLS = "import os\nfor _ in range({count}): os.{call}\n"


def run(guest: Guest, program: str, *options: str, calls: str = "getppid()", count: int = 100) -> list[dict[str, Any]]:
    """Run a program on Python code that makes system calls; return the records."""
    guest.put("/tmp/program.rpn", KERNEL + program)
    guest.put("/tmp/calls.py", CALLS.format(count=count, call=calls))
    done = guest.dprobes("run", "/tmp/program.rpn", "--format", "json", *options, "--", str(PYTHON), "/tmp/calls.py")
    return [json.loads(line) for line in done.stdout.splitlines()]


def data_of(record: dict[str, Any]) -> bytes:
    return bytes.fromhex(record["data"])


def test_each_call_of_a_function_is_a_hit(guest: Guest) -> None:
    records = run(guest, "offset = __x64_sys_getppid\nminor = 1\nexit\n")
    assert len(records) == 100
    assert {(record["major"], record["minor"]) for record in records} == {(7, 1)}


def test_the_instruction_pointer_is_the_probepoints_address(guest: Guest) -> None:
    records = run(guest, "offset = __x64_sys_getppid\nminor = 1\npush r, eip\nlog 1\nexit\n", count=1)
    address = guest.run("grep ' __x64_sys_getppid$' /proc/kallsyms").stdout.split()[0]
    assert [int.from_bytes(data_of(record), "little") for record in records] == [int(address, 16)]


def test_all_registers_are_those_of_the_hit(guest: Guest) -> None:
    """The argument of a system call's function is a ``struct pt_regs`` of the user context."""
    program = "offset = __x64_sys_lseek\nminor = 1\npush r, arg0\npush 104\nadd\npush mem, u64\nlog 1\n"
    program += "push u, esi\nlog 1\npush u, cs\nlog 1\npush r, cs\nlog 1\npush r, ebx\npop lv, 0\nexit\n"
    records = run(guest, "vars = 1\n" + program, calls="lseek(0, 1234567, 0)", count=3)
    words = [data_of(record) for record in records if data_of(record)[:8] == (1234567).to_bytes(8, "little")]
    assert len(words) == 3
    assert {word[8:] for word in words} == {b"".join(n.to_bytes(8, "little") for n in (1234567, 0x33, 0x10))}


def test_strings_of_programs_are_read(guest: Guest) -> None:
    program = "offset = do_sys_openat2\nminor = 1\npush 100\npush r, arg1\nlog str\nexit\n"
    records = run(guest, program, calls="path.exists('/') or open('/x')", count=1)
    assert any(b"/tmp/calls.py" in data_of(record) for record in records)


def test_filters_compare_strings_of_programs_and_of_the_kernel(guest: Guest) -> None:
    program = "offset = do_sys_openat2\nminor = 1\npush 100\npush r, arg1\nlog str\nexit\n"
    text = 'str(arg1) startswith "/tmp/calls" and comm startswith "python" and str(arg1, 30) contains ".py"'
    records = run(guest, program, "--filter", text, calls="path.exists('/') or open('/x')", count=1)
    assert {data_of(record)[3:] for record in records} == {b"/tmp/calls.py"}
    banner = (
        'offset = __x64_sys_getppid\nminor = 1\npush linux_banner\nmatch strn, "Linux version"\nlog b, 1\n'
        'push linux_banner\nmatch str, "Linux version"\nlog b, 1\npush comm\nlog 2\nexit\n'
    )
    (record,) = run(guest, banner, count=1)
    assert data_of(record)[:2] == b"\0\1"
    assert data_of(record)[2:].rstrip(b"\0") == record["name"].encode()


def test_data_of_the_kernel_is_named_by_symbols(guest: Guest) -> None:
    program = "offset = __x64_sys_getppid\nminor = 1\npush 13\npush linux_banner\nlog str\nexit\n"
    (record,) = run(guest, program, count=1)
    assert data_of(record).endswith(b"Linux version")


def test_variables_that_each_cpu_has_a_copy_of(guest: Guest) -> None:
    """The copy of ``this_cpu_off`` says how far on this CPU's copies are, as the table of all CPUs does."""
    own = "push this_cpu_off\npush mem, u64\nlog 1\n"
    by_table = "push __per_cpu_offset\npush procid\nshl 3\nadd\npush mem, u64\nlog 1\n"
    records = run(guest, f"offset = __x64_sys_getppid\nminor = 1\n{own}{by_table}exit\n", count=5)
    words = [data_of(record) for record in records]
    assert len(words) == 5
    assert {word[:8] == word[8:] != bytes(8) for word in words} == {True}


def test_a_place_inside_a_function(guest: Guest) -> None:
    """Behind the call of ftrace, which an ``endbr64`` may stand before."""
    offset = {"6.1": 5, "6.12": 9}[guest.machine.kernel]
    records = run(guest, f"offset = __x64_sys_getppid + {offset}\nminor = 1\npush r, eip\nlog 1\nexit\n")
    assert len(records) == 100
    assert {int.from_bytes(data_of(record), "little") & 0xF for record in records} == {offset}


def test_a_place_inside_an_instruction_is_refused(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = __x64_sys_getppid + 1\nminor = 1\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert done.returncode == 2
    assert "__x64_sys_getppid+0x1 is inside an instruction" in done.stderr


def test_returns_have_the_value(guest: Guest) -> None:
    program = "offset = __x64_sys_getppid\nreturn = yes\nminor = 1\npush r, retval\nlog 1\npush u, eax\nlog 1\nexit\n"
    records = run(guest, program)
    assert len(records) == 100
    assert len({data_of(record)[:8] for record in records}) == 1


@pytest.mark.requires_feature("kprobe_multi")
def test_a_pattern_is_many_functions(guest: Guest) -> None:
    records = run(guest, 'offset = "__x64_sys_get*id"\nminor = 1\nexit\n', "--log", "cseip")
    assert len(records) >= 100


def test_an_unknown_function_is_refused_with_near_names(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = vfs_raed\nminor = 1\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert done.returncode == 2
    assert "the kernel has no symbol 'vfs_raed'" in done.stderr
    assert "did you mean 'vfs_read'" in done.stderr


def test_a_former_name_stands_for_the_present_one(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = do_fork\nminor = 1\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--format", "csv", "--", "/bin/sh", "-c", "/bin/true; :")
    assert "'do_fork' is called 'kernel_clone' in this kernel" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_the_kernel_names_what_it_excludes(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = exc_int3\nminor = 1\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert "EXCLUDED" in done.stderr


def test_functions_of_modules(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 up")
    header = 'name = "dummy.ko"\nmodtype = kmod\nmajor = 8\n'
    guest.put("/tmp/program.rpn", header + "offset = dummy_xmit\nminor = 2\nexit\n")
    guest.put("/tmp/calls.py", "import socket\nsocket.socket(2, 2).sendto(b'x', ('10.9.9.2', 9))\n")
    options = ("--format", "csv", "--log", "procname", "--", str(PYTHON), "/tmp/calls.py")
    done = guest.dprobes("run", "/tmp/program.rpn", *options)
    assert len(done.stdout.splitlines()) >= 2, done.stderr


def test_a_module_that_is_nowhere_is_refused(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", "name = dummy\nmodtype = kmod\nmajor = 8\noffset = dummy_xmit\nminor = 2\nexit\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert done.returncode == 1
    message = f"there is no module 'dummy': it is not loaded, and /lib/modules/{guest.image.release} has no file of it"
    hint = 'load it, or name its file by a path: name = "/PATH/NAME.ko"'
    assert done.stderr == f"dprobes: error: {message}\nhint: {hint}\n"


def test_data_of_the_kernel_is_watched(guest: Guest) -> None:
    program = "address = panic_timeout : panic_timeout + 3\nwatchpoint = w\nminor = 3\npush r, eip\nlog 1\n"
    program += "push panic_timeout\npush mem, u32\nlog 1\nexit\n"
    guest.put("/tmp/program.rpn", KERNEL + program)
    done = guest.dprobes(
        "run", "/tmp/program.rpn", "--format", "json", "--", "/bin/sh", "-c", "echo 17 > /proc/sys/kernel/panic"
    )
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert data_of(record)[7] == 0xFF
    assert int.from_bytes(data_of(record)[8:], "little") == 17


def test_samples_are_of_the_kernel_only(guest: Guest) -> None:
    program = "sampler = 199hz\nminor = 4\npush r, eip\nlog 1\nexit\n"
    guest.put("/tmp/program.rpn", KERNEL + program)
    done = guest.dprobes(
        "run", "/tmp/program.rpn", "--format", "json", "--", "/bin/dd", "if=/dev/urandom", "of=/dev/null", "count=20000"
    )
    places = [data_of(json.loads(line))[7] for line in done.stdout.splitlines()]
    assert len(places) > 20
    assert set(places) == {0xFF}


@pytest.mark.machine(kaslr=True)
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_addresses_are_those_of_a_kernel_that_was_moved(guest: Guest) -> None:
    assert len(run(guest, "offset = __x64_sys_getppid\nminor = 1\nexit\n")) == 100
    assert len(run(guest, "offset = __x64_sys_getppid + 9\nminor = 1\nexit\n")) == 100


def test_a_compiled_program_is_inserted_by_the_manager(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = __x64_sys_getppid\nminor = 1\nexit\n")
    guest.put("/tmp/calls.py", CALLS.format(count=50, call="getppid()"))
    guest.dprobes("build", "/tmp/program.rpn", "-o", "/tmp/program.ppdf")
    assert guest.dprobes("insert", "/tmp/program.ppdf").stdout == "inserted 'vmlinux': 1 of 1 probepoints active\n"
    before = hits_of(guest)
    guest.run([str(PYTHON), "/tmp/calls.py"])
    assert 50 <= hits_of(guest) - before < 60
    assert "removed vmlinux" in guest.dprobes("remove", "--all").stdout
    guest.dprobes("stop", "--manager")


def hits_of(guest: Guest) -> int:
    (program,) = json.loads(guest.dprobes("query", "--json").stdout)["programs"]
    hits: int = program["probes"][0]["counts"]["hits"]
    return hits


def test_nothing_is_left_of_a_run_that_is_killed(guest: Guest) -> None:
    inside = {"6.1": 5, "6.12": 9}[guest.machine.kernel]
    program = f"offset = vfs_write\nminor = 1\nexit\noffset = vfs_read + {inside}\nminor = 2\nexit\n"
    guest.put("/tmp/program.rpn", KERNEL + program)
    process = guest.start_dprobes("run", "/tmp/program.rpn", "--format", "csv", "-o", "/tmp/records")
    process.await_output("active")
    assert guest.get("/sys/kernel/debug/kprobes/list") or guest.get("/sys/kernel/tracing/enabled_functions")
    process.kill()
    process.wait()
    guest.run(
        "for n in 1 2 3 4 5 6 7 8 9; do test -s /sys/kernel/debug/kprobes/list || exit 0; sleep 0.3; done; exit 1"
    )
    assert guest.get("/sys/kernel/tracing/enabled_functions") == b""


def test_show_says_what_stands_there(guest: Guest) -> None:
    guest.put("/tmp/program.rpn", KERNEL + "offset = kernel_clone\nminor = 1\nexit\n")
    listing = guest.dprobes("show", "/tmp/program.rpn").stdout
    assert "// module: the running kernel, x86_64, 8-byte words\n" in listing
    assert "kernel_clone" in listing
    assert "COMPILED" in listing


@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("push 1\nexit 1", "the ebpf engine cannot hand over what runs in the kernel ('exit 1')"),
        ("exit 2", "the ebpf engine cannot hand over what runs in the kernel ('exit 2')"),
        ("push 1\npop r, eax", "'pop r, eax' needs writing registers or memory at a hit in the kernel"),
        ("push r, cr0", "'push r, cr0' needs control, debug and model-specific registers"),
        ("push 0x80\npush io, u8", "needs I/O ports"),
        ("push 1\npush 2\npop mem, u8", "'pop mem, u8' needs writing registers or memory at a hit in the kernel"),
    ],
)
def test_what_cannot_be_done_in_the_kernel_is_refused(guest: Guest, line: str, said: str) -> None:
    guest.put("/tmp/program.rpn", KERNEL + f"offset = vfs_read\nminor = 1\n{line}\n")
    done = guest.dprobes("run", "/tmp/program.rpn", "--allow-write", "--", "/bin/true", check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint: use --engine gdb=ENDPOINT, with the stub of " in done.stderr


def test_locate_describes_places_in_the_kernel(guest: Guest) -> None:
    inside = {"6.1": 5, "6.12": 9}[guest.machine.kernel]
    entry = guest.dprobes("locate", "kernel:vfs_read").stdout
    assert "offset = vfs_read          // 0x" in entry
    assert "ebpf: ftrace calls the handler" in entry
    behind = guest.dprobes("locate", f"vmlinux:vfs_read+{inside}").stdout
    assert "ebpf: a kprobe" in behind
    (opcode,) = (line.partition(" = ")[2] for line in behind.splitlines() if line.startswith("opcode = "))
    program = f"offset = vfs_read + {inside}\nopcode = {opcode}\nminor = 1\nexit\n"
    guest.put("/tmp/program.rpn", KERNEL + program)
    done = guest.dprobes("run", "/tmp/program.rpn", "--format", "csv", "--", "/bin/cat", "/proc/version")
    assert len(done.stdout.splitlines()) > 2
    guest.put("/tmp/program.rpn", KERNEL + program.replace(opcode, "0xf4"))
    done = guest.dprobes("run", "/tmp/program.rpn", "--", "/bin/true", check=False)
    assert f"MISMATCH: opcode {opcode}" in done.stderr
    assert "kprobe blacklist" in guest.dprobes("locate", "kernel:exc_int3").stdout
