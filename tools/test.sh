#!/bin/sh
# Run the whole test suite: first what can run beside other tests, then what tolerates only guests beside it, with the
# guests (UPROBING in tests/conftest.py), and last what needs the machine to itself (ALONE). What fails runs once more,
# alone: the machine may have been too busy for it. What then passes is listed above, and what fails again fails the
# suite; so do many failures, which no busy machine explains.
set -u
python=$1 workers=$2
unexplained=10
guests=.pytest_cache/guests # which of these have failed: concurrent runs cannot share a list

run() {
    "$python" -m pytest -q --timeout=600 --timeout-method=signal "$@"
}

# note CODE: the gravest status so far; 1 means that tests have failed, and more that a run was not complete
status=0
note() {
    [ "$1" -le "$status" ] || status=$1
}

run -n "$workers" --dist loadfile --cache-clear --slices -m "not torture and not alone" --ignore tests/kernel
note $?

# Guests are emulated in processes of their own, which no probe of another test affects. A job in the background ignores
# SIGINT, which tests/integration/conftest.py undoes.
output=$(mktemp)
trap 'rm -f "$output"' EXIT
run --slices -m "alone and not quiet and not torture" tests/integration >"$output" 2>&1 &
job=$!
run -o cache_dir="$guests" -n 2 --dist loadfile --cache-clear --slices -m "not torture" tests/kernel
note $?
wait "$job"
note $?
cat "$output"

run --slices -m "quiet and not torture" tests/integration
note $?
[ "$status" -eq 1 ] || exit "$status"

echo "Once more, each alone, what failed:"
status=5 # pytest's, if it has selected no test
for cache in .pytest_cache "$guests"; do
    run -o cache_dir="$cache" --last-failed --last-failed-no-failures none --maxfail "$unexplained" -m "not torture"
    code=$?
    case $code,$status in
    5,*) ;;
    *,5) status=$code ;;
    *) note "$code" ;;
    esac
done
exit "$status"
