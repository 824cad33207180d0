#!/bin/sh
# Run the whole test suite: first what can run beside other tests, then what needs the machine to itself (ALONE and
# UPROBING in tests/conftest.py). What fails runs once more, alone: the machine may have been too busy for it. What then
# passes is listed above, and what fails again fails the suite; so do many failures, which no busy machine explains.
set -u
python=$1 workers=$2
unexplained=10

run() {
    "$python" -m pytest -q --timeout=600 --timeout-method=signal "$@"
}

status=0
run -n "$workers" --dist loadfile --cache-clear --slices -m "not torture and not alone" || status=$?
run --slices -m "alone and not torture" tests/integration || { code=$?; [ "$status" -gt 1 ] || status=$code; }
[ "$status" -eq 1 ] || exit "$status"
echo "Once more, each alone, what failed:"
run --last-failed --last-failed-no-failures none --maxfail "$unexplained" -m "not torture"
