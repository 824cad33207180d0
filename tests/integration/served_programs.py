"""Real programs that several tests probe: a database that runs queries, a server of redis, and a TLS connection."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from integration.support import NOBODY, TIMEOUT, accepts_connections, as_nobody, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PYTHON = "/usr/bin/python3"


def needs(*programs: str) -> None:
    """Skip the test if a program is not installed."""
    for each in programs:
        if shutil.which(each) is None:
            pytest.skip(f"{each} is not installed")


def needs_usdt(program: str, probe: str, option: str) -> None:
    """Skip the test if a program was built without its USDT probes, which needs an option of its configuration."""
    notes = subprocess.run(["readelf", "-n", program], capture_output=True, text=True, check=False).stdout
    if probe not in notes:
        pytest.skip(f"{Path(program).name} was built without USDT probes ({option})")


class Postgres(NamedTuple):
    """A program of PostgreSQL, and a command of a shell with which it executes queries and ends."""

    program: str
    command: str


@contextmanager
def postgres(queries: str, path: Path) -> Iterator[Postgres]:
    """Make a database, and give the command that executes ``queries`` in it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become the user of a database")
    needs("postgres", "initdb", "setpriv")
    program, initdb = (str(Path(str(shutil.which(name))).resolve()) for name in ("postgres", "initdb"))
    directory = Path(tempfile.mkdtemp(prefix="dprobes-postgres-"))  # pytest's own is root's alone
    try:
        os.chown(directory, NOBODY, NOBODY)
        subprocess.run(
            [initdb, "-D", str(directory / "data"), "-A", "trust", "-U", "postgres", "--no-sync"],
            check=True, capture_output=True, timeout=5 * TIMEOUT, cwd=directory, **as_nobody(),
        )  # fmt: skip
        (path / "queries").write_text(queries)
        user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
        yield Postgres(program, f"{user} {program} --single -D {directory}/data postgres < {path}/queries")
    finally:
        shutil.rmtree(directory)


def redis_program() -> Path:
    """Return the program of the server; Debian has it, under another name, in the package of the tools as well."""
    needs("redis-cli")
    program = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    assert program is not None
    return Path(program).resolve()


class RedisRun(NamedTuple):
    """A server that was probed: its statistics before its end, and what dprobes printed."""

    commands: str
    clients: str
    output: str
    messages: str


def redis_run(words: Sequence[str], path: Path) -> RedisRun:
    """Start a server with ``words``, a command of dprobes; send it three SET and a GET, and end it."""
    server, address = path / "redis-server", path / "socket"
    server.symlink_to(redis_program())
    command = [str(server), "--port", "0", "--unixsocket", str(address), "--save", "", "--dir", str(path)]
    client = ["redis-cli", "-s", str(address)]
    process = subprocess.Popen(
        [*words, "--", *command, "--loglevel", "warning"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        await_true(lambda: accepts_connections(address) or process.poll() is not None, "the server's socket", TIMEOUT)
        for number in range(3):
            subprocess.run([*client, "SET", f"user:{number}", "x"], check=True, capture_output=True)
        subprocess.run([*client, "GET", "user:1"], check=True, capture_output=True)
        commands, clients = (
            subprocess.run([*client, "INFO", section], check=True, capture_output=True, text=True).stdout
            for section in ("commandstats", "stats")
        )
        subprocess.run([*client, "SHUTDOWN", "NOSAVE"], check=False, capture_output=True)
        output, messages = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, messages
    return RedisRun(commands, clients, output, messages)


_TLS = """
import ssl
server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
server.load_cert_chain("DIRECTORY/certificate", "DIRECTORY/key")
client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
one, other = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
done = 0
for _ in range(4):
    for end in (one, other):
        try: end.do_handshake(); done += 1
        except ssl.SSLWantReadError: pass
print("DONE", done)
"""


def tls_connection(directory: Path) -> str:
    """Return a program in Python that connects ``one`` and ``other`` by TLS, with a certificate in a directory."""
    needs("openssl", PYTHON)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-keyout", directory / "key", "-out", directory / "certificate"],
        check=True, capture_output=True,
    )  # fmt: skip
    return _TLS.replace("DIRECTORY", str(directory))


WAITING = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, told = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_barrier_t barrier;
static int is_told, is_waiting;
static void *worker(void *unused) {
    for (int i = 0; i < 3; i++) {
        pthread_barrier_wait(&barrier);
        pthread_mutex_lock(&mutex);
        pthread_mutex_unlock(&mutex);
        pthread_barrier_wait(&barrier);
    }
    for (int n = 0; n < 1;) { /* until the main thread is in pthread_cond_wait, which releases the mutex */
        pthread_mutex_lock(&told);
        n = is_waiting;
        pthread_mutex_unlock(&told);
    }
    pthread_mutex_lock(&told);
    is_told = 1;
    pthread_cond_signal(&condition);
    pthread_mutex_unlock(&told);
    return unused;
}
int main(void) {
    pthread_t thread;
    pthread_barrier_init(&barrier, 0, 2);
    pthread_create(&thread, 0, worker, 0);
    for (int i = 0; i < 3; i++) {
        pthread_mutex_lock(&mutex);
        pthread_barrier_wait(&barrier);
        while (*(volatile int *)&mutex != 2) /* until a thread sleeps: nptl/lowlevellock.h */
            usleep(1000);
        pthread_mutex_unlock(&mutex);
        pthread_barrier_wait(&barrier);
    }
    pthread_mutex_t recursive;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&recursive, &attributes);
    pthread_mutex_lock(&recursive);
    pthread_mutex_lock(&recursive); /* no wait: the thread itself holds it */
    int waits = 0;
    pthread_mutex_lock(&told);
    is_waiting = 1;
    for (; !is_told; waits++) pthread_cond_wait(&condition, &told);
    pthread_mutex_unlock(&told);
    printf("HELD %d %p %p %p %d\\n", (int)gettid(), (void *)&mutex, (void *)&told, (void *)&condition, waits);
    return pthread_join(thread, 0);
}
"""
"""A program in which a thread waits three times for a mutex, and the main thread at least once for a condition."""


_SERVER = """
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
)

func work(group *sync.WaitGroup) { group.Done() }

func main() {
	mux := http.NewServeMux()
	served := 0
	mux.HandleFunc("/users/", func(w http.ResponseWriter, r *http.Request) { served++ })
	server := httptest.NewServer(mux)
	for i := 0; i < 3; i++ {
		if r, err := http.Get(fmt.Sprintf("%s/users/%d?x=1", server.URL, i)); err == nil {
			r.Body.Close()
		}
	}
	if r, err := http.Post(server.URL+"/none", "text/plain", nil); err == nil {
		fmt.Println("SERVED", served, r.StatusCode)
	}
	var group sync.WaitGroup
	for i := 0; i < 40; i++ {
		group.Add(1)
		go work(&group)
	}
	group.Wait()
	for i := 0; i < 5; i++ {
		runtime.GC()
	}
	var statistics runtime.MemStats
	runtime.ReadMemStats(&statistics)
	fmt.Println("COLLECTIONS", statistics.NumGC)
}
"""


def go_server(directory: Path) -> Path:
    """Return a program in Go, made in a directory, that is a server of HTTP and its client."""
    needs("go")
    (directory / "server.go").write_text(_SERVER)
    environment = {**os.environ, "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    subprocess.run(
        ["go", "build", "-o", "server", "server.go"], check=True, cwd=directory, env=environment, capture_output=True
    )
    return directory / "server"
