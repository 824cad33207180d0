"""Guests do what the tests in them rely on."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from guests import emulator, images
from guests.emulator import GuestError, Machine
from guests.guest import SharedGuest, resumed
from guests.images import UnavailableError
from integration.support import await_true

if TYPE_CHECKING:
    from collections.abc import Callable

    from guests.emulator import Snapshot
    from guests.guest import Guest

SYMBOL_OF_START = "_text"
LINKED_START = 0xFFFFFFFF81000000  # __START_KERNEL of arch/x86, which the kernel has without KASLR


def test_without_qemu_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(emulator, "QEMU", "no-such-qemu")
    with (
        Path(tmp_path, "root").open("wb+") as root,
        pytest.raises(UnavailableError, match=r"^no-such-qemu is not installed \(package qemu-system-x86\)$"),
    ):
        emulator.Emulator(Machine("6.1"), root)


def test_a_kernel_that_apt_does_not_know_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(images.KERNELS, "2.4", ("linux-image-2.4-cloud-amd64",))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # apt's lists are not fetched again
    with pytest.raises(UnavailableError) as caught:
        images.image("2.4")
    assert str(caught.value) in (
        "apt knows no package of a Linux 2.4 kernel",
        "a guest's kernel is a Debian package, and 'apt-get' is not installed",
    )


@pytest.mark.each_kernel
def test_the_kernel_is_the_packages(guest: Guest) -> None:
    assert guest.run(["uname", "-r"]).stdout == f"{guest.image.release}\n"
    assert guest.image.release.startswith(f"{guest.machine.kernel}.")


def test_what_a_prober_needs_is_mounted(guest: Guest) -> None:
    mounts = {tuple(line.split()[1:3]) for line in guest.get("/proc/mounts").decode().splitlines()}
    assert {
        ("/proc", "proc"),
        ("/sys", "sysfs"),
        ("/dev", "devtmpfs"),
        ("/tmp", "tmpfs"),
        ("/sys/fs/bpf", "bpf"),
        ("/sys/fs/cgroup", "cgroup2"),
        ("/sys/kernel/tracing", "tracefs"),
        ("/sys/kernel/debug", "debugfs"),
    } <= mounts
    assert guest.get("/proc/sys/kernel/kptr_restrict") == b"0\n"
    assert "LOOPBACK,UP" in guest.run("ip link show lo").stdout


@pytest.mark.each_kernel
@pytest.mark.parametrize("turn", ["first", "second"])
def test_what_a_test_changes_is_not_there_in_the_next(guest: Guest, turn: str) -> None:
    assert guest.run("test -e /root/changed", check=False).returncode == 1
    assert guest.get("/proc/sys/kernel/perf_event_paranoid") != b"-1\n"
    guest.put("/root/changed", turn)
    guest.put("/proc/sys/kernel/perf_event_paranoid", "-1")
    assert guest.get("/proc/sys/kernel/perf_event_paranoid") == b"-1\n"


def test_a_guest_that_is_given_back_has_no_new_files(guest: Guest) -> None:
    guest.put("/tmp/below/file", "text")
    guest.run("echo text > /root/file; mkdir /run/there; ln -s /nowhere /tmp/link")
    assert guest.request("reset")
    assert guest.run("ls /tmp; ls /root/file /run/there", check=False).stdout == ""


@pytest.mark.parametrize(
    ("change", "reverse"),
    [
        ("mount -t tmpfs none /mnt", "umount /mnt"),
        ("ip link set lo name other", "ip link set other name lo"),
        ("echo 'p:mine vfs_read' > /sys/kernel/tracing/kprobe_events", "echo > /sys/kernel/tracing/kprobe_events"),
        ("sleep 1000 > /dev/null 2>&1 &", "kill -9 $(ps -C sleep -o pid=)"),
    ],
)
def test_a_guest_that_a_test_has_changed_is_not_given_to_another(guest: Guest, change: str, reverse: str) -> None:
    guest.run(f"mkdir -p /mnt; ip link set lo down; {change}")
    assert not guest.request("reset")
    guest.run(reverse)
    await_true(lambda: guest.request("reset"), "the state after the boot")


def test_neither_is_one_with_a_module_or_with_files_elsewhere(guest: Guest) -> None:
    guest.put("/etc/changed", "text")
    assert not guest.request("reset")
    guest.run("rm /etc/changed")
    assert not guest.request("reset")


@pytest.mark.parametrize("passes", [True, False])
def test_tests_that_pass_share_a_guest(
    kernel: str, snapshot_of: Callable[[Machine], Snapshot], *, passes: bool
) -> None:
    machine = Machine(kernel)
    with contextlib.closing(SharedGuest()) as shared:
        first = shared.of(machine, snapshot_of)
        first.put("/tmp/file", "text")
        assert shared.runs(machine)
        assert not shared.runs(Machine(kernel, cpus=1))
        shared.give_back(is_sound=passes)
        assert shared.runs(machine) == passes
        second = shared.of(machine, snapshot_of)
        assert (second is first) == passes
        assert second.run("ls /tmp").stdout == ""


def test_the_clock_is_that_of_this_machine(guest: Guest) -> None:
    assert abs(int(guest.run("date +%s").stdout) - time.time()) < 3600


def test_output_and_status_of_a_program_are_its_own(guest: Guest) -> None:
    done = guest.run("cat; echo wrong >&2; exit 3", input="right\n", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "right\n", "wrong\n")
    assert guest.run(["cat", "/root/a b"], check=False).returncode == 1
    assert guest.run("kill -9 $$", check=False).returncode == -9
    assert guest.run(["cat", "/proc/self/status"], user=65534).stdout.count("\t65534\t65534\t65534\t65534\n") == 2
    assert guest.run(["no-such-program"], check=False).stderr == "no-such-program: No such file or directory\n"


def test_a_program_that_fails_shows_what_it_said(guest: Guest) -> None:
    with pytest.raises(GuestError, match=r"^Linux \S+: echo no >&2; exit 3 ended with 3\nno\n$"):
        guest.run("echo no >&2; exit 3")
    with pytest.raises(GuestError, match=r"^Linux \S+: FileNotFoundError: .*'/root/nothing'$"):
        guest.get("/root/nothing")


def test_a_program_in_the_background_is_talked_to(guest: Guest) -> None:
    shell = guest.start("while read line; do echo got $line; done; echo end")
    shell.write("one\n")
    assert shell.await_output("got one\n") == "got one\n"
    assert guest.get(f"/proc/{shell.pid}/comm") == b"sh\n"
    shell.write("two\n")
    shell.close_input()
    assert shell.completed().stdout == "got one\ngot two\nend\n"
    sleeper = guest.start("sleep 1000")
    sleeper.signal(signal.SIGTERM, to_group=True)
    assert sleeper.wait() == -signal.SIGTERM


def test_a_program_that_does_not_end_is_killed(guest: Guest) -> None:
    with pytest.raises(GuestError, match=r"(?s)waits in vain for the end of echo here; exec sleep 1000; .*\nhere\n$"):
        guest.run("echo here; exec sleep 1000", timeout=2)
    await_true(lambda: not guest.run("ps -C sleep -o pid=", check=False).stdout, "the end of the sleeper")


def test_files_of_megabytes_go_there_and_back(guest: Guest) -> None:
    content = os.urandom(3_000_000)
    noise = guest.start("while :; do echo noise; done")  # the line is used both ways
    noise.await_output("noise")
    guest.put("/tmp/below/file", content, 0o600)
    assert guest.get("/tmp/below/file") == content
    assert guest.run("stat -c %a /tmp/below/file").stdout == "600\n"
    noise.kill()
    assert noise.wait() == -signal.SIGKILL


def double(number: int) -> tuple[int, str]:
    print("to standard output")
    return 2 * number, platform.release()


def fail(number: int) -> None:
    wrong = number + 1
    assert wrong == number


def leave(status: int) -> None:
    os.write(1, b"going\n")
    os._exit(status)


def processors() -> int | None:
    return os.cpu_count()


def test_functions_run_in_the_guest(guest: Guest) -> None:
    assert guest.call(double, 21) == (42, guest.image.release)
    with pytest.raises(GuestError, match=r"(?s)^Linux \S+: Traceback .*test_guest.py.*wrong = 8\n.*AssertionError\n"):
        guest.call(fail, 7)
    with pytest.raises(GuestError, match=r"^leave\(\) ended with 3\ngoing\n$"):
        guest.call(leave, 3)


def test_the_tree_under_test_runs_in_the_guest(guest: Guest) -> None:
    here = subprocess.run([sys.executable, "-m", "dprobes", "--version"], capture_output=True, text=True, check=True)
    assert guest.dprobes("--version").stdout == here.stdout
    assert guest.dprobes("no-such-verb", check=False).returncode == 2
    source = "import dprobes; print(dprobes.__file__)"
    assert guest.python(source).stdout == f"{Path(__file__).parents[2]}/src/dprobes/__init__.py\n"


def test_a_panic_shows_the_end_of_the_console(guest: Guest) -> None:
    with pytest.raises(GuestError, match=r"(?s)has ended.*sysrq: Trigger a crash.*Kernel panic - not syncing"):
        guest.run("echo c > /proc/sysrq-trigger")
    assert not guest.is_alive


def test_a_warning_of_the_kernel_is_not_missed(kernel: str, snapshot_of: Callable[[Machine], Snapshot]) -> None:
    with resumed(snapshot_of(Machine(kernel))) as guest:
        guest.check_health()
        guest.put("/dev/kmsg", "as if it were a warning\n")
        guest.put("/proc/sys/kernel/tainted", "512")
        with pytest.raises(GuestError, match=r"(?s)has warned:\n.*as if it were a warning"):
            guest.check_health()


@pytest.mark.machine(cpus=4)
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_guest_may_have_more_processors(guest: Guest) -> None:
    assert guest.call(processors) == 4


def start_of_kernel(guest: Guest) -> int:
    lines = guest.run(f"grep ' {SYMBOL_OF_START}$' /proc/kallsyms").stdout.splitlines()
    return int(lines[0].split()[0], 16)


@pytest.mark.machine(kaslr=True)
@pytest.mark.parametrize("kernel", ["6.12"], indirect=True)
def test_a_guest_may_choose_its_addresses(guest: Guest) -> None:
    assert "nokaslr" not in guest.get("/proc/cmdline").decode()
    assert start_of_kernel(guest) != LINKED_START


def test_a_guest_is_where_it_was_linked_for(guest: Guest) -> None:
    assert start_of_kernel(guest) == LINKED_START


def test_modules_are_loaded_with_what_they_need(guest: Guest) -> None:
    assert [module.name for module in guest.image.modules("veth", "dummy")] == ["veth", "dummy"]
    guest.load_module("dummy", "numdummies=2")
    assert "dummy1" in guest.run("ip -brief link").stdout
    guest.run("echo > /dev/null; ip link del dummy1")
    names = [module.name for module in guest.image.modules("virtio-net")]
    assert names.index("failover") < names.index("net_failover") < names.index("virtio_net")
    guest.load_module("virtio-net")
    guest.load_module("virtio-net")
    assert guest.run("readlink /sys/class/net/eth0/device/driver").stdout.endswith("/virtio_net\n")
    guest.run("ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up")
    guest.run(["bash", "-c", "echo > /dev/udp/10.0.2.2/9"])
    ask = "while ! ip neigh show 10.0.2.2 | grep lladdr; do sleep 0.1; done"  # QEMU answers
    assert guest.run(ask).stdout.startswith("10.0.2.2 dev eth0 lladdr ")


def test_a_file_system_is_made_on_a_ram_disk(guest: Guest) -> None:
    guest.load_module("brd", "rd_size=16384")
    guest.run("mkfs.ext4 -q /dev/ram0 && mkdir /mnt && mount /dev/ram0 /mnt && echo there > /mnt/file && sync")
    assert guest.run("umount /mnt; mount /dev/ram0 /mnt; cat /mnt/file").stdout == "there\n"


def test_the_kernels_files_are_put_where_they_are_looked_for(guest: Guest) -> None:
    path = guest.put_kernel()
    assert path == f"/boot/vmlinuz-{guest.image.release}"
    assert guest.get(path) == guest.image.vmlinuz.read_bytes()
    assert guest.get(guest.put_module("veth"))[:4] == b"\x7fELF"


BOOTS = """
import sys, time
from guests.emulator import Machine, Snapshot
with_root = Snapshot(Machine("6.12"))
emulator = with_root.boot()
print(emulator._process.pid, flush=True)
time.sleep(600)
"""


def test_a_guest_ends_with_the_test_run(guest: Guest) -> None:
    """The guest of this test is there so that it is skipped where there can be none."""
    paths = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "tests"))
    with subprocess.Popen(
        [sys.executable, "-c", BOOTS], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        files = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # QEMU is about to start
                files.add(str(path.readlink()))
        process.kill()
    await_true(lambda: not Path(f"/proc/{pid}").exists(), "the end of QEMU")
    directories = (str(images.cache_directory()), tempfile.gettempdir())
    left = {path for path in files if path.startswith(directories) and not path.endswith(" (deleted)")}
    assert left <= {str(guest.image.vmlinux)}
