"""The pages containers, production, offline-machines and editors of docs/how-to: their commands do what they say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.documented_commands import ROOT, Step, shapes, steps_of, under_test
from integration.support import (
    DPROBES,
    TIMEOUT,
    as_nobody,
    await_line,
    await_message,
    await_true,
    nobody_python,
    running,
    status_field,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTAINERS = ROOT / "docs" / "how-to" / "containers.md"
PRODUCTION = ROOT / "docs" / "how-to" / "production.md"
OFFLINE = ROOT / "docs" / "how-to" / "offline-machines.md"
EDITORS = ROOT / "docs" / "how-to" / "editors.md"
INSIDE, FROM_HOST, BY_CGROUP = steps_of(CONTAINERS)
CAPABILITIES = (
    "chown,dac_override,fsetid,fowner,mknod,net_raw,setgid,setuid,setfcap,setpcap,net_bind_service,sys_chroot,kill,"
    "audit_write"
)
"""Capabilities of a container that Docker starts without options."""

FORBIDDEN = (
    "acct add_key bpf clock_adjtime clock_settime delete_module finit_module init_module ioperm iopl kcmp "
    "kexec_file_load kexec_load keyctl lookup_dcookie mbind mount move_pages open_by_handle_at perf_event_open "
    "pivot_root quotactl reboot request_key set_mempolicy setns settimeofday swapoff swapon umount2 unshare userfaultfd"
)
"""System calls that Docker's default profile refuses without capabilities (moby, profiles/seccomp/default.json)."""

CONFINE = r"""
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static const unsigned forbidden[] = { CALLS };
int main(int count, char **words) {
    enum { N = sizeof forbidden / sizeof *forbidden };
    struct sock_filter code[2 * N + 2] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)) };
    for (int n = 0; n < N; n++) {
        code[2 * n + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[n], 0, 1);
        code[2 * n + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    code[2 * N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { 2 * N + 2, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 125;
    return count < 2 ? 0 : execvp(words[1], words + 1);
}
"""
LOOP = "echo ready; while read line; do cat /etc/hostname > /dev/null; echo done; done"
"""For each line a program is started, and has ended when the answer comes."""


def require_namespaces() -> None:
    words = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "true"]
    if subprocess.run(words, check=False, capture_output=True, timeout=TIMEOUT).returncode:
        pytest.skip("no PID and mount namespaces can be made, as in a chroot")


@pytest.fixture(scope="module")
def docker_like(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the words that start a command with the namespaces, capabilities and system calls of Docker's default."""
    if os.geteuid() != 0:
        pytest.skip("needs root, as the daemon that starts containers")
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    directory = tmp_path_factory.mktemp("container")
    calls = ", ".join(f"SYS_{name}" for name in FORBIDDEN.split())
    (directory / "confine.c").write_text(CONFINE.replace("CALLS", calls))
    confine = directory / "confine"
    subprocess.run(["gcc", "-o", str(confine), str(directory / "confine.c")], check=True, timeout=TIMEOUT)
    bounding = "-all," + ",".join(f"+{name}" for name in CAPABILITIES.split(","))
    words = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "setpriv"]
    words += [f"--bounding-set={bounding}", "--inh-caps=-all", str(confine)]
    require_namespaces()
    assert subprocess.run([*words, "true"], check=False, capture_output=True, timeout=TIMEOUT).returncode == 0
    assert subprocess.run([*words, "unshare", "-m", "true"], check=False, capture_output=True).returncode != 0
    return words


def run_in(container: Sequence[str], step: Step) -> subprocess.CompletedProcess[str]:
    # Without the engine that under_test gives to root: it is left to the rights.
    command = under_test(step).replace(" --engine inline", "")
    return subprocess.run(
        [*container, "sh", "-c", command], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


def test_a_command_is_probed_inside_a_container_as_docker_starts_it(docker_like: list[str]) -> None:
    done = run_in(docker_like, INSIDE)
    assert done.returncode == 0, done.stderr
    assert shapes(INSIDE.output) == shapes(done.stdout + done.stderr)
    assert "breakpoint instead of a jump" in done.stderr


def test_without_a_seccomp_filter_a_container_has_jumps(docker_like: list[str]) -> None:
    unconfined = docker_like[:-1]
    done = run_in(unconfined, INSIDE)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0,0 +_exit +1 +1 +0  jump$", done.stderr, re.MULTILINE), done.stderr
    assert "note" not in done.stderr


def test_a_running_process_is_probed_inside_a_container_as_docker_starts_it(docker_like: list[str]) -> None:
    run = f"{' '.join(DPROBES)} run -e 'libc.so.6:_exit(int status) {{ printf(\"ends with %d\", status) }}' -p $p"
    script = f"""
        mkfifo $1; sh -c 'read line < $0; exit 5' $1 & p=$!
        ({run}; echo over) 2>&1 | while read line; do
            echo "$line"
            case $line in *'is active'*) echo go > $1 ;; over) break ;; esac
        done"""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*docker_like, "sh", "-c", script, "sh", f"{directory}/fifo"],
            capture_output=True, text=True, timeout=TIMEOUT, check=True,
        )  # fmt: skip
    assert "ends with 5" in done.stdout, done.stdout
    assert "inline engine" in done.stdout


