"""The elementwise and row types: their numbers, their sites in real model classes, their layers under the Hub's rules."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from kernels.layer.layer import _validate_layer
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertConfig, BertOutput
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from autokernel_hf.judge.checks import check_values, expect
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels._forms import form, forward_form
from autokernel_hf.kernels._places import layer_class
from autokernel_hf.kernels.activation import activation_kind, activation_layer
from autokernel_hf.kernels.base import DTYPES, KernelType, make_inputs, with_layout
from autokernel_hf.records import TensorSpec, Workload

TYPES = ("activation", "gated_activation", "layernorm", "rmsnorm", "add_norm", "softmax")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# --- numbers ------------------------------------------------------------------------------------------------------


def workloads_of(kind: KernelType) -> list[Workload]:
    """What the judge runs, in every dtype: the sweep, each regime on two calls of it, edges, layouts, CPU workloads."""
    made = []
    for dtype in kind.dtypes:
        sweep = [kind.build(axes, dtype, options) for axes, options in kind.sweep]
        edges = [kind.build(axes, dtype, options) for axes, options in (*kind.edges, *kind.long)]
        made += sweep + edges
        for i, values in enumerate(kind.adversarial):
            for workload in (sweep[i % len(sweep)], sweep[(i + 1) % len(sweep)]):
                label = f"{workload.label}/{values}"
                made.append(workload.model_copy(update={"values": values, "label": label}))
        for layout, names in kind.layouts.items():
            for workload in (sweep[0], edges[-2]):
                present = [name for name in names if isinstance(workload.arg(name), TensorSpec)]
                made.append(with_layout(workload, layout, present))
    return made + list(kind.workloads["cpu"])


@pytest.mark.parametrize("name", TYPES)
def test_reference_is_within_tolerance_of_the_oracle(name: str) -> None:
    kind = kernel_type(name)
    for workload in workloads_of(kind):
        if workload.values == "nonfinite" and dict(workload.args).get("kind") == "gelu":
            continue  # torch's vectorized GELU gives NaN at +inf on a CPU, where the limit (and its own scalar code) is inf
        args = make_inputs(kind, workload, 11)
        outcome = check_values(kind.reference(**args), expect(kind, workload, args), kind, workload)
        assert not outcome.problem, f"{workload.label} {workload.dtype}: {outcome.problem}"


@pytest.mark.parametrize("name", TYPES)
def test_a_kernel_that_leaves_half_of_the_output_fails(name: str) -> None:
    kind = kernel_type(name)
    for dtype in kind.dtypes:
        for axes, options in kind.sweep:
            workload = kind.build(axes, dtype, options)
            args = make_inputs(kind, workload, 5)
            outputs = [output.clone() for output in kind.reference(**args)]
            for output in outputs:
                output.view(-1)[output.numel() // 2 :] = 0
            assert check_values(outputs, expect(kind, workload, args), kind, workload).problem, workload.label


def one_pass_layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = wide.square().mean(-1, keepdim=True) - mean.square()
    return ((wide - mean) * torch.rsqrt(variance + eps) * weight + bias).to(x.dtype)


def half_precision_rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


MUTANTS: dict[str, tuple[str, str, str, dict[str, Any], Callable[..., Any]]] = {
    "one-pass variance": ("layernorm", "large_offset", "float32", {}, one_pass_layernorm),
    "layer norm without eps": (
        "layernorm",
        "tiny",
        "float32",
        {},
        lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, 0.0),
    ),
    "layer norm that ignores the bias": (
        "layernorm",
        "normal",
        "bfloat16",
        {},
        lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, None, eps),
    ),
    "squares in half precision": ("rmsnorm", "large", "float16", {}, half_precision_rmsnorm),
    "rms norm without the offset": (
        "rmsnorm",
        "normal",
        "bfloat16",
        {"offset": 1.0},
        lambda x, weight, eps, offset: F.rms_norm(x, x.shape[-1:], weight, eps),
    ),
    "norm of the wrong sum": (
        "add_norm",
        "normal",
        "bfloat16",
        {},
        lambda x, residual, weight, bias, eps, offset, kind: (
            F.rms_norm(x, x.shape[-1:], weight, eps),
            x + residual,
        ),
    ),
    "the other gelu": ("activation", "normal", "float32", {"kind": "gelu_tanh"}, lambda x, kind: F.gelu(x)),
    "relu that loses NaN": (
        "activation",
        "nonfinite",
        "float16",
        {"kind": "relu"},
        lambda x, kind: torch.where(x > 0, x, torch.zeros_like(x)),
    ),
    "gate and up exchanged": (
        "gated_activation",
        "normal",
        "bfloat16",
        {},
        lambda gate, up, kind: F.silu(up) * gate,
    ),
    "softmax without the maximum": (
        "softmax",
        "large",
        "float32",
        {},
        lambda x, dim: torch.exp(x) / torch.exp(x).sum(dim, keepdim=True),
    ),
    "softmax over the wrong dimension": (
        "softmax",
        "normal",
        "bfloat16",
        {"dim": 0},
        lambda x, dim: torch.softmax(x, -1),
    ),
    "softmax that turns masked rows to 0": (
        "softmax",
        "nonfinite",
        "float32",
        {},
        lambda x, dim: torch.softmax(x, dim).nan_to_num(0.0),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_outside_the_tolerance(mutant: str) -> None:
    name, values, dtype, options, function = MUTANTS[mutant]
    kind = kernel_type(name)
    workload = kind.build({"M": 32, "N": 768}, dtype, options).model_copy(update={"values": values})
    args = make_inputs(kind, workload, 6)
    outputs = function(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert check_values(outputs, expect(kind, workload, args), kind, workload).problem


@pytest.mark.parametrize("name", TYPES)
def test_a_kernel_that_computes_in_float32_and_rounds_once_is_inside_the_tolerance(name: str) -> None:
    kind = kernel_type(name)
    for dtype in ("float16", "bfloat16"):
        for i, values in enumerate(kind.adversarial):
            axes, options = kind.sweep[i % len(kind.sweep)]
            workload = kind.build(axes, dtype, options).model_copy(update={"values": values})
            args = make_inputs(kind, workload, 7)
            wide = {
                k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
                for k, v in args.items()
            }
            if values == "nonfinite" and args.get("kind") == "gelu":
                continue  # as above: torch's own NaN
            outputs = [output.to(DTYPES[dtype]) for output in kind.reference(**wide)]
            outcome = check_values(outputs, expect(kind, workload, args), kind, workload)
            assert not outcome.problem, f"{workload.label} {dtype} {values}: {outcome.problem}"


def test_work_is_counted_from_the_shapes() -> None:
    rows = {"M": 8, "N": 16}
    moved = {n: kernel_type(n).bytes_moved(kernel_type(n).build(rows, "bfloat16", {})) for n in TYPES}
    tensor, row = 8 * 16 * 2, 16 * 2
    assert moved == {
        "activation": 2 * tensor,
        "gated_activation": 3 * tensor,
        "layernorm": 2 * tensor + 2 * row,
        "rmsnorm": 2 * tensor + row,
        "add_norm": 4 * tensor + row,
        "softmax": 2 * tensor,
    }


# --- bitwise what the models compute ------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def samples(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("gelu", "gelu"),
        ("gelu_new", "gelu_new"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("silu", "silu"),
        ("swish", "silu"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("linear", "none"),
    ],
)
def test_activation_reference_is_bitwise_the_models_module(word: str, kind: str, dtype: torch.dtype) -> None:
    x = samples(dtype, 33, 65)
    assert same_bits(kernel_type("activation").reference(x=x, kind=kind)[0], ACT2FN[word](x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_references_are_bitwise_the_models_modules(dtype: torch.dtype) -> None:
    x = samples(dtype, 7, 48)
    rmsnorm = kernel_type("rmsnorm").reference
    for module, offset in (
        (LlamaRMSNorm(48, eps=1e-6), 0.0),
        (GemmaRMSNorm(48), 1.0),
        (Gemma3RMSNorm(48), 1.0),
    ):
        nn.init.normal_(module.weight)
        module.to(dtype)
        eps = getattr(module, "variance_epsilon", None) or module.eps
        assert same_bits(rmsnorm(x=x, weight=module.weight, eps=eps, offset=offset)[0], module(x))
    for module in (
        nn.LayerNorm(48),
        nn.LayerNorm(48, bias=False),
        nn.LayerNorm(48, elementwise_affine=False),
    ):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        module.to(dtype)
        ours = kernel_type("layernorm").reference(x=x, weight=module.weight, bias=module.bias, eps=module.eps)
        assert same_bits(ours[0], module(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_block_references_are_bitwise_the_models_blocks(dtype: torch.dtype) -> None:
    x = samples(dtype, 2, 5, 32)
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48)).to(dtype)
    gated = kernel_type("gated_activation").reference(gate=mlp.gate_proj(x), up=mlp.up_proj(x), kind="silu")
    assert same_bits(mlp.down_proj(gated[0]), mlp(x))

    block = BertOutput(BertConfig(hidden_size=32, intermediate_size=48)).to(dtype).eval()
    hidden, norm = samples(dtype, 2, 5, 48), block.LayerNorm
    normed, total = kernel_type("add_norm").reference(
        x=block.dense(hidden), residual=x, weight=norm.weight, bias=norm.bias, eps=norm.eps, kind="layer"
    )
    assert same_bits(normed, block(hidden, x))
    assert same_bits(total, block.dense(hidden) + x)

    scores = samples(dtype, 2, 3, 9)
    assert same_bits(kernel_type("softmax").reference(x=scores, dim=1)[0], nn.Softmax(dim=1)(scores))


def test_llama_and_bert_additions_with_rms_norm_are_bitwise_the_chain() -> None:
    x, residual, module = samples(torch.bfloat16, 4, 32), samples(torch.bfloat16, 4, 32) + 1, LlamaRMSNorm(32)
    nn.init.normal_(module.weight)
    module.to(torch.bfloat16)
    normed, total = kernel_type("add_norm").reference(
        x=x, residual=residual, weight=module.weight, bias=None, eps=module.variance_epsilon
    )
    assert same_bits(total, x + residual)
    assert same_bits(normed, module(x + residual))


# --- sites --------------------------------------------------------------------------------------------------------


DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def tiny(family: str) -> nn.Module:
    sizes: dict[str, dict[str, Any]] = {
        "GPT2": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "Bert": ENCODER,
        "Roberta": ENCODER,
        "T5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64},
        "OPT": {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "vocab_size": 64,
        },
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes.get(family, DECODER))
    model: nn.Module = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms far from 1 and 0
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


SITES: dict[str, dict[str, dict[str, int]]] = {
    "Llama": {
        "activation": {"SiLU": 2},
        "gated_activation": {"SwiGLUMLP": 2},
        "rmsnorm": {"RMSNorm": 5},
    },
    "Mistral": {
        "activation": {"SiLU": 2},
        "gated_activation": {"SwiGLUMLP": 2},
        "rmsnorm": {"RMSNorm": 5},
    },
    "Qwen2": {"activation": {"SiLU": 2}, "gated_activation": {"SwiGLUMLP": 2}, "rmsnorm": {"RMSNorm": 5}},
    "Qwen3": {"activation": {"SiLU": 2}, "gated_activation": {"SwiGLUMLP": 2}, "rmsnorm": {"RMSNorm": 9}},
    "Olmo2": {"activation": {"SiLU": 2}, "gated_activation": {"SwiGLUMLP": 2}, "rmsnorm": {"RMSNorm": 9}},
    "Phi3": {
        "activation": {"SiLU": 2},
        "gated_activation": {"PackedSwiGLUMLP": 2},
        "rmsnorm": {"RMSNorm": 5},
    },
    "Gemma": {
        "activation": {"GeluTanh": 2},
        "gated_activation": {"GeGLUMLP": 2},
        "rmsnorm": {"GemmaRMSNorm": 5},
    },
    "Gemma3Text": {
        "activation": {"GeluTanh": 2},
        "gated_activation": {"GeGLUMLP": 2},
        "rmsnorm": {"GemmaRMSNorm": 13},
    },
    "GPT2": {"activation": {"NewGELU": 2}, "layernorm": {"LayerNorm": 5}},
    "Bert": {
        "activation": {"GeLU": 2},
        "layernorm": {"LayerNorm": 5},
        "add_norm": {"AddLayerNorm": 4},
    },
    "Roberta": {
        "activation": {"GeLU": 2},
        "layernorm": {"LayerNorm": 5},
        "add_norm": {"AddLayerNorm": 4},
    },
    # Its MLPs have other names and a dropout.
    "T5": {"activation": {"ReLU": 4}, "rmsnorm": {"T5LayerNorm": 12}},
    "OPT": {"activation": {"ReLU": 2}, "layernorm": {"LayerNorm": 5}},
}


@pytest.mark.parametrize("family", SITES)
def test_finds_the_sites_of_a_model_family_and_no_others(family: str) -> None:
    model = tiny(family)
    found = {name: dict(Counter(site.layer for site in kernel_type(name).find(model))) for name in TYPES}
    assert {name: layers for name, layers in found.items() if layers} == SITES[family]


def test_sites_are_named_by_their_path_in_the_model() -> None:
    sites = kernel_type("rmsnorm").find(tiny("Qwen3"))
    assert [site.path for site in sites if "layers.0" in site.path] == [
        "layers.0.self_attn.q_norm",
        "layers.0.self_attn.k_norm",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
    ]
    assert {site.attach for site in sites} == {"module"}


def run(model: nn.Module) -> Tensor:
    ids = torch.arange(24).reshape(2, 12) * 2 + 1
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output: Tensor = model(input_ids=ids, **decoder).last_hidden_state
    return output


# Where the families round as the references do; the others differ in the last bit of 16-bit dtypes only.
EXACT = [(family, dtype) for family in SITES for dtype in (torch.float32, torch.bfloat16)]
EXACT.remove(("Olmo2", torch.bfloat16))


@pytest.mark.parametrize(("family", "dtype"), EXACT)
def test_a_model_with_all_layers_replaced_gives_the_same_bits(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    expected = run(model)
    for name in TYPES:
        kind = kernel_type(name)
        calls = Counter[str]()

        def op(*args: Any, name: str = name, kind: KernelType = kind, calls: Counter[str] = calls) -> Any:
            calls[name] += 1
            bound = kind.schema.bind(dict(zip((a.name for a in kind.schema.args), args, strict=False)))
            outputs = kind.reference(**bound)
            return outputs if len(outputs) > 1 else outputs[0]

        sites = kind.find(model)
        for site in sites:
            module = model.get_submodule(site.path)
            layer = layer_class(name, site.layer, op)
            module.forward = types.MethodType(layer.forward, module)
        assert same_bits(run(model), expected), name
        assert calls[name] == len(sites)
        for site in sites:
            del model.get_submodule(site.path).__dict__["forward"]
    assert same_bits(run(model), expected)


@pytest.mark.parametrize("family", SITES)
def test_layers_keep_the_hubs_rules_for_the_classes_they_replace(family: str) -> None:
    model = tiny(family)
    for name in TYPES:
        for site in kernel_type(name).find(model):
            layer = layer_class(name, site.layer, lambda *args: None)
            _validate_layer(check_cls=type(model.get_submodule(site.path)), cls=layer, repo=site.layer)


@pytest.mark.parametrize("name", TYPES)
def test_every_layer_is_stateless_and_says_what_it_can(name: str) -> None:
    for layer in kernel_type(name).layers:
        cls = layer_class(name, layer.name, lambda *args: None)
        own = {key for key in vars(cls) if not key.startswith("__")}
        assert own == {"can_torch_compile", "has_backward", "forward"}
        assert cls.can_torch_compile is True
        assert cls.has_backward is False
        assert cls.__init__ is nn.Module.__init__


# --- what must not be found ---------------------------------------------------------------------------------------


class SameNameRMSNorm(nn.Module):
    """Has the name and attributes of Llama's norm, and adds where that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight + hidden_states.to(input_dtype)


class GatedMLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = act
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DroppingMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class ScaledMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2.0)


class ExchangedMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class RewrittenMLP(GatedMLP):
    """The same expression, spelled with steps and the factors exchanged."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden))
        up = self.up_proj(hidden)
        return self.down_proj(up * gate)


def found_in(name: str, *modules: nn.Module) -> list[str]:
    return [site.layer for site in kernel_type(name).find(nn.ModuleList(modules))]


def test_a_norm_of_the_same_name_that_computes_otherwise_is_not_found() -> None:
    class UncastLayerNorm(T5LayerNorm):
        """As T5's, but that the weight's dtype is asked for by another condition."""

        def forward(self, hidden_states: Tensor) -> Tensor:
            variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            if self.weight.dtype in [torch.float16]:
                hidden_states = hidden_states.to(self.weight.dtype)
            return self.weight * hidden_states

    assert found_in("rmsnorm", SameNameRMSNorm(), UncastLayerNorm(8), nn.RMSNorm((4, 8))) == []
    assert found_in("rmsnorm", nn.RMSNorm(8, eps=1e-6), LlamaRMSNorm(8)) == ["RMSNorm", "TorchRMSNorm"]


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_t5_s_norm_gives_the_weight_s_dtype_whatever_its_input_has(
    x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """In float16 a T5 keeps its down projections in float32, and so half of what its norms read."""
    module, x = T5LayerNorm(48), samples(x_dtype, 7, 48)
    nn.init.normal_(module.weight)
    module.to(weight_dtype)
    asked: list[tuple[torch.dtype, torch.dtype]] = []

    def op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        asked.append((x.dtype, weight.dtype))
        return kernel_type("rmsnorm").reference(x=x, weight=weight, eps=eps)[0]

    ours = layer_class("rmsnorm", "T5LayerNorm", op).forward(module, x)
    theirs = module(x)
    assert ours.dtype == theirs.dtype == weight_dtype
    torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(weight_dtype).eps, atol=0)
    # What the schema promises: parameters in x's dtype or in float32.
    assert asked == [(x_dtype, x_dtype) if x_dtype == weight_dtype else (torch.float32, torch.float32)]


def test_only_an_mlp_that_is_the_expression_is_found() -> None:
    assert found_in("gated_activation", DroppingMLP(nn.SiLU()), ScaledMLP(nn.SiLU())) == []
    assert found_in("gated_activation", ExchangedMLP(nn.SiLU())) == []
    assert found_in("gated_activation", GatedMLP(nn.Tanh()), GatedMLP(nn.SiLU(inplace=True))) == []
    assert found_in("gated_activation", GatedMLP(nn.SiLU()), RewrittenMLP(nn.SiLU())) == ["SwiGLUMLP"] * 2
    assert found_in("gated_activation", GatedMLP(nn.GELU("tanh")), GatedMLP(nn.GELU())) == [
        "GeGLUMLP",
        "GeGLUErfMLP",
    ]


def test_modules_that_work_in_place_or_hold_another_function_are_no_activations() -> None:
    for module in (
        nn.ReLU(inplace=True),
        nn.SiLU(inplace=True),
        nn.Tanh(),
        nn.LeakyReLU(),
        ACT2FN["gelu_python"],
        ACT2FN["gelu_python_tanh"],
        ACT2FN["gelu_10"],
        ACT2FN["mish"],
        ACT2FN["linear"],
    ):
        assert activation_layer(module) is None
    assert activation_kind(ACT2FN["gelu_fast"]) == "gelu_new"


def test_softmax_and_layer_norm_over_other_dimensions_are_not_found() -> None:
    assert found_in("softmax", nn.Softmax(), nn.Softmax(dim=-1), nn.LogSoftmax(-1)) == ["Softmax"]
    assert found_in("layernorm", nn.LayerNorm((4, 8)), nn.LayerNorm(8), nn.GroupNorm(2, 8)) == ["LayerNorm"]


# --- forms --------------------------------------------------------------------------------------------------------


def module_of(functions: Iterable[Callable[..., Any]]) -> type[nn.Module]:
    return type("Module", (nn.Module,), {function.__name__: function for function in functions})


def test_a_form_does_not_depend_on_names_steps_and_methods() -> None:
    def scale(self: Any, value: Tensor) -> Tensor:
        """Inlined, whatever it is called."""
        return value * self.weight

    def forward(self: Any, inputs: Tensor) -> Tensor:
        y = F.silu(inputs)
        return self.scale(y)

    spelled = form("def forward(me, a):\n    return me.weight * torch.nn.functional.silu(a)")
    assert forward_form(module_of([scale, forward])) == spelled


def test_an_if_without_an_else_is_a_conditional_expression() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.scale > 2:
            y = y + x
            y = y * 3
        return y.sum()

    def otherwise(self: Any, x: Tensor) -> Tensor:
        y = x * self.scale
        if self.scale > 2:
            y = y + x
            y = y * 4
        return y.sum()

    spelled = form(
        "def forward(self, x):\n"
        "    return ((x * self.scale + x) * 3 if self.scale > 2 else x * self.scale).sum()"
    )
    assert forward_form(module_of([forward])) == spelled
    otherwise.__name__ = "forward"
    assert forward_form(module_of([otherwise])) not in (spelled, None)


def test_more_than_an_expression_has_no_form() -> None:
    def branching(self: Any, x: Tensor) -> Tensor:
        if self.training:
            return x
        return x * 2

    def choosing(self: Any, x: Tensor) -> Tensor:
        if self.training:
            y = x
        else:
            y = x * 2
        return y

    def undefined(self: Any, x: Tensor) -> Tensor:
        if self.training:
            y = x
        return y

    def optional(self: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    def looping(self: Any, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)

    def inplace(self: Any, x: Tensor) -> Tensor:
        x += 1
        return x

    for function in (branching, choosing, undefined, optional, looping, inplace):
        function.__name__ = "forward"
        assert forward_form(module_of([function])) is None
    with pytest.raises(ValueError, match="not one expression"):
        form("def forward(self, x):\n    x += 1\n    return x")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_peers_agree_with_the_oracle_on_a_gpu(name: str) -> None:
    kind, device = kernel_type(name), torch.device("cuda")
    for workload in kind.workloads["cuda"][:1]:
        args = make_inputs(kind, workload, 8, device)
        expected = expect(kind, workload, args)
        for peer in kind.peers:
            run_peer = peer.make(workload, device)
            if run_peer is None:
                continue
            outputs = run_peer(**args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            outcome = check_values(outputs, expected, kind, workload)
            assert not outcome.problem, f"{peer.name}: {outcome.problem}"
