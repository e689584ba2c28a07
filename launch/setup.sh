#!/usr/bin/env bash
# Create .venv in the repository's root and install the pinned packages into it.
# Call it at any time, from any folder: it keeps a finished .venv and rebuilds a broken one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
installed=$venv/.nsa-installed # fingerprint of a finished .venv; written last
unfinished=$venv/.nsa-unfinished # exists while pip writes: after an interruption .venv is rebuilt
packages=("$root/pyproject.toml" "$root/launch/constraints.txt")

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# The required packages and the path, because scripts inside .venv contain the path.
fingerprint() { printf '%s %s\n' "$root" "$(cat "${packages[@]}" | cksum)"; }

is_ready() {
    [ "$(cat "$installed" 2>/dev/null)" = "$(fingerprint)" ] && "$venv/bin/python" -c '' 2>/dev/null
}

# Whether pip can install into the existing .venv.
pip_can_continue() {
    [ ! -e "$unfinished" ] && grep -qsF "$venv/bin/python" "$venv/bin/pip" &&
        "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# torch.compile and Triton need a compiler at run time: fail now rather than an hour into a run.
find_compiler() {
    local name
    for name in ${CXX:-c++ g++ clang++}; do
        command -v "$name" >/dev/null && return
        [ -z "${CXX:-}" ] || return 1 # the variable's first word is the compiler
    done
    return 1
}

find_python() {
    local names=(python3 python3.13 python3.12 python3.11 python3.10) name path
    [ -z "${PYTHON:-}" ] || names=("$PYTHON")
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            path=$(command -v "$name")
            # In an active .venv this is the Python that is about to be removed.
            [ "${path#"$venv/"}" = "$path" ] ||
                path=$("$name" -c 'import sys; print(sys._base_executable)')
            printf '%s\n' "$path"
            return
        fi
    done
    return 1
}

# Of two calls at once the second waits: both would write into one .venv.
take_lock() {
    command -v flock >/dev/null || return 0
    exec 9>"$root/.venv.lock"
    flock -n 9 && return
    say "another setup is running in $root; waiting for it"
    flock 9
}

make_venv() {
    local python
    python=$(find_python) || die "needs Python 3.10 or newer and found none as ${PYTHON:-python3};" \
        "install one, or name it: PYTHON=/path/to/python3 bash launch/setup.sh"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv or no ensurepip; install them (Debian, Ubuntu: apt install python3-venv)"
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
        2>/dev/null ||
        die "$python has no Python.h, which compiled ops need; install it (Debian, Ubuntu: apt install python3-dev)"
    [ ! -e "$venv" ] || say ".venv is unfinished, broken or from another folder: rebuilding it"
    rm -rf "$venv"
    say "creating .venv with $("$python" --version) ($python)"
    "$python" -m venv "$venv" || die "could not create .venv; the reason is above"
}

pip_install() {
    "$venv/bin/python" -I -m pip install -qq --disable-pip-version-check \
        -c "$root/launch/constraints.txt" "$@" && return
    rm -f "$unfinished" # pip failed cleanly; what it installed so far is complete
    die "pip could not install the packages; the reason is above; fix it and run this again"
}

# uv installs the many small packages in a third of pip's time, but it does not know pip's settings.
uv_install() {
    ! "$venv/bin/python" -I -m pip config list | grep -Eq '\.(index-url|no-index)=' &&
        "$venv/bin/python" -I -m pip install -qq --disable-pip-version-check uv 2>/dev/null &&
        "$venv/bin/uv" pip install -q --python "$venv/bin/python" \
            -c "$root/launch/constraints.txt" "$@" 2>/dev/null
}

install() {
    pip_can_continue || make_venv
    rm -f "$installed"
    touch "$unfinished"
    # Torch first and alone: together with packages that require "torch", pip may pick another build.
    say "installing torch (a CUDA build is a download of about 3 GB)"
    pip_install torch
    say "installing DeepSpeed, the other packages, and this project (editable)"
    uv_install -e "${root}[dev]" || pip_install -e "${root}[dev]"
    rm -f "$unfinished"
    fingerprint >"$installed"
    say "done in $SECONDS s"
}

find_compiler || die "needs a C++ compiler and found none as ${CXX:-c++, g++ or clang++};" \
    "install one (Debian, Ubuntu: apt install g++)"
if ! is_ready; then
    take_lock
    is_ready || install
fi
say ".venv is ready"