def test_a_container_as_docker_starts_it_may_not_use_ebpf(docker_like: list[str]) -> None:
    done = run_in(docker_like, INSIDE._replace(command=INSIDE.command.replace(" run ", " run --engine ebpf ")))
    assert done.returncode == 1
    assert "this user lacks CAP_BPF and CAP_PERFMON" in done.stderr


def test_a_rootless_container_probes_its_commands_and_no_bpf(nobody_environment: dict[str, str]) -> None:
    rootless = ["unshare", "-Urpf", "--kill-child", "--mount-proc"]
    python = nobody_python() if os.geteuid() == 0 else sys.executable
    user = as_nobody() if os.geteuid() == 0 else {}
    if subprocess.run([*rootless, "true"], check=False, capture_output=True, **user).returncode:
        pytest.skip("no user namespace can be made")
    command = [
        *rootless,
        python,
        "-m",
        "dprobes",
        "run",
        "-e",
        'libc.so.6:_exit(int status) { printf("ends with %d", status) }',
    ]
    environment = {**os.environ, **nobody_environment, "HOME": "/nonexistent"}
    done = subprocess.run(
        [*command, "--", "sh", "-c", "exit 3"], capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env=environment, cwd="/", **user,
    )  # fmt: skip
    assert "ends with 3" in done.stdout, done.stderr
    refused = subprocess.run(
        [*command, "--engine", "ebpf", "--", "sh", "-c", "exit 3"], capture_output=True, text=True, timeout=TIMEOUT,
        check=False, env=environment, cwd="/", **user,
    )  # fmt: skip
    assert "the kernel permits no BPF programs to processes in a user namespace" in refused.stderr


