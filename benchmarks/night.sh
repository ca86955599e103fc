#!/usr/bin/env bash
# A long run of `optimize` that outlives the shell that started it, from a copy of the tree, and what it has left so far.
#
#   benchmarks/night.sh start PLACE [arguments of optimize]     returns at once; without arguments: Llama-1B for 20 minutes
#   benchmarks/night.sh collect PLACE PREFIX                    PREFIX.json, PREFIX-ledger.jsonl.gz, PREFIX.png; any time
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
what="${1:?start or collect}"
place="$(mkdir -p "${2:?a folder for the run}" && cd "$2" && pwd)"
shift 2
python="${PYTHON:-python3}"

case "$what" in
start)
    [ ! -e "$place/started" ] || { echo "a run was started in $place before" >&2; exit 1; }
    [ $# -gt 0 ] || set -- llama-1b --random-weights --dtype bfloat16 --input-shape 1,512 --device cuda --top 6 --budget 1200s
    mkdir -p "$place/tree"
    cp -a "$root/autokernel_hf" "$root/benchmarks" "$root/pyproject.toml" "$place/tree/"
    date -u +%FT%TZ > "$place/started"
    cd "$place"
    export PYTHONPATH="$place/tree${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
    export AUTOKERNEL_HF_CACHE="${AUTOKERNEL_HF_CACHE:-$place/cache}"
    setsid nohup bash -c '
        place=$1 python=$2; shift 2
        if command -v nvidia-smi > /dev/null; then
            # One GPU, or all that a run was given: of idle ones beside them nothing is to be told.
            nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --format=csv,noheader,nounits -l 1 \
                --query-gpu=timestamp,utilization.gpu,power.draw,clocks.sm > "$place/samples.csv" 2>&1 &
            sampler=$!
        fi
        "$python" -m autokernel_hf optimize "$@" --out "$place/runs" --json > "$place/result.json" 2> "$place/night.log"
        echo "exit code $? at $(date -u +%FT%TZ)" > "$place/ended"
        [ -z "${sampler:-}" ] || kill "$sampler"
    ' night "$place" "$python" "$@" > "$place/shell.log" 2>&1 < /dev/null &
    echo "$!" > "$place/pid"
    sleep "${WATCH:-20}"
    cat "$place/night.log" "$place/shell.log"
    ;;
collect)
    echo "started $(cat "$place/started"); $(cat "$place/ended" 2> /dev/null || echo "it still runs")"
    prefix="$(mkdir -p "$(dirname "$1")" && cd "$(dirname "$1")" && pwd)/$(basename "$1")"
    run="$(ls -d "$place"/runs/*/ 2> /dev/null | head -1)"
    [ -n "$run" ] || { cat "$place/night.log" "$place/shell.log"; echo "there is no run folder yet" >&2; exit 1; }
    cd "$place" && PYTHONPATH="$place/tree${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" tree/benchmarks/night.py "$run" --samples samples.csv --out "$prefix"
    tail -n "${LINES_SHOWN:-40}" "$place/night.log" | cut -c1-300
    ;;
*)
    echo "start or collect, not $what" >&2
    exit 2
    ;;
esac
