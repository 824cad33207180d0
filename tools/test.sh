#!/bin/sh
# Run the whole test suite. The guests run in the background from the beginning, at low priority: they use the time in
# which the other tests wait. In the foreground are first the tests that can run beside others, then those that tolerate
# only guests beside them (UPROBING in tests/conftest.py), and last, after the guests, those that need the machine to
# themselves (ALONE). What fails runs once more, alone: the machine may have been too busy for it. What then passes is
# listed above, and what fails again fails the suite; so do many failures, which no busy machine explains.
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

# A job in the background ignores SIGINT: the fixture "interruptible" undoes this for what its tests start.
output=$(mktemp)
job=
end() {
    [ -z "$job" ] || kill "$job" 2>/dev/null
    rm -f "$output"
}
trap end EXIT
trap 'exit 130' INT TERM

rm -rf .pytest_cache # --cache-clear of one run would remove the list of the other one
# QEMU runs with nice(1) (tests/guests/emulator.py). It gets little of busy processors, hence the patience.
DPROBES_TEST_PATIENCE=4 "$python" -m pytest -q --timeout=1800 --timeout-method=signal -o cache_dir="$guests" \
    -n 2 --dist loadfile --slices -m "not torture" tests/kernel >"$output" 2>&1 &
job=$!

run -n "$workers" --dist loadfile --slices -m "not torture and not alone" --ignore tests/kernel
note $?
run --slices -m "alone and not quiet and not torture" tests/integration
note $?

wait "$job"
note $?
job=
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
