#!/bin/sh
# Installs what is missing, saying what and why. Arguments name what for:
#   build   compiler and libraries of the program        (make demo)
#   test    cmocka and a Python environment in .venv, on Linux with nvcc where the machine has none
#           (make test)
#   check   clang, formatter, static analysis, fuzzing   (make check)
# Debian and Ubuntu through apt-get, macOS through brew. Installs nothing that is already there.
set -eu
cd "$(dirname "$0")/.."

missing=""
want() { # want <apt package> <brew package or -> <why>: remember a package to install
    case $system in
    apt) package=$1 ;;
    brew) package=$2 ;;
    esac
    [ "$package" = - ] && return 0
    echo "missing: $package ($3)"
    missing="$missing $package"
}
has_command() { command -v "$1" >/dev/null 2>&1; }
has_library() { has_command pkg-config && pkg-config --exists "$1"; }

if [ "$(uname -s)" = Darwin ]; then
    system=brew
    # libedit is part of macOS; brew's copy brings the pkg-config file.
    prefix=$(brew --prefix 2>/dev/null || echo /opt/homebrew)
    export PKG_CONFIG_PATH="$prefix/opt/libedit/lib/pkgconfig:$prefix/opt/openssl/lib/pkgconfig"
elif has_command apt-get; then
    system=apt
else
    echo "lily: this script knows apt-get and brew; install the libraries that README.md lists" >&2
    exit 1
fi

for_build() {
    has_command cc || want gcc - "a C compiler"
    # A compiler alone is not enough: without the C library's headers nothing builds.
    [ $system = brew ] || [ -e /usr/include/stdio.h ] || want libc6-dev - "the C library's headers"
    has_command pkg-config || want pkg-config pkgconf "finds libraries"
    has_library jansson || want libjansson-dev jansson "JSON"
    has_library libpcre2-8 || want libpcre2-dev pcre2 "the tokenizer's regular expression"
    has_library libutf8proc || want libutf8proc-dev utf8proc "Unicode normalisation"
    has_library libcrypto || want libssl-dev openssl "SHA-256"
    has_library libmicrohttpd || want libmicrohttpd-dev libmicrohttpd "the HTTP server"
    has_library libedit || want libedit-dev libedit "line editing in lily chat"
}
for_test() {
    [ $system = brew ] || has_command g++ || want g++ - "compiles for nvcc, and CUDA kernels as C++"
    has_library cmocka || want libcmocka-dev cmocka "unit tests"
    has_command python3 || want python3 python3 "end-to-end tests"
    [ $system = brew ] || python3 -c 'import ensurepip, venv' 2>/dev/null ||
        want python3-venv - "a private Python environment"
}
for_check() {
    has_command clang || want clang llvm "second compiler, sanitizers, fuzzing"
    [ $system = brew ] || clang_runtime_present || want libclang-rt-14-dev - "clang's sanitizer runtimes"
    has_command clang-format || want clang-format clang-format "formatting"
    has_command cppcheck || want cppcheck cppcheck "static analysis"
    [ $system = brew ] || has_command clang-19 || want clang-19 - "executes Metal kernels in tests"
    [ $system = brew ] || has_command ld64.lld-19 || want lld-19 - "links for macOS in tests"
}
clang_runtime_present() {
    has_command clang && [ -e "$(clang -print-file-name=libclang_rt.fuzzer-x86_64.a)" ]
}

# nvcc compiles the CUDA kernels; without one they are left out and the rest is tested.
want_nvcc() {
    [ "$(uname -s)" = Linux ] || return 0
    [ -z "$(tools/nvcc.sh)" ] || return 0
    cmp -s tests/cuda/requirements.txt .venv/requirements-cuda.txt && return 0
    echo "missing: nvcc (CUDA kernels); installing it into .venv, 101 MB"
    if .venv/bin/pip install -q --disable-pip-version-check --no-deps \
        -r tests/cuda/requirements.txt; then
        cp tests/cuda/requirements.txt .venv/requirements-cuda.txt
    else
        echo "no nvcc to be had here: the CUDA backend is left out" >&2
    fi
}

for what in "${@:-build}"; do "for_$what"; done

if [ -n "$missing" ]; then
    if [ $system = brew ]; then
        # shellcheck disable=SC2086 # a list of package names
        brew install $missing
    else
        as_root=""
        if [ "$(id -u)" -ne 0 ]; then
            as_root=sudo
            if ! has_command sudo; then
                echo "lily: these packages need root and there is no sudo; as root, run:" >&2
                echo "    apt-get install$missing" >&2
                exit 1
            fi
        fi
        $as_root apt-get update -qq
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends \
            $missing >/dev/null
    fi
fi

case " $* " in
*" test "*)
    # The environment is made again when its list of packages changes.
    if ! cmp -s tests/requirements.txt .venv/requirements.txt; then
        echo "making .venv (Python packages of the tests)"
        python3 -m venv .venv
        .venv/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt
        cp tests/requirements.txt .venv/requirements.txt
    fi
    want_nvcc
    ;;
esac
