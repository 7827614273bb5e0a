#!/bin/bash
# Everything beyond the tests: format, size and layer rules, warnings with two compilers, static
# analysis, sanitizer builds of the unit tests, a short run of every fuzzer, the self-tests of the
# Metal emulator. All checks run even when one fails; the failures are named at the end.
set -u
cd "$(dirname "$0")/.." || exit 1
tools/deps.sh build test check || exit 1
jobs=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
make="make --no-print-directory -j$jobs"
failed=()

step() { # step <name> <command...>
    local name=$1 began=$SECONDS
    shift
    echo "== $name"
    if "$@"; then
        echo "== $name: ok ($((SECONDS - began)) s)"
    else
        echo "== $name: FAILED ($((SECONDS - began)) s)"
        failed+=("$name")
    fi
}

# The formatter's output differs between major versions; one version is the house's.
format() {
    local tool=clang-format
    command -v clang-format-14 >/dev/null && tool=clang-format-14
    if ! $tool --version | grep -q 'version 14\.'; then
        echo "skipped: needs clang-format 14, found $($tool --version)"
        return 0
    fi
    git ls-files '*.c' '*.h' 'src/*.metal' | xargs $tool --dry-run -Werror
}

# The five lines with which every Metal kernel file begins.
kernel_heads() {
    git ls-files 'src/*.metal' | xargs awk '
        BEGIN {split("Mathematics Layout Threads Fused Bytes", word)}
        FNR > 5 {next}
        index($0, (FNR == 1 ? "/* " : " * ") word[FNR] ": ") != 1 || (FNR == 5) != / \*\/$/ {
            print FILENAME ":" FNR ": found another line, expected one of " word[FNR]; bad = 1
        }
        END {exit bad}'
}

# No file much over a thousand lines.
lengths() {
    ! git ls-files '*.c' '*.h' '*.cu' '*.metal' '*.py' '*.sh' | xargs wc -l |
        awk '$2 != "total" && $1 > 1100 {print $2 ": " $1 " lines, at most 1100"; bad = 1} END {exit !bad}'
}

# Behaviour comes from options and files.
no_environment() {
    ! git grep -n 'getenv' -- 'src/*.c' 'src/*.h'
}

static_analysis() {
    cppcheck --std=c11 --enable=warning,performance,portability --inline-suppr --quiet \
        --suppress=missingIncludeSystem --suppress=normalCheckLevelMaxBranches \
        --suppress='*:*embedded.S' --error-exitcode=1 -j "$jobs" -Iinclude -Isrc src
}

sanitized() { # sanitized <compiler> <sanitizers> <build directory>
    $make CC="$1" SAN="$2" BUILD="$3" unit
}

# The server is the part with threads of its own.
server() {
    $make CC=clang SAN=thread BUILD=build/tsan build/tsan/fake-serve &&
        .venv/bin/python -m pytest -q -rs tests/e2e/test_server.py tests/e2e/test_server_hostile.py \
            --lily=build/tsan/lily
}

fuzzers() {
    $make CC=clang SAN=fuzzer-no-link,address,undefined BUILD=build/fuzz fuzz
}

step format format
step "heads of kernels" kernel_heads
step lengths lengths
step "layer rules" tools/layers.sh
step "no environment variables" no_environment
step "warnings, gcc" $make CC=gcc BUILD=build/gcc all core tests
step "warnings, clang" $make CC=clang BUILD=build/clang all core tests
step "static analysis" static_analysis
step "address and undefined sanitizers" sanitized gcc address,undefined build/asan
step "thread sanitizer" sanitized clang thread build/tsan
step "server, thread sanitizer" server
step fuzzers fuzzers
step "cuda kernels, emulated" $make cuda-emulator
step "metal emulator" $make metal-emulator
step "metal host" $make metal

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "check: all ok"
