"""
Do the same work in three threads for each line of standard input, and print the digests of what came of it.

All of libc, libpython, libcrypto and sqlite have a part in it. Threads that come to the same print one digest.
"""

from __future__ import annotations

import collections
import decimal
import hashlib
import itertools
import json
import re
import sqlite3
import ssl
import struct
import sys
import threading
import zlib

THREADS = 3
ALGORITHMS = ("md5", "sha1", "sha512", "sha3_256", "blake2s")
QUERY = "select b, sum(c), group_concat(a) from t where b > 'row 3' group by b"


def rows() -> list[object]:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t(a integer primary key, b text, c real)")
    made = ((k, f"row {k * 7919 % 1003}", k / 3) for k in range(300))
    connection.executemany("insert into t values(?, ?, ?)", made)
    connection.execute("create index by_b on t(b)")
    found = [*connection.execute(QUERY), *connection.execute("pragma integrity_check")]
    connection.close()
    return found


def work(found: dict[int, str], number: int) -> None:
    data = json.dumps({str(k): [k, k / 7, {"x": k**20}] for k in range(200)}, sort_keys=True)
    common = collections.Counter(re.findall(r"[0-9]+", data)).most_common(5)
    pairs = sum(a * b for a, b in itertools.combinations(range(60), 2))
    ciphers = sorted(each["name"] for each in ssl.create_default_context().get_ciphers())
    values = (json.loads(data), common, rows(), decimal.Decimal(2).sqrt(), pairs, ciphers)
    whole = hashlib.sha256(repr(values).encode())
    for name in ALGORITHMS:
        whole.update(hashlib.new(name, data.encode()).digest())
    whole.update(hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 20))
    whole.update(zlib.compress(data.encode()) + struct.pack("<dfq", 1.5, 2.5, -3))
    found[number] = whole.hexdigest()


def main() -> None:
    print("ready", flush=True)
    for _ in sys.stdin:
        found: dict[int, str] = {}
        threads = [threading.Thread(target=work, args=(found, number)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(" ".join(set(found.values())), len(found), flush=True)


main()
