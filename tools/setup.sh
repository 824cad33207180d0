#!/bin/sh
# Install what the project needs.
#   setup.sh run     a virtual environment with DProbes in it
#   setup.sh dev     the same with the tools of development
#   setup.sh site    the generator of the documentation's site
#   setup.sh bench   the other tracers that the benchmark measures, where they can be installed
#   setup.sh tools   Debian packages that tests and benchmarks use, where we may install them
#   setup.sh selftests   the sources of the kernel's selftests for x86, for "make torture"
# Nothing is presumed but a shell and, for whatever is missing, apt-get and the right to use it.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then sudo "$@"
    else return 1
    fi
}

apt_updated=""
apt_install() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ -z "$apt_updated" ]; then
        as_root apt-get update -qq >&2 || return 1
        apt_updated=yes
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# The system's own interpreter comes first: an ordinary user can run it as well.
find_python() {
    for candidate in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null && return
    python=$(find_python) || {
        apt_install python3 python3-venv || true
        python=$(find_python) || { say "Python 3.11 or newer is needed: install the packages python3 and python3-venv"; exit 1; }
    }
    "$python" -c 'import venv, ensurepip' 2>/dev/null || apt_install python3-venv || {
        say "the venv module is needed: install the package python3-venv"; exit 1; }
    rm -rf .venv
    "$python" -m venv .venv
}

pip_install() { .venv/bin/python -m pip install -q --disable-pip-version-check "$@" 2>&1 | grep -v '^WARNING: Location' >&2 || true; }

check_imports() {
    for module in "$@"; do
        .venv/bin/python -c "import $module" 2>/dev/null || {
            say "pip did not install '$module'; what it said is above"; exit 1; }
    done
}

# Nobody may write byte code later: many containers set PYTHONDONTWRITEBYTECODE. pip compiles what it copies, not a checkout.
compile_sources() { .venv/bin/python -m compileall -q src; }

fetch_selftests() {
    for tool in apt-get dpkg-deb tar xz; do
        command -v "$tool" >/dev/null 2>&1 || { say "'$tool' is not installed"; return 1; }
    done
    (
        cd "$1"
        apt-get download -qq linux-source-6.1 || { as_root apt-get update -qq && apt-get download -qq linux-source-6.1; } || {
            say "apt-get has no package linux-source-6.1"; exit 1; }
        dpkg-deb -x linux-source-6.1_*.deb package && tar -xJf package/usr/src/linux-source-6.1.tar.xz --wildcards \
            'linux-source-6.1/tools/testing/selftests/x86/*' 'linux-source-6.1/tools/testing/selftests/kselftest*.h' \
            linux-source-6.1/arch/x86/include/asm/desc_defs.h || { say "linux-source-6.1 cannot be unpacked"; exit 1; }
    ) >/dev/null
}

case "${1:-}" in
run)
    make_venv
    pip_install -e .
    check_imports dprobes click iced_x86
    compile_sources
    touch .venv/run.stamp
    ;;
dev)
    make_venv
    # "pip install --group" needs pip 25.1; what is listed is the same.
    pip_install -e '.[all]' $(.venv/bin/python tools/requirements_of.py dev)
    check_imports dprobes pytest hypothesis mypy importlinter elftools unicorn capstone drgn \
        serial zstandard perfetto pyarrow duckdb opentelemetry.sdk pygls
    compile_sources
    touch .venv/run.stamp .venv/dev.stamp
    ;;
site)
    pip_install $(.venv/bin/python tools/requirements_of.py site)
    check_imports mkdocs material mkdocstrings playwright
    touch .venv/site.stamp
    ;;
bench)
    for requirement in $(.venv/bin/python tools/requirements_of.py bench); do
        .venv/bin/python -m pip install -q --disable-pip-version-check "$requirement" >/dev/null 2>&1 ||
            say "not installed: $requirement; the benchmark does without it"
    done
    touch .venv/bench.stamp
    ;;
tools)
    # What a test misses it says itself, with the name of the package.
    packages=""
    for package in gcc g++ libc6-dev libc6-dbg musl-tools binutils gdb strace procps util-linux mount iproute2 e2fsprogs \
        sqlite3 openssl chromium gzip xz-utils redis-tools redis-server \
        man-db groff-base zsh fish vim systemd \
        qemu-system-x86 qemu-system-ppc qemu-user gdbserver gdb-multiarch ovmf u-boot-qemu memtest86+ lz4 zstd \
        babeltrace2 rsyslog rsyslog-gnutls systemd-journal-remote \
        gcc-i686-linux-gnu libc6-dev-i386-cross systemtap-sdt-dev \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-riscv64-linux-gnu libc6-dev-riscv64-cross \
        gcc-s390x-linux-gnu libc6-dev-s390x-cross gcc-powerpc64-linux-gnu libc6-dev-ppc64-cross \
        gcc-powerpc-linux-gnu libc6-dev-powerpc-cross; do
        dpkg -s "$package" >/dev/null 2>&1 || packages="$packages $package"
    done
    if [ -n "$packages" ]; then
        # shellcheck disable=SC2086 - one word a package
        apt_install $packages || say "not installed (no right to):$packages; tests that need them will say so"
    fi
    # Not every release has these.
    for package in ltrace bpftrace uftrace mandoc golang-go rustc postgresql clang llvm \
        nginx-light nodejs default-jdk-headless mariadb-server-core mariadb-client-core; do
        dpkg -s "$package" >/dev/null 2>&1 || apt_install "$package" || say "not installed: $package"
    done
    # The tests of Python's own library are a package for each version, where it has one at all.
    if ! /usr/bin/python3 -c 'import test.test_json' 2>/dev/null; then
        version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
        apt_install "libpython$version-testsuite" || say "not installed: libpython$version-testsuite"
    fi
    touch .venv/tools.stamp
    ;;
selftests)
    # They are somebody else's: unpacked where what is downloaded is kept, and never part of this checkout. Why there are
    # none is kept as well, for the tests that are skipped then.
    cache="${XDG_CACHE_HOME:-$HOME/.cache}/dprobes/selftests"
    mkdir -p "$cache"
    if [ ! -d "$cache/sources" ]; then
        say "fetching the sources of the kernel's selftests (Debian's linux-source-6.1, 140 MB), for $cache"
        work=$(mktemp -d "$cache/work.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        if fetch_selftests "$work" 2>"$work/error"; then
            mv "$work/linux-source-6.1" "$cache/sources"
            rm -f "$cache/reason"
        else
            tail -n 1 "$work/error" >"$cache/reason"
            say "not fetched: $(cat "$cache/reason"); the tests that need them will say so"
        fi
    fi
    # Without them the next run tries again.
    [ ! -d "$cache/sources" ] || touch .venv/selftests.stamp
    ;;
*)
    say "usage: setup.sh run|dev|site|bench|tools|selftests"; exit 2 ;;
esac
