#!/usr/bin/env bash
# Run everything that needs a GPU, in three groups of at most ten minutes, the least measured first:
#   1  against peers: other NSA kernels, decoding, whole attention, functions, Nsight Compute
#   2  correct and tuned: the kernel check, GPU tests, tile sizes
#   3  end to end: the recipe under DeepSpeed with ZeRO-1 (killed and resumed) and ZeRO-2, compiled
#      blocks, FlexAttention, training
#   bash launch/gpu.sh [--group 1|2|3] [--stage NAME] [--limit SECONDS] [--out DIR]
#       [--wheels DIR] [--peers DIR] [--rehearse] [--dry-run]
#   bash launch/gpu.sh --build-wheels DIR
# Each stage has a time limit, and the next one runs even if it fails or hangs. Results are saved
# case by case, as JSON, in --out (docs/benchmarks/gpu, or runs/gpu-rehearsal with --rehearse), the
# recipe's runs in --out/runs. A group ends with one archive of them, --out/group-N.tar.gz, which also
# holds the tuned tile sizes (cache/). Copy that cache/ into a new --out and later groups use them.
#   --stage NAME         run one stage; repeatable. Some run only by name:
#                          profile traces two steps of M7C;
#                          step-nsa, step-dense and each with -reentrant: a step in its own process;
#                          sanitizer checks every memory access, which takes minutes
#   --limit SECONDS      time limit of each stage
#   --rehearse           tiny sizes on the CPU
#   --dry-run            only print the commands
#   --build-wheels DIR   download wheels for a machine without network: about 10 MB, Python 3.12.
#                        Nothing else here downloads or installs anything
#   --wheels DIR         make these wheels importable for this call
#   --peers DIR          folder with other NSA implementations
# Python is $PYTHON, else .venv if it exists, else python3.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Where Triton's cache is empty, compiling takes most of the time: `aot` and `aot-tune` compile on all
# CPU cores what later stages launch. A group's limits add up to at most nine and a half minutes.
declare -A groups=(
    [0]="" # the stages of --stage
    [1]="aot peers decode module ncu kernels"
    [2]="doctor tests tests-bench aot-tune tune"
    [3]="aot recipe-zero1 train-compiled flex recipe-zero2 train"
)
by_name="profile step-nsa step-nsa-reentrant step-dense step-dense-reentrant sanitizer"
declare -A limits=(
    [aot]=80 [peers]=115 [decode]=60 [module]=135 [ncu]=120 [kernels]=50
    [doctor]=110 [tests]=180 [tests-bench]=45 [aot-tune]=80 [tune]=150
    [recipe-zero1]=190 [train-compiled]=85 [flex]=60 [recipe-zero2]=95 [train]=50
    [profile]=60 [step-nsa]=60 [step-nsa-reentrant]=60 [step-dense]=30 [step-dense-reentrant]=30
    [sanitizer]=540
)
say() { printf 'gpu: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

flags='--group --stage --limit --out --wheels --peers --build-wheels --rehearse --dry-run'
group_numbers=() named_stages=()
out='' limit='' wheels='' peers='' build='' rehearse='' dry=''
while [ $# -gt 0 ]; do
    flag=$1
    case $flag in
    --group) group_numbers+=("${2-}") && shift ;;
    --stage) named_stages+=("${2-}") && shift ;;
    --limit) limit=${2-} && shift ;;
    --out) out=${2-} && shift && { [ -n "$out" ] || die "--out needs a value"; } ;;
    --wheels) wheels=${2-} && shift ;;
    --peers) peers=${2-} && shift ;;
    --build-wheels) build=${2-} && shift ;;
    --rehearse) rehearse=yes ;;
    --dry-run) dry=yes ;;
    --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit ;;
    *) die "$flag: unknown flag; choose from $flags" ;;
    esac
    shift || die "$flag needs a value"
done
[ -n "$out" ] || { [ -n "$rehearse" ] && out=runs/gpu-rehearsal || out=docs/benchmarks/gpu; }
[[ $limit =~ ^[0-9]*$ ]] || die "--limit $limit: give whole seconds"
for number in "${group_numbers[@]}"; do
    [[ $number =~ ^[123]$ ]] || die "--group $number: choose from 1 2 3"
