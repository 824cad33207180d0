"""The instrumentation sets of servers and of runtimes, on real programs that count for themselves."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from integration.ebpf.kernel import require_bpf
from integration.served_programs import needs
from integration.set_runs import SETS, Run, keep_promises, read, run
from integration.support import DPROBES, NOBODY, TIMEOUT, accepts_connections, as_nobody, await_true


@pytest.fixture(params=["inline", "ebpf", "ptrace"])
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine: what a probe records is the same with each."""
    if request.param == "ebpf":
        require_bpf()
    return str(request.param)


NGINX = """
daemon off;
master_process off;
pid DIRECTORY/pid;
error_log DIRECTORY/errors;
events {}
http {
  log_format told '$status|$request';
  access_log DIRECTORY/access told;
  client_body_temp_path DIRECTORY/body; proxy_temp_path DIRECTORY/proxy; fastcgi_temp_path DIRECTORY/fastcgi;
  uwsgi_temp_path DIRECTORY/uwsgi; scgi_temp_path DIRECTORY/scgi;
  server {
    listen unix:DIRECTORY/socket; root DIRECTORY;
    location /moved { return 301 /page; }
    location /gone { return 204; }
  }
}
"""


def got(connection: socket.socket, path: str) -> int:
    """Send a request, read the whole answer, and return its status."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(10_000)
    head, _, body = answer.partition(b"\r\n\r\n")
    (size,) = [int(each) for each in re.findall(rb"(?i)content-length: *(\d+)", head)] or [0]
    while len(body) < size:
        body += connection.recv(10_000)
    return int(head.split()[1])


def test_nginx(engine: str, tmp_path: Path) -> None:
    needs("nginx")
    nginx = str(Path(str(shutil.which("nginx"))).resolve())
    directory = Path(tempfile.mkdtemp(prefix="dprobes-nginx-"))  # the path of a socket is short
    try:
        (directory / "page").write_text("hello\n")
        (directory / "configuration").write_text(NGINX.replace("DIRECTORY", str(directory)))
        words = [*DPROBES, "run", "nginx", "--engine", engine, "-D", f"NGINX={nginx}", "--format", "json"]
        process = subprocess.Popen(
            [*words, "-o", str(tmp_path / "records"), "--", nginx, "-c", str(directory / "configuration")],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            address = directory / "socket"
            await_true(lambda: accepts_connections(address) or process.poll() is not None, "the socket", TIMEOUT)
            statuses = []
            for paths in (("/page", "/none", "/moved", "/gone"), ("/page?x=1",)):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(address))
                    statuses += [got(connection, path) for path in paths]
            access = directory / "access"
            await_true(lambda: len(access.read_text().splitlines()) == len(statuses), "the access log", TIMEOUT)
            os.kill(int((directory / "pid").read_text()), 3)  # SIGQUIT: it serves what it has, and ends
            _, messages = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        said = [line.split("|") for line in access.read_text().splitlines()]
    finally:
        shutil.rmtree(directory)
    assert process.returncode == 0, messages
    records = read((tmp_path / "records").read_text(), SETS["nginx"])
    keep_promises(records, SETS["nginx"])
    result = Run(records, "")
    assert [int(status) for status, _ in said] == statuses == [200, 404, 301, 204, 200]
    assert [each["line"] for each in result.of("nginx.request.start")] == [line for _, line in said]
    assert [each["status"] for each in result.of("nginx.request.refuse")] == [404, 301]
    assert len(result.of("nginx.request.done")) == len(said)
    assert all(0 < each["elapsed"] < 60 * 10**9 for each in result.of("nginx.request.done"))
    opened = [each["connection"] for each in result.of("nginx.connection.open")]
    assert len(opened) >= 2  # and those that asked whether the server listens
    assert sorted(opened) == sorted(each["connection"] for each in result.of("nginx.connection.close"))


SCRIPT = """
const asyncHooks = require("async_hooks"), fs = require("fs"), dns = require("dns"), net = require("net");
const { spawn } = require("child_process");
const made = {};
asyncHooks.createHook({ init(id, type) { made[type] = (made[type] || 0) + 1; } }).enable();
fs.closeSync(fs.openSync("/etc/hostname"));
fs.readFile("/etc/hosts", () => {});
try { fs.openSync("/nowhere"); } catch (error) { }
dns.lookup("localhost", () => {});
setTimeout(() => {}, 234);
spawn("/bin/true");
spawn("/nowhere/program").on("error", error => fs.writeSync(1, `ERROR ${error.errno}\\n`));
const server = net.createServer(one => one.end()).listen(0, "127.0.0.1", () => {
  let ended = 0;
  for (let n = 0; n < 3; n++)
    net.connect(server.address().port, "127.0.0.1").on("close", () => { if (++ended == 3) server.close(); }).resume();
});
process.on("exit", () => fs.writeSync(1, `MADE ${made.GETADDRINFOREQWRAP} ${made.TCPWRAP} ${made.PROCESSWRAP}\\n`));
"""


def test_node(engine: str, tmp_path: Path) -> None:
    needs("node")
    (tmp_path / "work.js").write_text(SCRIPT)
    program = str(Path(str(shutil.which("node"))).resolve())
    result = run("node", engine, "-D", f"NODE={program}", "--", program, str(tmp_path / "work.js"), path=tmp_path)
    opened = {each["path"]: each["callback"] for each in result.of("node.file.open")}
    assert [path for path in opened if path.startswith("/etc") or path == "/nowhere"] == [
        "/etc/hostname",
        "/etc/hosts",
        "/nowhere",
    ]
    assert opened["/etc/hostname"] == opened["/nowhere"] == "0x0"  # the program waits
    assert opened["/etc/hosts"] != "0x0"
    ((look_ups, sockets, processes),) = re.findall(r"^MADE (\d+) (\d+) (\d+)$", result.output, re.MULTILINE)
    assert [each["host"] for each in result.of("node.dns.ask")] == ["localhost"] * int(look_ups)
    accepted = [each["result"] for each in result.of("node.connection.accept")]
    assert accepted == [0] * 3
    assert int(sockets) == 2 * len(accepted)
    (error,) = re.findall(r"^ERROR (-\d+)$", result.output, re.MULTILINE)
    spawned = [(each["file"], each["result"]) for each in result.of("node.process.spawn")]
    assert spawned == [("/bin/true", 0), ("/nowhere/program", int(error))]
    assert len(spawned) == int(processes)
    assert 234 in [each["timeout"] for each in result.of("node.timer.start")]
    waits: Counter[str] = Counter()
    for each in result.of("node.loop.wait"):
        waits[each["loop"]] += each["elapsed"]
    assert max(waits.values()) >= 150_000_000  # of the 234 ms; there are other loops, such as that of the inspector


def test_the_sender_of_a_request_that_fails_in_another_thread(tmp_path: Path) -> None:
    needs("node")
    program = str(Path(str(shutil.which("node"))).resolve())
    code = (
        'const fs = require("fs"); fs.open("/nowhere/at/all", e => fs.writeSync(1, `ERROR ${e.errno}\\n`));'
        'fs.readFile("/etc/hosts", () => {})'
    )
    (tmp_path / "work.js").write_text(code)
    done = subprocess.run(
        [*DPROBES, "run", "node/failed-files", "--engine", "ptrace", "-D", f"NODE={program}", "--", program,
         str(tmp_path / "work.js")],
        capture_output=True, text=True, timeout=3 * TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (error,) = re.findall(r"^ERROR (-\d+)$", done.stdout, re.MULTILINE)
    failed = re.findall(
        r"error (-\d+) for (\S+) queued by node [\d.]+ [num]?s ago\n((?: {4}.*\n)+)", done.stdout, re.MULTILINE
    )
    assert [(number, path) for number, path, _ in failed] == [(error, "/nowhere/at/all")]
    frames = [line.split()[0].partition("+")[0] for line in failed[0][2].splitlines()]
    assert frames[:2] == ["uv__work_submit", "uv_fs_open"]  # and not those of the thread that has executed it
    assert "node::fs::Open" in failed[0][2]


JAVA = """
import java.lang.management.*;
public class Work {
    static final Object lock = new Object();
    static class Extra { static int x = 7; }
    public static void main(String[] words) throws Exception {
        for (int i = 0; i < 3; i++) {
            Thread thread = new Thread(() -> { }, "worker-" + i);
            thread.start();
            thread.join();
        }
        Thread waiter = new Thread(() -> { synchronized (lock) { } }, "waiter");
        synchronized (lock) {
            waiter.start();
            while (waiter.getState() != Thread.State.BLOCKED) Thread.onSpinWait();
        }
        waiter.join();
        for (int i = 0; i < 4; i++) System.gc();
        System.out.println("EXTRA " + Extra.x + " " + waiter.getId());
    }
}
"""


def test_jvm(engine: str, tmp_path: Path) -> None:
    needs("java", "javac")
    java = Path(str(shutil.which("java"))).resolve()
    library = next(java.parent.parent.rglob("libjvm.so"))
    notes = subprocess.run(["readelf", "-n", library], capture_output=True, text=True, check=False).stdout
    if "class__loaded" not in notes:
        pytest.skip("libjvm.so was built without USDT probes (--enable-dtrace)")
    (tmp_path / "Work.java").write_text(JAVA)
    subprocess.run(["javac", "Work.java"], check=True, cwd=tmp_path, capture_output=True)
    classes, collections = tmp_path / "classes", tmp_path / "collections"
    options = [f"-Xlog:class+load:file={classes}", f"-Xlog:gc:file={collections}", "-XX:+DTraceMonitorProbes"]
    result = run(
        "jvm", engine, "-D", f"JVM={library}", "--", str(java), "-XX:+UseSerialGC", *options, "-cp", str(tmp_path),
        "Work", path=tmp_path,
    )  # fmt: skip
    ((waiter,),) = [re.findall(r"^EXTRA 7 (\d+)$", result.output, re.MULTILINE)]
    ended = [each["name"] for each in result.of("jvm.thread.stop")]
    assert [name for name in ended if name.startswith(("worker-", "waiter"))] == [
        "worker-0", "worker-1", "worker-2", "waiter",
    ]  # fmt: skip
    started = {each["name"]: each for each in result.of("jvm.thread.start")}
    assert started["waiter"] == {"name": "waiter", "thread": int(waiter), "daemon": 0}
    assert started["Finalizer"]["daemon"] == 1
    full = re.findall(r"GC\((\d+)\) Pause Full", collections.read_text())
    assert len(full) == 4
    assert [each["full"] for each in result.of("jvm.gc.begin")].count(1) == len(full)
    finished = [each for each in result.of("jvm.gc.end") if each["full"] == 1]
    assert len(finished) == len(full)
    assert all(0 < each["elapsed"] < 60 * 10**9 for each in finished)
    told = re.findall(r"\] (\S+) source: (.*)$", classes.read_text(), re.MULTILINE)
    loaded = Counter(each["name"].replace("/", ".") for each in result.of("jvm.class.load"))
    assert {name: loaded[name] for name in ("Work", "Work$Extra", "java.lang.Object")} == dict.fromkeys(
        ("Work", "Work$Extra", "java.lang.Object"), 1
    )
    assert sum(loaded.values()) == len(told)
    shared = [each["shared"] for each in result.of("jvm.class.load")].count(1)
    assert shared == len([source for _, source in told if source.startswith("shared objects file")])
    waits = [each for each in result.of("jvm.monitor.wait") if each["thread"] == int(waiter)]
    assert [each["class"] for each in waits] == ["java/lang/Object"]
    assert {each["success"] for each in result.of("jvm.method.compile")} <= {0, 1}
    assert any(each["method"] for each in result.of("jvm.method.compile"))
    assert len(result.of("jvm.machine.stop")) == 1


QUERIES = (
    "select 40+2", "select sleep(0.2)",
    "show session status where variable_name in ('Questions', 'Com_select')",
)  # fmt: skip


def test_mariadb(engine: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become the user of a database")
    needs("mariadbd", "mariadb-install-db", "mariadb", "setpriv")
    server = str(Path(str(shutil.which("mariadbd"))).resolve())
    directory = Path(tempfile.mkdtemp(prefix="dprobes-mariadb-"))  # pytest's own is root's alone
    try:
        os.chown(directory, NOBODY, NOBODY)
        data, address = directory / "data", directory / "socket"
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal",
             "--skip-test-db"],
            check=True, capture_output=True, timeout=5 * TIMEOUT, cwd=directory, **as_nobody(),
        )  # fmt: skip
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        options = [f"--datadir={data}", f"--socket={address}", f"--pid-file={directory}/pid", "--skip-networking"]
        words = [*DPROBES, "run", "mariadb", "--engine", engine, "-D", f"MARIADB={server}", "--format", "json"]
        process = subprocess.Popen(
            [*words, "-o", str(tmp_path / "records"), "--", *user, server, "--no-defaults", *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

        def ask(*queries: str) -> subprocess.CompletedProcess[str]:
            client = ["mariadb", "--no-defaults", "-uroot", "-S", str(address), "-N", "-e", ";".join(queries)]
            return subprocess.run(client, capture_output=True, text=True, check=False, timeout=TIMEOUT)

        try:
            await_true(lambda: address.exists() or process.poll() is not None, "the server's socket", 5 * TIMEOUT)
            told = ask(*QUERIES)
            assert told.returncode == 0, told.stderr
            refused = ask("select * from nothing.here")
            ask("shutdown")
            _, messages = process.communicate(timeout=2 * TIMEOUT)
        finally:
            process.kill()
    finally:
        shutil.rmtree(directory)
    assert process.returncode == 0, messages
    records = read((tmp_path / "records").read_text(), SETS["mariadb"])
    keep_promises(records, SETS["mariadb"])
    result = Run(records, "")
    asked = [each["sql"] for each in result.of("mariadb.query.start")]
    assert asked == [*QUERIES, "select * from nothing.here", "shutdown"]
    counted = dict(re.findall(r"^(\w+)\t(\d+)$", told.stdout, re.MULTILINE))
    assert int(counted["Questions"]) == asked.index(QUERIES[2]) + 1
    assert int(counted["Com_select"]) == len([sql for sql in QUERIES if sql.startswith("select")])
    done = result.of("mariadb.command.done")
    assert [each["command"] for each in done].count(3) == len(asked)
    queries = [each["elapsed"] for each in done if each["command"] == 3]
    assert 200_000_000 <= queries[1] < 60 * 10**9
    ((number, message),) = re.findall(r"^ERROR (\d+) \(\w+\) at line 1: (.*)$", refused.stderr, re.MULTILINE)
    assert (int(number), message) in [(each["number"], each["message"]) for each in result.of("mariadb.error.report")]
    assert len(result.of("mariadb.connection.open")) == 3  # the clients; the counter has the server's own threads, too
    assert len(result.of("mariadb.connection.close")) == len(result.of("mariadb.connection.open"))