@contextlib.contextmanager
def shop(*words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a shell in a container, which reads a file for each line it gets; yield it with its id on the host."""
    require_namespaces()
    with running("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *words, stdin=subprocess.PIPE) as shell:
        await_line(shell)
        (pid,) = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        yield shell, int(pid)


def interrupted(command: str, shell: subprocess.Popen[str]) -> str:
    """Run a step until the shell in the container has started two programs; return all that dprobes printed."""
    client = subprocess.Popen(
        ["sh", "-c", "exec " + re.sub(r" --duration \d+s", "", command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        messages = await_message(client, "active")
        assert shell.stdin is not None
        for _ in range(2):
            shell.stdin.write("go\n")
            shell.stdin.flush()
            await_line(shell)
        client.send_signal(signal.SIGINT)
        output, rest = client.communicate(timeout=TIMEOUT)
    finally:
        client.kill()
    assert client.returncode == 0, messages + rest
    return output + messages + rest


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture
def cgroup(root: None, tmp_path: Path) -> Iterator[Path]:
    """Return a new cgroup, in a file system that is mounted for the test."""
    mounted = tmp_path / "cgroups"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", str(mounted)], check=True, timeout=TIMEOUT)
    directory = mounted / f"dprobes-shop-{os.getpid()}"
    try:
        directory.mkdir()
        yield directory
        await_true(lambda: not (directory / "cgroup.procs").read_text(), "the end of the cgroup's processes", TIMEOUT)
        directory.rmdir()
    finally:
        subprocess.run(["umount", str(mounted)], check=True, timeout=TIMEOUT)


@pytest.mark.usefixtures("root")
def test_a_process_of_a_container_is_probed_from_the_host() -> None:
    with shop("sh", "-c", LOOP) as (shell, pid):
        printed = interrupted(under_test(FROM_HOST).replace("$PID", str(pid)), shell)
    assert "@[cat]: 2\n" in printed
    assert shapes(FROM_HOST.output) - {"@[sleep]: N"} == shapes(printed)


@pytest.mark.usefixtures("root")
def test_a_cgroup_of_a_container_is_probed_from_the_host(cgroup: Path) -> None:
    with shop("sh", "-c", f"echo 0 > {cgroup}/cgroup.procs; {LOOP}") as (shell, _):
        printed = interrupted(under_test(BY_CGROUP).replace("/sys/fs/cgroup/shop", str(cgroup)), shell)
    assert "@[cat]: 2\n" in printed
    assert shapes(BY_CGROUP.output) - {"@[sleep]: N"} == shapes(printed)


def checker(directory: Path) -> Path:
    (text,) = re.findall(r"^```python\n(.*?)^```$", PRODUCTION.read_text(), re.MULTILINE | re.DOTALL)
    script = directory / "unchanged.py"
    script.write_text(text)
    return script


def changed(script: Path, pid: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(script), str(pid)], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert re.search(r"^\w+ /\S+libc\S+$", done.stdout, re.MULTILINE)
    return re.findall(r"^CHANGED (.*)$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("engine", ["inline", "ptrace", "ebpf"])
def test_after_a_kill_the_page_s_script_finds_the_code_unchanged(engine: str, tmp_path: Path) -> None:
    if engine == "ebpf" and os.geteuid() != 0:
        pytest.skip("ebpf needs root")
    script = checker(tmp_path)
    with running("sh", "-c", "echo ready; read line", stdin=subprocess.PIPE) as target:
        await_line(target)
        before = changed(script, target.pid)
        program = "libc.so.6:getppid { @calls = count() }"
        command = [*DPROBES, "run", "--engine", engine, "-e", program, "-p", str(target.pid)]
        client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            await_message(client, "is active")
            during = changed(script, target.pid)
        finally:
            client.kill()
            client.wait()
            assert client.stderr is not None
            client.stderr.close()
        assert any("libc" in path for path in during)
        await_true(lambda: changed(script, target.pid) == before, "the original code", TIMEOUT)
        await_true(lambda: status_field(target.pid, "TracerPid") == "0", "the end of the tracer", TIMEOUT)
        assert target.poll() is None


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_a_program_is_built_run_and_printed_on_three_machines(tmp_path: Path) -> None:
    for tool in ("gcc", "strip"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source, program = blocks(OFFLINE, "c")
    (tmp_path / "shop.c").write_text(source)
    (tmp_path / "orders.dpc").write_text(program)
    for step in steps_of(OFFLINE):
        done = subprocess.run(
            ["sh", "-c", under_test(step)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
        refused = "dprobes: error" in step.output
        assert done.returncode == (1 if refused else 0), done.stdout
        assert without_names(step.output, "/tmp/shop") == without_names(done.stdout, str(tmp_path))
    assert not (tmp_path / "customer" / "shop.c").exists()


def without_names(text: str, directory: str) -> list[str]:
    """Return the lines of an output without times, process ids, build-ids and the directory, in no order."""
    text = re.sub(r"^\d\d:\d\d:\d\d\.\d{6}  shop\[\d+\]", "TIME  shop[PID]", text, flags=re.MULTILINE)
    return sorted(re.sub(r"\b[0-9a-f]{40}\b", "BUILD", text.replace(directory, "HERE")).splitlines())


def test_vim_and_vs_code_find_the_files_that_the_page_links(tmp_path: Path) -> None:
    for commands in blocks(EDITORS, "sh"):
        if "ln -s" in commands:
            environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
            subprocess.run(["sh", "-e", "-c", commands], cwd=ROOT, check=True, env=environment, timeout=TIMEOUT)
    extension = tmp_path / ".vscode" / "extensions" / "dprobes-0.1.0" / "package.json"
    assert set(json.loads(extension.read_text())["contributes"]["configuration"]["properties"]) == {"dprobes.server"}
    nvim = tmp_path / ".local" / "share" / "nvim" / "site" / "pack" / "dprobes" / "start" / "dprobes"
    assert (nvim / "syntax" / "dpc.vim").is_file()
    vim = shutil.which("vim")
    if vim is None:
        pytest.skip("vim is not installed")
    for name, kind in (("a.dpc", "dpc"), ("a.rpn", "rpn")):
        (tmp_path / name).write_text("")
        shown = tmp_path / f"{name}.shown"
        words = ["-c", f"redir! > {shown}", "-c", "echo &filetype &syntax", "-c", "redir END", "-c", "qa!"]
        subprocess.run(
            [vim, "-n", "--not-a-term", *words, str(tmp_path / name)],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=TIMEOUT,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )  # fmt: skip
        assert shown.read_text().split() == [kind, kind]


def test_the_page_on_editors_names_files_and_commands_that_exist() -> None:
    text = EDITORS.read_text()
    directory = ROOT / "editors" / "vscode" / "syntaxes"
    assert {"dprobes-c.tmLanguage.json", "dprobes.tmLanguage.json"} == {path.name for path in directory.iterdir()}
    assert all(name in text for name in ("dprobes-c.tmLanguage.json", "dprobes.tmLanguage.json"))
    (helix,) = blocks(EDITORS, "toml")
    server = tomllib.loads(helix)["language-server"]["dprobes"]
    assert [server["command"], *server["args"]] == ["dprobes", "lsp"]
    shown = subprocess.run([*DPROBES, "lsp", "--help"], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert "language server" in shown.stdout
