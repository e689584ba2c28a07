#!/usr/bin/env bash
# Everything that needs a GPU in one command: tests, compile gate, tile sizes, kernels, module,
# training, decoding.
#   bash launch/gpu.sh [--stage NAME] [--limit SECONDS] [--out DIR] [--rehearse] [--dry-run]
# Each stage has a time limit, and the next one runs even if it fails or hangs. All stages together
# take less than ten minutes. Results are saved case by case, as JSON, in --out (docs/benchmarks/gpu).
# --stage runs one stage, --limit sets its seconds, --rehearse runs tiny sizes on the CPU, --dry-run
# only prints the commands. The stage sanitizer runs only by name: checking every memory access takes
# minutes. Nothing is installed; Python is $PYTHON, else .venv if it exists, else python3.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Kernels are compiled first, on all CPU cores; tile sizes are tuned before the rest is measured.
stages=(tests aot tune kernels module train train-compiled decode)
declare -A limits=(
    [tests]=140 [aot]=60 [tune]=60 [kernels]=40 [module]=110 [train]=40 [train-compiled]=90
    [decode]=40 [sanitizer]=540
)

say() { printf 'gpu: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

out=docs/benchmarks/gpu selected=() limit='' rehearse='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --stage) selected+=("${2-}") && shift ;;
    --limit) limit=${2-} && shift ;;
    --out) out=${2-} && shift ;;
    --rehearse) rehearse=yes ;;
    --dry-run) dry=yes ;;
    *) die "$1: unknown; there are --stage --limit --out --rehearse --dry-run" ;;
    esac
    shift || die "the last flag needs a value"
done
[ -n "$out" ] || die "--out needs a value"
[[ $limit =~ ^[0-9]*$ ]] || die "--limit $limit: give whole seconds"
for stage in "${selected[@]}"; do
    [ -n "${limits[$stage]-}" ] || die "--stage $stage: choose from ${stages[*]} sanitizer"
done
[ ${#selected[@]} -gt 0 ] || selected=("${stages[@]}")
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$root" || exit

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
python=${PYTHON:-$python}

command -v "$python" > /dev/null || die "$python not found; set PYTHON to a Python interpreter"
has() {
    [ -n "$dry" ] || "$python" -c 'import sys
from importlib.util import find_spec
sys.exit(find_spec(sys.argv[1]) is None)' "$1" > /dev/null
}
for package in torch triton; do
    has "$package" || die "$python lacks $package: install it, or name another Python in PYTHON"
done
for package in pytest numpy; do
    has "$package" || say "$python lacks $package: the stage tests will fail, the others will not"
done
[ -n "$dry$rehearse" ] || "$python" -c 'import os, shutil, sys, sysconfig
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (compiler and headers))' > /dev/null ||
    say "no C compiler or no Python.h here: Triton may fail to build its launcher"
plot=(--plot "$out/module.png")
if ! has matplotlib; then
    say "$python lacks matplotlib: the stage module will not plot" && plot=()
fi

arch=sm_90
if [ -n "$rehearse" ]; then
    limits[train-compiled]=400 # compiling for a CPU takes minutes
elif [ -z "$dry" ]; then
    arch=$("$python" -c 'import torch; print("sm_%d%d" % torch.cuda.get_device_capability())') ||
        die "PyTorch of $python sees no GPU; use --rehearse to try the script without one"
fi

# Set `command` to a stage's command; $1: stage, $2: its seconds.
bench() {
    command=("$python" -m nsa.bench "$1" --limit "$(($2 * 8 / 10))" --out "$out/$3.json" "${@:4}")
    [ -z "$rehearse" ] || command+=(--device cpu --seconds 0.01 --rounds 2)
}
command_of() {
    local size=()
    case $1 in
    tests | sanitizer)
        local sanitizer=tests/ops/triton/test_gpu.py::test_compute_sanitizer_finds_nothing
        command=("$python" -m pytest -m gpu -q -p no:cacheprovider)
        # Only these files: others import training packages, which may be missing here.
        if [ "$1" = tests ]; then
            command+=(tests/ops/triton tests/bench/test_gpu_benches.py "--deselect=$sanitizer")
        else
            command+=("$sanitizer")
        fi
        ;;
    aot)
        size=(--benchmarks)
        [ -z "$rehearse" ] || size=(--operation window_attention --jobs 1)
        command=("$python" -m nsa.bench aot --arch "$arch" --out "$out/aot.json" "${size[@]}")
        ;;
    tune)
        [ -z "$rehearse" ] || size=(--shapes 4x2x16 --lengths 128 --tokens 128)
        bench tune "$2" tune "${size[@]}"
        ;;
    kernels)
        size=(--backends triton)
        [ -z "$rehearse" ] || size=(--shapes 4x2x16 --lengths 128 --tokens 128)
        bench kernels "$2" kernels "${size[@]}"
        ;;
    module)
        # The lengths of the goals first: time may run out before the list ends.
        size=(--shapes 64x4x128,m7c,16x4x64,paper --lengths 8k,64k,4k,6k,2k,32k,16k,1k,128k)
        [ -z "$rehearse" ] || size=(--shapes 4x2x16 --lengths 128,256 --tokens 256)
        bench module "$2" module "${plot[@]}" "${size[@]}"
        ;;
    train | train-compiled)
        [ -z "$rehearse" ] || size=(--lengths 128 --tokens 128 --layers 1 --vocab 64)
        [ "$1" = train ] || size+=(--compile)
        bench train "$2" "$1" "${size[@]}"
        ;;
    decode)
        [ -z "$rehearse" ] || size=(--lengths 128 --batches 1 --layers 1 --vocab 64)
        bench decode "$2" decode "${size[@]}"
        ;;
    esac
}

[ -n "$dry" ] || mkdir -p "$out" || die "--out $out: cannot be created"
child=''
trap '[ -z "$child" ] || kill -TERM "$child"; exit 130' INT TERM HUP
summary=() failed=0
for stage in "${selected[@]}"; do
    seconds=${limit:-${limits[$stage]}}
    command_of "$stage" "$seconds"
    if [ -n "$dry" ]; then
        printf '%s\n' "${command[*]}"
        continue
    fi
    say "$stage, $seconds s at most: ${command[*]}" | tee -a "$out/gpu.log"
    start=$SECONDS code=0
    # Not a pipe: a process that the stage leaves behind could hold it open and block the next stage.
    timeout -k 5 "$seconds" env PYTHONUNBUFFERED=1 "${command[@]}" > >(tee -a "$out/gpu.log") 2>&1 &
    child=$!
    wait "$child" || code=$?
    case $code in
    0) outcome="done" ;;
    124 | 137) outcome="ENDED by its limit" failed=1 ;;
    *) outcome="FAILED with exit code $code" failed=1 ;;
    esac
    summary+=("$(printf '%-16s %5d s  %s' "$stage" $((SECONDS - start)) "$outcome")")
done
[ ${#summary[@]} -eq 0 ] || printf 'gpu: %s\n' "${summary[@]}" | tee -a "$out/gpu.log"
exit "$failed"
