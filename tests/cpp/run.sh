#!/bin/sh
# Build and run what tests the core: run.sh test | fuzz | sanitize. Everything goes below build/.
#
#   test      the C++ tests
#   fuzz      the fuzzers, FUZZ_SECONDS (10) each: libFuzzer's with clang, otherwise mutations of the corpus.
#             FUZZ_KEEP=1 adds what they find to the corpus, minimised
#   sanitize  the C++ tests under the address, undefined and thread sanitizers, then the conformance tests with a
#             module built for the first two
set -eu
cd "$(dirname "$0")/../.."
seconds=${FUZZ_SECONDS:-10}
jobs=${JOBS:-2}
python=${PYTHON:-.venv/bin/python}

# Folder, then options of cmake.
build() {
    folder=$1
    shift
    cmake -S tests/cpp -B "$folder" -DCMAKE_BUILD_TYPE=Debug "$@" >"$folder.log" 2>&1 || {
        cat "$folder.log" >&2
        exit 1
    }
    cmake --build "$folder" -j "$jobs" >"$folder.log" 2>&1 || {
        cat "$folder.log" >&2
        exit 1
    }
}

tests() {
    ctest --test-dir "$1" --output-on-failure -j "$jobs"
}

sanitized() {
    build "build/cpp-$1" -DCMAKE_CXX_FLAGS_DEBUG=-O1 "-DPACELINE_SANITIZE=$2"
    tests "build/cpp-$1"
}

# Python is not instrumented, so the sanitizer's library comes first; leaks are Python's own way to end.
conformance() {
    cmake -S . -B build/asan -DSKBUILD_PROJECT_NAME=paceline -DSKBUILD_PROJECT_VERSION=0 -DCMAKE_BUILD_TYPE=Debug \
        -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DPACELINE_SANITIZE=address,undefined \
        "-DPython_EXECUTABLE=$PWD/$python" >build/asan.log 2>&1 || { cat build/asan.log >&2; exit 1; }
    cmake --build build/asan -j "$jobs" >build/asan.log 2>&1 || { cat build/asan.log >&2; exit 1; }
    SANITIZED_MODULE=$(find "$PWD/build/asan/csrc" -name '_c10d*.so')
    export SANITIZED_MODULE PYTHONPATH="$PWD/tests/cpp/sanitized"
    export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
    LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)" "$python" -m pytest -q \
        -o timeout=600 -p no:cacheprovider tests/conformance/test_operations.py \
        tests/conformance/test_point_to_point.py tests/conformance/test_groups.py \
        tests/conformance/test_reductions.py tests/conformance/test_works.py tests/conformance/test_arguments.py
}

mkdir -p build
case ${1:-} in
test)
    build build/cpp -DCMAKE_CXX_FLAGS_DEBUG=-O1
    tests build/cpp
    ;;
fuzz)
    compiler=${CXX:-$(command -v clang++ || command -v c++)}
    folder=build/fuzz-${compiler##*/}  # another compiler needs another cache
    build "$folder" -DPACELINE_FUZZERS=ON -DPACELINE_SANITIZE=address,undefined -DCMAKE_CXX_FLAGS_DEBUG=-O1 \
        "-DCMAKE_CXX_COMPILER=$compiler"
    for target in frame handshake packet port stream; do
        corpus=tests/cpp/corpus/$target
        if grep -q '^CMAKE_CXX_COMPILER:.*clang' "$folder/CMakeCache.txt"; then
            found=$folder/found/$target
            mkdir -p "$found"
            echo "fuzz $target, $seconds s"
            "$folder/fuzz/fuzz_$target" -max_total_time="$seconds" -max_len=128 -timeout=30 \
                -artifact_prefix="$folder/found/" "$found" "$corpus" >"$folder/$target.log" 2>&1 || {
                cat "$folder/$target.log" >&2
                exit 1
            }
            grep DONE "$folder/$target.log"
            if [ "${FUZZ_KEEP:-}" ]; then
                "$folder/fuzz/fuzz_$target" -merge=1 -use_counters=0 -max_len=128 "$corpus" "$found" >"$folder/$target.log" 2>&1
            fi
        else
            FUZZ_SECONDS=$seconds "$folder/fuzz/fuzz_$target" "$corpus"
        fi
    done
    ;;
sanitize)
    sanitized address address,undefined
    sanitized thread thread
    conformance
    ;;
*)
    echo "run.sh test | fuzz | sanitize" >&2
    exit 2
    ;;
esac