done
for stage in "${named_stages[@]}"; do
    [ -n "${limits[$stage]-}" ] ||
        die "--stage $stage: choose from ${groups[1]} ${groups[2]} ${groups[3]} $by_name"
done
for folder in "$wheels" "$peers"; do
    [ -d "${folder:-/}" ] || die "$folder: no such folder"
done
[ ${#group_numbers[@]} -gt 0 ] || [ ${#named_stages[@]} -gt 0 ] || group_numbers=(1 2 3)
absolute() { case $1 in '' | /*) printf %s "$1" ;; *) printf %s "$PWD/$1" ;; esac; }
out=$(absolute "$out") wheels=$(absolute "$wheels") peers=$(absolute "$peers")
build=$(absolute "$build")
cd "$root" || exit

python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
python=${PYTHON:-$python}
command -v "$python" > /dev/null || die "$python not found; set PYTHON to a Python interpreter"

# DeepSpeed is a source package: a wheel without compiled ops is pure Python, and enough here.
if [ -n "$build" ]; then
    version=$(sed -n 's/^deepspeed==//p' launch/constraints.txt)
    target=(--only-binary=:all: --python-version 3.12 --implementation cp)
    for platform in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
        target+=(--platform "${platform}_x86_64")
    done
    run=()
    [ -z "$dry" ] || run=(echo)
    "${run[@]}" env DS_BUILD_OPS=0 "$python" -m pip wheel --no-deps --no-build-isolation \
        --no-binary deepspeed --wheel-dir "$build" "deepspeed==$version" &&
        "${run[@]}" "$python" -m pip download "${target[@]}" --dest "$build" \
            einops hjson msgpack ninja py-cpuinfo pydantic 'setuptools<81' &&
        "${run[@]}" "$python" -m pip download "${target[@]}" --no-deps --dest "$build" fla-core &&
        { [ -n "$dry" ] || say "$(du -sh "$build" | cut -f1) in $build"; }
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
    has "$package" || say "$python lacks $package: the stages tests and tests-bench will fail"
done
[ -n "$dry$rehearse" ] || "$python" -c 'import os, shutil, sys, sysconfig
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not (compiler and headers))' > /dev/null ||
    say "no C compiler or no Python.h here: Triton may fail to build its launcher"
[ -n "$wheels" ] || has deepspeed ||
    say "$python lacks deepspeed: the stages recipe-* will fail; give --wheels DIR"

arch=sm_90
if [ -n "$rehearse" ]; then
    for stage in "${!limits[@]}"; do limits[$stage]=400; done # minutes on a busy CPU
    export DS_ACCELERATOR=cpu
elif [ -z "$dry" ]; then
    # This GPU's chip, or the newest older one that the compile check knows: sm_86 for an sm_87.
    arch=$("$python" -c 'import torch
from nsa.ops.triton.configs import CHIPS, chip_of
chip = chip_of(torch.device("cuda"))
older = [x for x in CHIPS if x[:3] == chip[:3] == "sm_" and int(x[3:]) <= int(chip[3:])]
print(max(older, key=lambda x: int(x[3:])) if chip[:3] == "sm_" else chip)') ||
        die "PyTorch of $python sees no GPU of sm_80 or newer; use --rehearse to try the script without one"
fi

tiny=() # a rehearsal's model
for setting in data.seq_len=64 model.layers=1 model.width=64 train.micro_batch=1 \
    train.warmup_steps=1 train.eval_samples=4; do
    tiny+=(--set "$setting")
done

# Set `command` to a stage's command; $1: stage, $2: its seconds.
bench() {
    command=("$python" -m tests.bench "$1" --limit "$(($2 * 8 / 10))" --out "$out/$3.json" "${@:4}")
    [ -z "$rehearse" ] || command+=(--device cpu --seconds 0.01)
}

# Train the recipe under DeepSpeed's launcher: PYTHON RUN-DIR KILL-AT FLAGS... If KILL-AT is not 0,
# `kill -9` its rank after that step, resume, and compare the losses of steps that ran twice.
# shellcheck disable=SC2329 # a stage's command calls it
run_recipe() {
    local python=$1 run_dir=$2 kill_at=$3 port step saved
    shift 3
    trap : TERM # outlive the launcher: at the limit `timeout` then also ends a rank that does
    launch() {
        "$python" -m deepspeed.launcher.runner --num_gpus 1 --master_port "$port" recipes/m7c.py \
            --run-dir "$run_dir" "$@" || [ $? -eq 3 ] # No-Go: a verdict on a run that ended
    }
    ready() { # a step after KILL-AT and after a checkpoint is logged
        saved=$(sed 's/^step0*//' "$run_dir/checkpoints/latest")
        step=$(tail -n 1 "$run_dir/metrics.csv" | cut -d, -f1)
        [ "$step" -ge "$kill_at" ] && [ "$step" -gt "$saved" ]
    } 2> /dev/null
    port=$("$python" -c 'from nsa.system import free_port; print(free_port())')
    if [ "$kill_at" = 0 ]; then
        launch "$@"
        return
    fi
    launch "$@" &
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

recipe() {
    local zero=$1 kill_at=0 every=50 size=(--profile production --steps 100)
    [ "$zero" != zero1 ] || { kill_at=75 && size=(--profile production --steps 200); }
    if [ -n "$rehearse" ]; then
        every=4 size=(--profile demo --steps 12 "${tiny[@]}")
        [ "$zero" != zero1 ] || kill_at=5
    fi
    command=(bash -c 'run_recipe "$@"' run_recipe
        "$python" "$out/runs/$zero-$(date +%H%M%S)" "$kill_at" "${size[@]}"
        --deepspeed_config "ds_configs/${zero}_pcie.json" --set data.source=embedded
        --set data.tokenizer=byte --set checkpoint.keep=2 --set "checkpoint.every=$every")
}
command_of() {
    local size=() shapes=(--shapes "m7c,64x4x128" --lengths "2k,8k,32k,64k") layers=()
    if [ -n "$rehearse" ]; then
        shapes=(--shapes 4x2x16 --lengths 128 --tokens 128)
        layers=(--layers 1 --vocab 64)
    fi
    case $1 in
    tests | tests-bench | sanitizer)
        local sanitizer=tests/ops/triton/test_gpu.py::test_compute_sanitizer_finds_nothing
        command=("$python" -m pytest -m gpu -v --tb=short -p no:cacheprovider)
        # Only these files: others import training packages, which may be missing here.
        case $1 in
        tests)
            command+=(tests/ops/triton "--deselect=$sanitizer")
            # A file's kernels are compiled once, on all CPU cores; other files meanwhile run.
            [ -n "$rehearse" ] || ! has xdist || command+=(-n 3 --dist loadfile)
            ;;
        tests-bench) command+=(tests/bench/test_{gpu_benches,harness}.py) ;;
        sanitizer) command+=("$sanitizer") ;;
        esac
        ;;
    aot | aot-tune)
        size=(--benchmarks)
        [ "$1" = aot ] || size=(--tune)
        [ -z "$rehearse" ] || size=(--operation window_attention --jobs 1)
        command=("$python" -m tests.bench aot --arch "$arch" --out "$out/$1.json" "${size[@]}")
        ;;
    doctor) command=("$python" -m nsa.model.kernel_check) ;;
    profile)
        size=(--lengths 2k --tokens 16384)
        [ -z "$rehearse" ] || size=(--lengths 64 --tokens 64)
        bench profile "$2" profile "${size[@]}" "${layers[@]}"
        ;;
    ncu)
        size=(--lengths 2k --tokens 16384 --layers 2 --seconds 0)
        [ -z "$rehearse" ] || size=(--lengths 64 --tokens 64 "${layers[@]}")
        bench train "$2" ncu --kinds nsa "${size[@]}"
        # The kernels of the second step; without Nsight Compute the step alone runs.
        [ -n "$rehearse" ] || ! command -v ncu > /dev/null ||
            command=(ncu --set full --clock-control none --kill yes --kernel-name 'regex:_kernel$'
                --launch-skip 50 --launch-count 50 --log-file "$out/ncu.txt" "${command[@]}")
        ;;
    step-*)
        # One process per step: peak memory is its own.
        local kind=${1#step-}
        size=(--kinds "${kind%-reentrant}" --lengths 2k --tokens 16384)
        [ "$kind" = "${kind%-reentrant}" ] || size+=(--checkpointing reentrant)
        [ -z "$rehearse" ] || size+=(--lengths 64 --tokens 64)
        bench train "$2" "$1" "${size[@]}" "${layers[@]}"
        ;;
    tune)
        command=("$python" -m nsa.ops.tune 12x2x64 64x4x128)
        [ -z "$rehearse" ] || command=("$python" -m pytest -q tests/ops/triton/test_tune.py)
        ;;
    module) bench module "$2" module "${shapes[@]}" --kinds module \
        --against sdpa-flash,sdpa-cudnn ;;
    flex) bench module "$2" flex "${shapes[@]}" --kinds module --against flex-causal ;;
    peers) bench module "$2" peers "${shapes[@]}" --kinds peers,same-pattern ;;
    kernels) bench module "$2" kernels "${shapes[@]}" --kinds parts ;;
    train | train-compiled)
        [ "$1" = train ] || size+=(--compile)
        [ -z "$rehearse" ] || size+=(--lengths 128 --tokens 128)
        bench train "$2" "$1" "${size[@]}" "${layers[@]}"
        ;;
    decode)
        [ -z "$rehearse" ] || size=(--lengths 128 --batches 1)
        bench decode "$2" decode "${size[@]}" "${layers[@]}"
        ;;
    recipe-*) recipe "${1#recipe-}" ;;
    esac
}

