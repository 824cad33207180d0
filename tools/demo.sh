#!/bin/sh
# The demonstration: probe records of real programs, as an ordinary user.
set -eu
cd "$(dirname "$0")/.."

# Root shows that no privilege is needed by giving it up, if the checkout is in a place that others can read.
as_user=""
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null 2>&1; then
    drop="setpriv --reuid=65534 --regid=65534 --clear-groups"
    # dprobes starts its interpreter once more, for the tracer.
    again='import subprocess, sys; sys.exit(subprocess.call([sys.executable, "-c", ""]))'
    if $drop .venv/bin/python -c "$again" >/dev/null 2>&1; then as_user="$drop"; fi
fi

# Print a command as a user would type it, and run it.
show() {
    printf '\n$ dprobes'
    for word in "$@"; do
        case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    $as_user .venv/bin/dprobes "$@"
}

printf '$ id -un\n%s\n\n$ cat examples/malloc.rpn\n' "$($as_user id -un 2>/dev/null || $as_user id -u)"
cat examples/malloc.rpn
show run examples/malloc.rpn -c "ls README.md"
show run examples/strings.rpn -c "ls README.md"
show locate bash:maybe_add_history
printf '\nNext: README.md shows how to write a probe of your own. The command is .venv/bin/dprobes.\n'
