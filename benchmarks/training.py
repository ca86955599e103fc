"""Kernels with their gradients on the GPU here: a loss with its gradient, and a Llama that trains.

    python benchmarks/training.py --out benchmarks/results/training-h200.json

Liger's cross entropy makes the gradient in its forward pass, so only both passes together can be compared. The Llama has 4
layers of the 1B's width, with RMSNorm, gated activation and rotary embedding replaced by the starters; its gradients are
held against those of a float32 model, the largest relative distance of a parameter's being told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autokernel_hf as ak
from autokernel_hf import build
from autokernel_hf.export_hf import export_file
from autokernel_hf.gpu import device_info
from autokernel_hf.kernels import starter
from autokernel_hf.records import Backend, Candidate

LOSSES = ((4096, 32000), (8192, 50257), (4096, 128256))
REPLACED = ("rmsnorm", "gated_activation", "rotary_embedding")
ROUNDS, STEPS, WARM = 12, 12, 3


def candidate(name: str, backend: Backend) -> Candidate:
    source = starter(name, backend)
    assert source is not None
    return Candidate(kernel_type=name, backend=backend, source=source)


def loaded(name: str, backend: Backend) -> Any:
    return getattr(build.load(build.build(candidate(name, backend), device="cuda").path), name)


def both_passes(N: int, V: int) -> dict[str, float]:
    """Median device times of a mean loss with its gradient, in microseconds, all in turn within a round, cold caches."""
    x = torch.randn(N, V, device="cuda", dtype=torch.bfloat16)
    target, one = torch.randint(V, (N,), device="cuda"), torch.ones((), device="cuda")
    copy = x.clone()  # Liger's works in place

    def eager() -> Tensor:
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(leaf.float(), target), leaf)
        return grad

    def liger() -> Tensor:
        from liger_kernel.transformers.functional import liger_cross_entropy

        leaf = copy.detach().requires_grad_()
        (grad,) = torch.autograd.grad(liger_cross_entropy(leaf, target), leaf)
        return grad

    def ours(backend: Backend) -> Callable[[], Tensor]:
        forward, backward = (
            loaded("cross_entropy", backend),
            loaded("cross_entropy_backward", backend),
        )

        def run() -> Tensor:
            forward(x, target)
            gradient: Tensor = backward(one, x, target)
            return gradient

        return run

    calls = {"cuda": ours("cuda"), "triton": ours("triton"), "eager": eager, "liger": liger}
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name, call in calls.items():
            copy.copy_(x)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)
            flush.fill_(number)
            start.record()
            call()
            end.record()
            end.synchronize()
            if number:
                times[name].append(1e3 * start.elapsed_time(end))
    return {name: round(statistics.median(taken), 1) for name, taken in times.items()}


def llama_step(backend: Backend) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(tempfile.mkdtemp())
    packages = [
        export_file(
            candidate(name, backend),
            f"train-{name.replace('_', '-')}",
            backward=candidate(f"{name}_backward", backend),
            device="cuda",
            out=folder,
        )
        for name in REPLACED
    ]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=512,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()  # type: ignore[arg-type]
    ids = torch.randint(512, (4, 1024), device="cuda")

    def gradients(of: nn.Module) -> dict[str, Tensor]:
        of.zero_grad(set_to_none=True)
        of(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.float().clone() for n, p in of.named_parameters() if p.grad is not None}

    def milliseconds() -> float:
        taken = []
        for number in range(STEPS):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()
            if number >= WARM:
                taken.append(1e3 * (time.perf_counter() - began))
        return statistics.median(taken)

    exact = LlamaForCausalLM(config).to("cuda").train()  # type: ignore[arg-type]
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    wanted = gradients(exact)

    def error() -> float:
        found = gradients(model)
        return max(float((found[n] - w).norm() / w.norm()) for n, w in wanted.items())

    report = {"eager_error": error(), "eager_ms": milliseconds()}
    for package in packages:
        ak.apply(model, package.path)
    return report | {"error": error(), "ms": milliseconds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    report: dict[str, Any] = {"device": device_info("cuda").model_dump(mode="json")}
    report["llama_step"] = llama_step("cuda")
    print(report["llama_step"], flush=True)
    report["cross_entropy_both_passes"] = []
    for N, V in LOSSES:
        report["cross_entropy_both_passes"].append({"N": N, "V": V, "us": both_passes(N, V)})
        print(report["cross_entropy_both_passes"][-1], flush=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
