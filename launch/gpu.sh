#!/usr/bin/env bash
# Everything that needs a GPU, in one go: tests, compile gate, tile sizes, kernels, module, training,
# decoding.
#   bash launch/gpu.sh [--stage NAME] [--limit SECONDS] [--out DIR] [--rehearse] [--dry-run]
# Each stage has its own time limit, and one that fails or hangs leaves the next ones running. All of
# them together stay under ten minutes. Figures are written case by case, as JSON, to --out
# (docs/benchmarks/gpu). --stage runs one alone, --limit gives it more time, --rehearse runs tiny
# sizes on the CPU, and --dry-run only prints the commands. The stage sanitizer runs only by name: it
# watches every access to the device's memory, which takes minutes.
# It installs nothing: $PYTHON is used, else .venv where there is one, else python3.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# What is measured is compiled before, by all processors at once; tile sizes come before the rest.
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

out=docs/benchmarks/gpu chosen=() limit='' rehearse='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
    --stage) chosen+=("${2-}") && shift ;;
    --limit) limit=${2-} && shift ;;
    --out) out=${2-} && shift ;;
    --rehearse) rehearse=yes ;;
    --dry-run) dry=yes ;;
    *) die "$1: unknown; there are --stage --limit --out --rehearse --dry-run" ;;
    esac
    shift || die "the last flag lacks its value"
done
[ -n "$out" ] || die "--out lacks its value"
[[ $limit =~ ^[0-9]*$ ]] || die "--limit $limit: give whole seconds"
for stage in "${chosen[@]}"; do
    [ -n "${limits[$stage]-}" ] || die "--stage $stage: choose from ${stages[*]} sanitizer"
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${stages[@]}")
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$root" || exit

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
python=${PYTHON:-$python}

command -v "$python" > /dev/null || die "$python is no program; name a Python in PYTHON"
has() {
    [ -n "$dry" ] || "$python" -c 'import sys
from importlib.util import find_spec
sys.exit(find_spec(sys.argv[1]) is None)' "$1" > /dev/null
}
for package in torch triton; do
    has "$package" || die "$python lacks $package: install it, or name another Python in PYTHON"
done
for package in pytest numpy; do
    has "$package" || say "$python lacks $package: the stage tests will fail, the others need it not"
done
[ -n "$dry$rehearse" ] || "$python" -c 'import os, shutil, sys, sysconfig
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (compiler and headers))' > /dev/null ||
    say "no C compiler or no Python.h here: Triton may fail to build what starts its kernels"
plot=(--plot "$out/module.png")
if ! has matplotlib; then
    say "$python lacks matplotlib: the stage module will draw no picture" && plot=()
fi

arch=sm_90
if [ -n "$rehearse" ]; then
    limits[train-compiled]=400 # a CPU takes minutes to compile for itself
elif [ -z "$dry" ]; then
    arch=$("$python" -c 'import torch; print("sm_%d%d" % torch.cuda.get_device_capability())') ||
        die "PyTorch of $python sees no GPU here; try the script itself with --rehearse"
fi

# The command of a stage, in `command`; $1: stage, $2: its seconds.
bench() {
    command=("$python" -m nsa.bench "$1" --limit "$(($2 * 8 / 10))" --out "$out/$3.json" "${@:4}")
    [ -z "$rehearse" ] || command+=(--device cpu --seconds 0.01 --rounds 2)
}
command_of() {
    local size=()
    case $1 in
    tests | sanitizer)
        local watched=tests/ops/triton/test_gpu.py::test_compute_sanitizer_finds_nothing
        command=("$python" -m pytest -m gpu -q -p no:cacheprovider)
        # These files alone: others import what training needs, which may not be installed here.
        if [ "$1" = tests ]; then
            command+=(tests/ops/triton tests/bench/test_gpu_benches.py "--deselect=$watched")
        else
            command+=("$watched")
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
        # What the goals ask for first: time may end before the list does.
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

[ -n "$dry" ] || mkdir -p "$out" || die "--out $out: cannot be made"
child=''
trap '[ -z "$child" ] || kill -TERM "$child"; exit 130' INT TERM HUP
summary=() failed=0
for stage in "${chosen[@]}"; do
    seconds=${limit:-${limits[$stage]}}
    command_of "$stage" "$seconds"
    if [ -n "$dry" ]; then
        printf '%s\n' "${command[*]}"
        continue
    fi
    say "$stage, $seconds s at most: ${command[*]}" | tee -a "$out/gpu.log"
    began=$SECONDS code=0
    # Not a pipe: what a stage leaves behind could hold it open, and hold up the next stage.
    timeout -k 5 "$seconds" env PYTHONUNBUFFERED=1 "${command[@]}" > >(tee -a "$out/gpu.log") 2>&1 &
    child=$!
    wait "$child" || code=$?
    case $code in
    0) outcome="done" ;;
    124 | 137) outcome="ENDED by its limit" failed=1 ;;
    *) outcome="FAILED with exit code $code" failed=1 ;;
    esac
    summary+=("$(printf '%-16s %5d s  %s' "$stage" $((SECONDS - began)) "$outcome")")
done
[ ${#summary[@]} -eq 0 ] || printf 'gpu: %s\n' "${summary[@]}" | tee -a "$out/gpu.log"
exit "$failed"
