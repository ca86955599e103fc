"""For the one who loads kernels in inference code: `kernels` and `transformers` alone, autokernel-hf not installed.

    pip install torch "transformers>=5.20,<5.23" "kernels>=0.17.2,<0.18"
    python examples/use_kernel.py you/gpt2-activation NewGELU           # from the Hub
    python examples/use_kernel.py ./packages/gpt2-activation NewGELU    # from a folder

Names a layer of the package, puts it into a model that has such layers, and shows that the result is the same.
"""

import argparse
from pathlib import Path

import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    get_kernel,
    get_local_kernel,
    kernelize,
    use_kernel_mapping,
)
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("kernel", help="repository or folder")
parser.add_argument("layer", help="RMSNorm, SiLU, NewGELU, ...: the name of the hook and of the layer")
parser.add_argument("--version", type=int, default=1)
parser.add_argument(
    "--device", choices=["cpu", "cuda"], help="a C++ kernel needs cpu (default: cuda if there is one)"
)
arguments = parser.parse_args()
device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
# Without a backend, `kernels` looks for what torch was built for; the torch of PyPI was built for CUDA, GPU or not.
backend = "cpu" if device == "cpu" else None

# A small model with random weights, so that this runs anywhere; use AutoModelForCausalLM.from_pretrained for a real one.
config = (
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100)
    if arguments.layer == "NewGELU"
    else LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
)
model = AutoModelForCausalLM.from_config(config).eval().to(device)
tokens = torch.arange(32, device=device)[None] % 100
with torch.inference_mode():
    before = model(tokens).logits

folder = Path(arguments.kernel)
if folder.is_dir():
    kernel = get_local_kernel(folder, backend=backend)
else:
    kernel = get_kernel(arguments.kernel, version=arguments.version, backend=backend, trust_remote_code=True)
layer = LocalLayerRepository(Path(kernel.__file__).parent, layer_name=arguments.layer)
print(f"loaded {kernel.__name__}: {', '.join(kernel.__all__)}")

plain = {name: module.forward.__func__ for name, module in model.named_modules()}
with use_kernel_mapping({arguments.layer: {device: layer}}, inherit_mapping=False):
    model = kernelize(model, mode=Mode.INFERENCE, device=device)
replaced = [name for name, module in model.named_modules() if module.forward.__func__ is not plain[name]]
if not replaced:
    raise SystemExit(f"Nothing was replaced: this model has no layer that is known as {arguments.layer}.")
print(f"replaced {len(replaced)} layers: {', '.join(replaced)}")
with torch.inference_mode():
    after = model(tokens).logits
print(f"largest difference of the logits: {(after - before).abs().max().item():.3g}")
