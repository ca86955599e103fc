"""For the one who optimizes a model: a faster model, and packages of the kernels that did it.

    python examples/optimize_model.py openai-community/gpt2
    python examples/optimize_model.py gpt2 --random-weights      # no download

Everything that the command line can do is an option of `ak.optimize`.
"""

import argparse

import autokernel_hf as ak

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--random-weights", action="store_true")
parser.add_argument("--device", default="auto")
parser.add_argument("--top", type=int, default=1)
parser.add_argument("--max-experiments", type=int, default=4)
parser.add_argument("--out", default="runs")
arguments = parser.parse_args()

run = ak.optimize(**vars(arguments))

print(f"{run.model.id} on {run.device.name}: {run.status}. {run.reason}")
for target in run.targets:
    if target.speedup is not None:
        print(f"  {target.name}: {target.speedup:.2f}x the model's own code, 95 % {target.speedup_ci95}")
if run.verification is not None and run.verification.passed:
    print(f"  whole model: {run.verification.speedup.vs_eager:.3f}x against eager")
for package in run.packages:
    print(f"  package: {package.path}")