run_stages() {
    local stage seconds start code outcome logger wait_round
    for stage in "$@"; do
        seconds=${limit:-${limits[$stage]}}
        command_of "$stage" "$seconds"
        if [ -n "$dry" ]; then
            printf '%s\n' "${command[*]}"
            continue
        fi
        say "$stage, $seconds s at most: ${command[*]}" | tee -a "$out/gpu.log"
        start=$SECONDS code=0
        # Not a pipe: a process that the stage leaves behind could hold it open and block the next
        # stage.
        exec 3> >(tee -a "$out/gpu.log")
        logger=$!
        timeout -k 5 "$seconds" env PYTHONUNBUFFERED=1 "${command[@]}" >&3 2>&1 3>&- &
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
        summary+=("$(printf '%-20s %5d s  %s' "$stage" $((SECONDS - start)) "$outcome")")
    done
}

child='' site=''
if [ -z "$dry" ]; then
    mkdir -p "$out" || die "--out $out: cannot be created"
    export XDG_CACHE_HOME=$out/cache # tuned tile sizes
    if [ -n "$wheels" ]; then
        site=$(mktemp -d) || exit
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" \
            "$wheels"/*.whl || die "--wheels $wheels: could not be unpacked"
    fi
    # Recipes run as files: an `nsa` that is not installed is found here.
    for folder in "$peers" "$site" "$root"; do
        [ -z "$folder" ] || export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
    done
