"""How often the judge is wrong about speed: the same kernel against itself, and against one that does 2 % more work.

    python benchmarks/judge_study.py cpu --trials 200 --out benchmarks/results/judge-study-cpu.json
    python benchmarks/judge_study.py cuda --trials 200 --planted 100 --epsilon 0.005 --budget 150 --out ...

Each trial is an experiment as the search makes it: a candidate against the incumbent, in processes of their own, whose
verdict is the interval of the paired ratio. The two sources differ in a comment, so that both are built and run apart.
In a planted trial the incumbent computes the first 2 % of the rows twice. Sessions of `--session` trials are opened
anew, since what is fixed for a process (where its memory lies) must vary as well.

It can be taken in parts: with the same `--out`, trials that the file has already are kept and the rest added, until
`--budget` seconds are spent. The file is written after each trial; it tells each part's device, date and seconds. Trials
against itself and planted ones take turns, so that a study that was cut short has both. A file of another device, workload
or epsilon is left alone.
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
    study = Study.opened(arguments.out, arguments.device, arguments.epsilon)
    began = time.monotonic()

    def is_over() -> bool:
        return time.monotonic() - began > arguments.budget

    todo = study.missing({"same": arguments.trials, "planted": arguments.planted})
    for first in range(0, len(todo), arguments.session):
        if is_over():
            break
        with Judge(
            "rmsnorm",
            backend,
            (workload(arguments.device),),
            device=arguments.device,
            epsilon=arguments.epsilon,
        ) as judge:
            for kind, trial in todo[first : first + arguments.session]:
                if is_over():
                    break
                incumbent = candidate(backend, -1 - trial, more=2 if kind == "planted" else 0)
                evaluation = judge.evaluate(candidate(backend, trial), incumbent)
                study.add(kind, outcome(evaluation, arguments.epsilon, os.getloadavg()[0]))
    for kind, rows in study.trials.items():
        if rows:
            print(kind, counts(rows))
    left = len(study.missing({"same": arguments.trials, "planted": arguments.planted}))
    print(f"{left} trials are left" if left else "complete")


class Study:
    """The trials so far, in their file."""

    def __init__(self, path: Path, head: dict[str, object], parts: list[dict[str, object]]) -> None:
        self.path = path
        self.head = head
        self.parts = parts
        self.trials: dict[str, list[dict[str, object]]] = {"same": [], "planted": []}
        self._began = time.monotonic()

    @classmethod
    def opened(cls, path: Path, device: str, epsilon: float) -> Study:
        """What the file has, with a new part.

        Raises:
            SystemExit: It is of another study.
        """
        info = device_info(device).model_dump(mode="json")
        head = {
            "what": "verdicts of the judge on a kernel against itself, and against one with 2 % more work",
            "device": info["name"],
            "workload": workload(device).shape,
            "epsilon": epsilon,
        }
        made = cls(path, head, [])
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            other = [k for k in ("device", "workload", "epsilon") if before.get(k) != head[k]]
            if other:
                raise SystemExit(
                    f"{path} is of another study: its {', '.join(other)} differ. Name another file."
                )
            made.trials, made.parts = before["trials"], before["parts"]
        made.parts.append({"date": time.strftime("%Y-%m-%d %H:%M"), "device": info, "trials": 0})
        return made

    def missing(self, wanted: dict[str, int]) -> list[tuple[str, int]]:
        """Trials that are to be made, the two kinds mixed as evenly as their numbers allow."""
        todo = []
        for kind, count in wanted.items():
            have = len(self.trials[kind])
            todo += [((i - have + 0.5) / (count - have), kind, i) for i in range(have, count)]
        return [(kind, i) for _, kind, i in sorted(todo)]

    def add(self, kind: str, row: dict[str, object]) -> None:
        """Add a trial, and write the file as a whole or not at all."""
        self.trials[kind].append(row)
        part = self.parts[-1]
        part["trials"] = int(str(part["trials"])) + 1
        part["seconds"] = round(time.monotonic() - self._began, 1)
        document = {
            **self.head,
            "counts": {name: counts(rows) for name, rows in self.trials.items() if rows},
            "parts": self.parts,
            "trials": self.trials,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def counts(rows: list[dict[str, object]]) -> dict[str, int]:
    names = [str(row["verdict"]) for row in rows]
    return {name: names.count(name) for name in sorted(set(names))} | {"trials": len(rows)}


if __name__ == "__main__":
    main()
