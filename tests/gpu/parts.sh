# Sourced by the scripts beside it, from the root of the project: `part`, and the exit status of each in `codes`.
# $1: the folder for results, which becomes $out. ONLY: names of the parts to run (default: all).
set -u
out=${1:?folder for the results}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
codes=()

part() { # seconds at most, name, command: its output is shown and kept in $out/name.log
    local limit=$1 name=$2 start=$SECONDS
    shift 2
    [[ " ${ONLY:-$name} " == *" $name "* ]] || return 0
    echo "=== $name"
    setsid timeout -k 5 "$limit" "$@" > >(tee "$out/$name.log") 2>&1 &
    local session=$! code=0
    wait "$session" || code=$?
    pkill -KILL -s "$session" # what a program that was killed has left: the next part needs the GPU
    codes+=("$name: exit $code, $((SECONDS - start)) s")
}
