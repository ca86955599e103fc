#!/usr/bin/env bash
# All that needs a GPU, in one call: benchmarks/on_gpu.sh OUT PHASE... with the phases tests, starters, bench, speed, models.
# Each phase has a time limit and its own log in OUT; a short summary of all comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
out="$1"
shift
mkdir -p "$out"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" PYTHONUNBUFFERED=1 AUTOKERNEL_HF_CACHE="${AUTOKERNEL_HF_CACHE:-/tmp/autokernel_hf}"
python="${PYTHON:-python3}"
limit="${LIMIT:-240}"
summary=()

phase() { # name, seconds, command...
    local name="$1" seconds="$2" started=$SECONDS
    shift 2
    timeout -k 10 "$seconds" "$@" >"$out/$name.log" 2>&1
    local code=$?
    summary+=("== $name: exit code $code after $((SECONDS - started)) s" "$(tail -n "${LINES_SHOWN:-25}" "$out/$name.log")")
}

"$python" -m autokernel_hf doctor >"$out/doctor.log" 2>&1
for wanted in "$@"; do
    case "$wanted" in
    tests)
        phase tests "$limit" "$python" -m pytest -m gpu --require-gpu -q -n "${WORKERS:-8}" -p no:cacheprovider ${TESTS:-tests}
        ;;
    starters)
        phase starters "$limit" "$python" benchmarks/check_starters.py --out "$out/starters.json" ${STARTERS:-}
        ;;
    bench)
        for file in ${FILES:-autokernel_hf/kernels/triton/rmsnorm.py autokernel_hf/kernels/cuda/rmsnorm.cu}; do
            phase "bench-$(basename "$file")" "$limit" "$python" -m autokernel_hf bench "$file" --device cuda --debug
        done
        ;;
    speed)
        phase speed "$limit" "$python" benchmarks/judge_speed.py cuda --out "$out/judge-speed.json" --budget "$((limit - 40))" ${SPEED:-}
        ;;
    models)
        phase models "$limit" "$python" benchmarks/whole_models.py cuda --out "$out/whole-models.json" --budget "$((limit - 15))" ${MODELS:-}
        ;;
    *)
        echo "unknown phase $wanted" >&2
        exit 2
        ;;
    esac
done
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
cat "$out/doctor.log"
printf '%s\n' "${summary[@]}"
