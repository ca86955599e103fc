"""Every way in which a layer of a package gets into a model, with the calls counted: a route that does nothing is found.

The kernels are the C++ ones, in one bundle; the models are small ones of transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autokernel_hf.bundle import export_files
from autokernel_hf.records import Package
from tests.package_factory import candidate

KINDS = (
    "rmsnorm",
    "layernorm",
    "activation",
    "gated_activation",
    "rotary_embedding",
    "add_norm",
    "cross_entropy",
)

COMMON = """
import json, logging, sys
from pathlib import Path
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
import kernels
package = Path(sys.argv[1])
kernel = kernels.get_local_kernel(package, backend="cpu")
variant = Path(kernel.__file__).parent
calls = {}
for name, module in list(sys.modules.items()):
    if not (name.startswith("_ak_") and name.endswith(".layers")):
        continue
    kind = name.split(".")[0].removeprefix("_ak_").split("_cpp_")[0]
    if not hasattr(module, kind):
        continue
    def counted(*args, function=getattr(module, kind), kind=kind):
        calls[kind] = calls.get(kind, 0) + 1
        return function(*args)
    setattr(module, kind, counted)
torch.manual_seed(0)
small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
def llama():
    return LlamaForCausalLM(LlamaConfig(**small, intermediate_size=64)).eval()
def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval()
def bert():
    return BertModel(BertConfig(**small, intermediate_size=64)).eval()
ids = torch.arange(8)[None]
def outputs(model):
    with torch.no_grad():
        return model(ids)[0]
def report(model, plain, **more):
    calls.clear()
    error = (outputs(model) - plain).abs().max().item()
    return {"calls": dict(calls), "error": error, **more}
"""

KERNELIZE = """
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
def mapping(**layers):
    return {hook: {"cpu": LocalLayerRepository(variant, layer_name=layer)} for hook, layer in layers.items()}
def kernelized(model, **layers):
    with use_kernel_mapping(mapping(**layers), inherit_mapping=False):
        return kernelize(model, mode=Mode.INFERENCE, device="cpu")
"""


def run(package: Package, code: str, **env: str) -> dict[str, Any]:
    import os

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-B", "-c", COMMON + code, package.path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    files = [candidate(kind, "cpp") for kind in KINDS]
    return export_files(files, "six-kernels", out=tmp_path_factory.mktemp("packages"))


def test_kernelize_with_a_mapping_reaches_every_hooked_layer(package: Package) -> None:
    seen = run(
        package,
        KERNELIZE
        + """
found = {}
model = llama(); plain = outputs(model)
found["llama"] = report(kernelized(model, RMSNorm="RMSNorm", SiLU="SiLU", rotary_pos_emb="RotaryEmbedding"), plain)
model = gpt2(); plain = outputs(model)
found["gpt2"] = report(kernelized(model, NewGELU="NewGELU"), plain)
model = bert(); plain = outputs(model)
found["bert"] = report(kernelized(model, GeLU="GeLU"), plain)
print(json.dumps(found))
""",
    )
    assert seen["llama"]["calls"] == {"rmsnorm": 5, "activation": 2, "rotary_embedding": 2}
    assert seen["gpt2"]["calls"] == {"activation": 2}
    assert seen["bert"]["calls"] == {"activation": 2}
    assert max(found["error"] for found in seen.values()) < 1e-5


def test_kernelize_reaches_classes_without_a_hook_once_they_are_marked(package: Package) -> None:
    seen = run(
        package,
        KERNELIZE
        + """
from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput
from transformers.models.llama.modeling_llama import LlamaMLP
found = {}
model = gpt2(); plain = outputs(model)
found["before"] = report(kernelized(model, LayerNorm="LayerNorm"), plain)
replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm", lambda m: len(m.normalized_shape) == 1)
model = gpt2(); plain = outputs(model)
found["layernorm"] = report(kernelized(model, LayerNorm="LayerNorm"), plain)
for name in (BertOutput, BertSelfOutput):
    replace_kernel_forward_from_hub(name, "AddLayerNorm")
model = bert(); plain = outputs(model)
found["add_norm"] = report(kernelized(model, AddLayerNorm="AddLayerNorm"), plain)
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
model = llama(); plain = outputs(model)
found["mlp"] = report(kernelized(model, SwiGLUMLP="SwiGLUMLP"), plain)
replace_kernel_forward_from_hub(torch.nn.CrossEntropyLoss, "CrossEntropyLoss", lambda m: m.weight is None)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1)
    def forward(self, ids):
        return self.inner(torch.linspace(-3, 3, 8 * 5).view(8, 5), ids[0] % 5)[None]
