"""How often the judge is wrong about speed: the same kernel against itself, and against one that does 2 % more work.

    python benchmarks/judge_study.py cpu --trials 200 --out benchmarks/results/judge-study-cpu.json
    python benchmarks/judge_study.py cuda --trials 200 --planted 100 --epsilon 0.005 --out ...

Each trial is an experiment as the search makes it: a candidate against the incumbent, in processes of their own, whose
verdict is the interval of the paired ratio. The two sources differ in a comment, so that both are built and run apart.
In a planted trial the incumbent computes the first 2 % of the rows twice. Sessions of `--session` trials are opened
anew, since what is fixed for a process (where its memory lies) must vary as well. Trials that the file has already are
kept, and the rest added.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from autokernel_hf.evaluate import Judge
from autokernel_hf.gpu import device_info
from autokernel_hf.judge.statistics import verdict
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import Backend, Candidate, Evaluation, Workload

CPP = """// kernel_type: rmsnorm
// supports: dtype=float32
// trial {trial}
#include "autokernel.h"
#include <math.h>

static void normalize(const float *in, const float *w, float *result, int64_t n, double eps, double offset) {{
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double)in[i] * in[i];
  const float scale = (float)(1 / sqrt(sum / (double)n + eps));
  for (int64_t i = 0; i < n; ++i) ((volatile float *)result)[i] = in[i] * scale * (w[i] + (float)offset);
}}

extern "C" int rmsnorm(const AkTensor *x, const AkTensor *weight, double eps, double offset, const AkTensor *out,
                       const AkContext *ctx) {{
  if (x->dtype != AK_F32 || weight->dtype != AK_F32) return AK_UNSUPPORTED;
  const int64_t n = x->sizes[x->ndim - 1];
  int64_t rows = 1;
  for (int d = x->ndim - 1; d >= 0; rows *= x->sizes[d--]) {{
    if (x->sizes[d] != 1 && x->strides[d] != rows) return AK_NEED_CONTIGUOUS;
  }}
  if (weight->strides[0] != 1) return AK_NEED_CONTIGUOUS;
  rows /= n;
  const float *in = (const float *)x->data, *w = (const float *)weight->data;
  float *result = (float *)out->data;
  const int64_t again = rows * {more} / 100;
#pragma omp parallel for num_threads(ctx->num_threads) schedule(static)
  for (int64_t row = 0; row < rows + again; ++row) {{
    const int64_t r = row < rows ? row : (row - rows) * {stride} % rows;
    normalize(in + r * n, w, result + r * n, n, eps, offset);
  }}
  return AK_OK;
}}
"""

TRITON = '''"""One row a program; trial {trial}."""

KERNEL_TYPE = "rmsnorm"
BACKEND = "triton"

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, w_ptr, out_ptr, rows, n, row_step, column_step, w_step, eps, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row = tl.where(row < rows, row, (row - rows) * 50 % rows).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * row_step + columns * column_step, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    w = tl.load(w_ptr + columns * w_step, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + columns, (x * scale * (w + offset)).to(out_ptr.dtype.element_ty), mask=mask)


def kernel_fn(x, weight, eps, offset):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, x.shape[-1])
    rows, n = flat.shape
    if out.numel():
        kernel[(rows + rows * {more} // 100,)](
            flat, weight, out, rows, n, flat.stride(0), flat.stride(1), weight.stride(0), eps, offset,
            BLOCK=triton.next_power_of_2(n), num_warps=8,
        )
    return out
'''


def candidate(backend: Backend, trial: int, *, more: int = 0) -> Candidate:
    text = CPP if backend == "cpp" else TRITON
    return Candidate(
        kernel_type="rmsnorm", backend=backend, source=text.format(trial=trial, more=more, stride=50)
    )


def workload(device: str) -> Workload:
    rows, dtype = (1024, "float32") if device == "cpu" else (8192, "float16")
    return kernel_type("rmsnorm").build({"M": rows, "N": 2048}, dtype, {})


def outcome(evaluation: Evaluation, epsilon: float, load: float) -> dict[str, object]:
    (timed,) = evaluation.workloads
    interval = timed.ci95_vs_incumbent
    return {
        "status": evaluation.status,
        "verdict": verdict(interval, epsilon) if interval else "none",
        "speedup": timed.speedup_vs_incumbent,
        "ci95": interval,
        "seconds": round(evaluation.seconds, 2),
        "load": round(load, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--trials", type=int, default=200, help="of a kernel against itself")
    parser.add_argument("--planted", type=int, default=0, help="against one that does 2 per cent more")
    parser.add_argument("--epsilon", type=float, default=0.01)
    parser.add_argument("--session", type=int, default=20, help="trials in one session of the judge")
    parser.add_argument("--budget", type=float, default=36000, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    backend: Backend = "cpp" if arguments.device == "cpu" else "triton"
    began = time.monotonic()
    found: dict[str, list[dict[str, object]]] = {"same": [], "planted": []}
    spent = 0.0
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        found, spent = before["trials"], before["seconds"]
    todo = [("same", i) for i in range(len(found["same"]), arguments.trials)]
    todo += [("planted", i) for i in range(len(found["planted"]), arguments.planted)]
    for first in range(0, len(todo), arguments.session):
        if time.monotonic() - began > arguments.budget:
            break
        with Judge(
            "rmsnorm",
            backend,
            (workload(arguments.device),),
            device=arguments.device,
            epsilon=arguments.epsilon,
        ) as judge:
            for kind, trial in todo[first : first + arguments.session]:
                incumbent = candidate(backend, -1 - trial, more=2 if kind == "planted" else 0)
                evaluation = judge.evaluate(candidate(backend, trial), incumbent)
                found[kind].append(outcome(evaluation, arguments.epsilon, os.getloadavg()[0]))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps(
                {
                    "what": "verdicts of the judge on a kernel against itself, and against one with 2 % more work",
                    "date": time.strftime("%Y-%m-%d"),
                    "device": device_info(arguments.device).model_dump(mode="json"),
                    "workload": workload(arguments.device).shape,
                    "epsilon": arguments.epsilon,
                    "seconds": round(spent + time.monotonic() - began),
                    "counts": {kind: counts(rows) for kind, rows in found.items() if rows},
                    "trials": found,
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    for kind, rows in found.items():
        if rows:
            print(kind, counts(rows))


def counts(rows: list[dict[str, object]]) -> dict[str, int]:
    names = [str(row["verdict"]) for row in rows]
    return {name: names.count(name) for name in sorted(set(names))} | {"trials": len(rows)}


if __name__ == "__main__":
    main()
