#!/bin/sh
# The demonstration: probe records of real programs, as an ordinary user.
set -eu
cd "$(dirname "$0")/.."

# Root shows that no privilege is needed by giving it up, if the checkout is in a place that others can read.
as_user=""
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null 2>&1; then
    drop="setpriv --reuid=65534 --regid=65534 --clear-groups"
    if $drop .venv/bin/dprobes --version >/dev/null 2>&1; then as_user="$drop"; fi
fi

show() { printf '\n\033[1m$ %s\033[0m\n' "$1"; shift; $as_user "$@"; }

printf 'User: %s\n' "$($as_user id -un 2>/dev/null || $as_user id -u)"
cat examples/malloc.rpn
show 'dprobes run examples/malloc.rpn -c "ls /"' \
    .venv/bin/dprobes run examples/malloc.rpn -c "ls /"
show 'dprobes run examples/strings.rpn --format json -c "ls /"' \
    .venv/bin/dprobes run examples/strings.rpn --format json -c "ls /"
printf '\nNext: README.md shows how to write a probe of your own.\n'
