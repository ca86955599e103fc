"""Published GPU kernels in a Llama: by kernelize and KernelConfig, compiled whole, and in a CUDA graph.

Calls are counted by torch's profiler, which sees operators in compiled code too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autokernel_hf.bundle import export_files
from autokernel_hf.records import Package
from tests.package_factory import candidate, exported

pytestmark = pytest.mark.gpu

KINDS = ("rmsnorm", "activation", "rotary_embedding")
LAYERS = 3
# A norm ahead of attention and of the MLP in every layer, and one at the end; a SiLU and a rotary embedding a layer.
CALLS = {"rmsnorm": 2 * LAYERS + 1, "activation": LAYERS, "rotary_embedding": LAYERS}

COMMON = (
    """
import json, sys
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
package, device = Path(sys.argv[1]), sys.argv[2]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers="""
    + str(LAYERS)
    + """, num_attention_heads=4, num_key_value_heads=2)
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
def tokens(seed):
    return torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(seed)).to(device)
def forward(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits
exact = forward(llama().double(), tokens(1))
plain_error = (forward(llama(), tokens(1)) - exact).abs().max().item()
def kernelized(mode):
    hooks = {"RMSNorm": "RMSNorm", "SiLU": "SiLU", "rotary_pos_emb": "RotaryEmbedding"}
    mapping = {h: {device: LocalLayerRepository(package, layer_name=n)} for h, n in hooks.items()}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(llama(), mode=mode, device=device)
def report(model, **more):
    forward(model, tokens(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        out = forward(model, tokens(1))
    calls = {}
    for event in profiled.key_averages():
        if event.key.startswith("_ak_") and "::" in event.key:
            name = event.key.split("::")[1].removesuffix("_no_grad")
            calls[name] = max(calls.get(name, 0), event.count)
    error = (out - exact).abs().max().item()
    print(json.dumps({"calls": calls, "error": error, "plain_error": plain_error, **more}))
"""
)
ROUTES = {
    "kernelize": "report(kernelized(Mode.INFERENCE))",
    "KernelConfig": """
model = llama()
layers = {"RMSNorm": f"{package}:RMSNorm", "SiLU": f"{package}:SiLU", "rotary_pos_emb": f"{package}:RotaryEmbedding"}
model.set_use_kernels(True, KernelConfig(layers, use_local_kernel=True))
report(model)
""",
    "compiled whole": """
model = kernelized(Mode.INFERENCE | Mode.TORCH_COMPILE)
report(torch.compile(model, fullgraph=True))
""",
}
GRAPH = """
model = kernelized(Mode.INFERENCE)
ids = tokens(1)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        forward(model, ids)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = forward(model, ids)
differences = []
for seed in (2, 3):
    ids.copy_(tokens(seed))
    graph.replay()
    differences.append((out - forward(model, tokens(seed))).abs().max().item())
report(model, differences=differences)
"""


@pytest.fixture(scope="module", params=["triton", "cuda"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    files = [candidate(kind, request.param) for kind in KINDS]
    return export_files(files, "llama-kernels", out=tmp_path_factory.mktemp(request.param))


# Under the name of a repository, as which LOCAL_KERNELS gives out the folder.
ATTENTION = """
model = llama()
model.set_attn_implementation("acme/attention", allow_all_kernels=True)
report(torch.compile(model, fullgraph=True) if compiled else model)
"""


def run(package: Package, code: str, device: str = "cuda", **env: str) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-B", "-c", COMMON + code, package.path, device],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(package.path).parent,
        env={**clean, "HF_HUB_OFFLINE": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_llama_calls_the_kernels_and_is_as_right_as_without_them(package: Package, route: str) -> None:
    found = run(package, ROUTES[route])
    assert found["calls"] == CALLS
    assert found["error"] <= 1.5 * found["plain_error"]


def test_a_captured_pass_computes_with_the_inputs_of_its_replay(package: Package) -> None:
    found = run(package, GRAPH)
    assert found["calls"] == CALLS
    assert found["differences"] == [0.0, 0.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled whole"])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_an_attention_package_serves_a_llama_by_its_name(
    backend: str, compiled: bool, tmp_path: Path
) -> None:
    package = exported("flash_attention", backend, tmp_path)
    code = f"compiled = {compiled}\n{ATTENTION}"
    found = run(package, code, LOCAL_KERNELS=f"acme/attention={package.path}")
    assert found["calls"] == {"flash_attention": LAYERS}
    assert found["error"] <= 1.5 * found["plain_error"]