fi
trap '[ -z "$site" ] || rm -rf "$site"' EXIT
trap '[ -z "$child" ] || kill -TERM "$child"; exit 130' INT TERM HUP
summary=() failed=0
# Stages without a group are group 0, which has no archive.
[ ${#named_stages[@]} -eq 0 ] || group_numbers=("${group_numbers[@]:-0}")
for number in "${group_numbers[@]}"; do
    read -ra stages <<< "${groups[$number]}"
    [ ${#named_stages[@]} -eq 0 ] || stages=("${named_stages[@]}")
    run_stages "${stages[@]}"
    [ -z "$dry" ] && [ "$number" != 0 ] || continue
    printf 'gpu: %s\n' "${summary[@]}" > "$out/summary-$number.txt"
    archive=$(mktemp) || exit
    # Exit code 1: a file changed meanwhile, such as the log of a process that a stage left behind.
    tar -C "$out" -czf "$archive" --exclude=checkpoints --exclude='*.tar.gz' . || [ $? -eq 1 ] ||
        die "no archive: tar failed"
    mv "$archive" "$out/group-$number.tar.gz"
    say "$(du -h "$out/group-$number.tar.gz" | cut -f1) in $out/group-$number.tar.gz"
done
[ ${#summary[@]} -eq 0 ] || printf 'gpu: %s\n' "${summary[@]}" | tee -a "$out/gpu.log"
exit "$failed"