model = Loss().eval(); plain = outputs(model)
found["loss"] = report(kernelized(model, CrossEntropyLoss="CrossEntropyLoss"), plain)
print(json.dumps(found))
""",
    )
    assert (
        seen["before"]["calls"] == {}
    )  # without the mark, a mapping for torch's class silently does nothing
    assert seen["layernorm"]["calls"] == {"layernorm": 5}
    assert seen["add_norm"]["calls"] == {"add_norm": 4}
    assert seen["mlp"]["calls"] == {"gated_activation": 2}
    assert seen["loss"]["calls"] == {"cross_entropy": 1}
    assert max(found["error"] for found in seen.values()) < 1e-5


def test_transformers_kernel_config_takes_a_local_package(package: Package) -> None:
    """Made for GPUs: transformers 5.22 refuses a CPU, so its list of devices is widened here."""
    seen = run(
        package,
        """
from transformers import KernelConfig
from transformers.utils import kernel_config as gate
model = llama(); plain = outputs(model)
layers = {"RMSNorm": f"{variant}:RMSNorm", "SiLU": f"{variant}:SiLU"}
try:
    model.set_use_kernels(True, KernelConfig(dict(layers), use_local_kernel=True))
    refused = False
except Exception as error:
    refused = "cpu" in str(error)
gated = getattr(gate, "KERNELS_SUPPORTED_DEVICE_TYPES", None)
if gated is None:  # transformers 5.20 has its list in the middle of its code
    print(json.dumps({"refused": refused, "calls": None}))
    sys.exit()
gated.append("cpu")
model = llama(); plain = outputs(model)
model.set_use_kernels(True, KernelConfig(dict(layers), use_local_kernel=True))
print(json.dumps(report(model, plain, refused=refused)))
""",
    )
    assert seen["refused"]
    if seen["calls"] is None:
        pytest.skip("this transformers takes no CPU here, and cannot be made to")
    assert seen["calls"] == {"rmsnorm": 5, "activation": 2}
    assert seen["error"] < 1e-5


def test_local_kernels_puts_a_folder_in_the_place_of_a_repository(package: Package) -> None:
    seen = run(
        package,
        """
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
model = llama(); plain = outputs(model)
repository = LayerRepository("acme/six", layer_name="RMSNorm", revision="any", trust_remote_code=True)
with use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
    kernelize(model, mode=Mode.INFERENCE, device="cpu")
print(json.dumps(report(model, plain, same=kernels.get_kernel("acme/six", revision="any").__name__ == kernel.__name__)))
""",
        # A torch that was built for CUDA looks for a CUDA variant in a package, and takes the folder of a variant as it is.
        LOCAL_KERNELS=f"acme/six={package.path if torch.version.cuda is None else next(Path(package.path).glob('build/*'))}",
    )
    assert seen["same"]
    assert seen["calls"] == {"rmsnorm": 5}
    assert seen["error"] < 1e-5


def test_apply_reaches_what_has_no_hook_and_says_where_it_does_nothing(package: Package) -> None:
    seen = run(
        package,
        """
import autokernel_hf as ak
from autokernel_hf.errors import AutokernelError
found = {}
for name, make in (("llama", llama), ("gpt2", gpt2), ("bert", bert)):
    model = make(); plain = outputs(model)
    found[name] = report(ak.apply(model, package), plain)
    ak.restore(model)
    found[name]["restored"] = torch.equal(outputs(model), plain) and calls == found[name]["calls"]
try:
    ak.apply(torch.nn.Linear(2, 2).eval(), package)
    found["told"] = ""
except AutokernelError as error:
    found["told"] = str(error)
print(json.dumps(found))
""",
    )
    assert seen["llama"]["calls"] == {"rmsnorm": 5, "gated_activation": 2, "rotary_embedding": 2}
    # BERT's four output blocks are one kernel each, residual and norm together; the norm of its embeddings is alone.
    assert seen["bert"]["calls"] == {"layernorm": 1, "add_norm": 4, "activation": 2}
    assert seen["gpt2"]["calls"] == {"layernorm": 5, "activation": 2}
    for name in ("llama", "gpt2", "bert"):
        assert seen[name]["error"] < 1e-5 and seen[name]["restored"], seen[name]
    assert "Nothing in this Linear fits" in seen["told"]


def test_what_does_nothing_can_be_seen_without_this_program(package: Package) -> None:
    """The check of docs/loading.md: torch's profiler names the kernel's operators; and training falls back in silence."""
    seen = run(
        package,
        KERNELIZE
        + """
from torch.profiler import profile
def kernel_calls(model, *inputs):
    with torch.no_grad(), profile() as profiled:
        model(*inputs)
    return {event.key.split("::")[1].removesuffix("_no_grad"): event.count
            for event in profiled.key_averages() if event.key.startswith("_ak_")}
model = kernelized(llama(), RMSNorm="RMSNorm", SiLU="SiLU")
found = {"eval": kernel_calls(model, ids), "plain": kernel_calls(llama(), ids)}
trained = llama().train()
with use_kernel_mapping(mapping(RMSNorm="RMSNorm"), inherit_mapping=False):
    kernelize(trained, mode=Mode.TRAINING, device="cpu")
found["training"] = kernel_calls(trained, ids)
print(json.dumps(found))
""",
    )
    assert seen["eval"] == {"rmsnorm": 5, "activation": 2}
    assert seen["plain"] == {} and seen["training"] == {}
