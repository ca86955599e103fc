"""Products, attention, losses, rotary embeddings, reductions: their numbers, sites in real models, layers under the Hub's rules."""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from kernels.layer.layer import _create_func_module, _validate_layer
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.pytorch_utils import Conv1D

from autokernel_hf.judge.checks import Expected, check_values, expect, form_of
from autokernel_hf.kernels import kernel_type
from autokernel_hf.kernels._places import layer_class
from autokernel_hf.kernels.base import KernelType, make_inputs, with_layout
from autokernel_hf.kernels.rotary_embedding import LAYERS as ROTARY_LAYERS
from autokernel_hf.kernels.rotary_embedding import computes
from autokernel_hf.records import Site, TensorSpec, Workload

TYPES = ("matmul", "flash_attention", "fused_mlp", "cross_entropy", "rotary_embedding", "reduce")
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
    return made + [w for w in kind.workloads["cpu"] if "50257" not in w.label]


@pytest.mark.parametrize("name", TYPES)
def test_reference_is_within_tolerance_of_the_oracle(name: str) -> None:
    kind = kernel_type(name)
    for workload in workloads_of(kind):
        if workload.values == "nonfinite" and dict(workload.args).get("activation") == "gelu":
            continue  # torch's vectorized GELU gives NaN at +inf on a CPU, where the limit is inf
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
            outputs = [output.contiguous().clone() for output in kind.reference(**args)]
            for output in outputs:
                output.view(-1)[output.numel() // 2 :] = 0
            assert check_values(outputs, expect(kind, workload, args), kind, workload).problem, workload.label


def attention(**changed: Any) -> Callable[..., Tensor]:
    """The reference with some of its arguments changed on the way in."""
    return lambda **args: kernel_type("flash_attention").reference(**{**args, **changed})[0]


def top_left(**args: Any) -> Tensor:
    q, k, v = args["q"], args["k"], args["v"]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def rounded_to_tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def mutant_of_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, **others: Any) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_up)) * F.linear(x, w_gate), w_down)


def half_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    half = cos.shape[-1] // 2
    cos, sin = torch.cat([cos[..., :half]] * 2, -1), torch.cat([sin[..., :half]] * 2, -1)
    return kernel_type("rotary_embedding").reference(q, k, cos, sin)


def turned_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return kernel_type("rotary_embedding").reference(q, k, cos, -sin)


def maximum_without_nan(x: Tensor, dim: int, **others: Any) -> Tensor:
    return x.nan_to_num(-math.inf, math.inf, -math.inf).amax(dim, keepdim=bool(others["keepdim"]))


def mean_over_all_rows(logits: Tensor, target: Tensor, **others: Any) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="sum") / len(target)


ATTENTION = {"B": 1, "Hq": 2, "Sq": 40, "Sk": 56, "D": 32}
CAUSAL = {"causal": True}
ROTARY = {"B": 1, "Hq": 2, "Hk": 1, "S": 16, "D": 32}

MUTANTS: dict[str, tuple[str, dict[str, int], str, dict[str, Any], str, Callable[..., Any]]] = {
    "product in TF32": (
        "matmul",
        {"M": 64, "N": 64, "K": 256},
        "float32",
        {},
        "normal",
        lambda a, b, **others: rounded_to_tf32(a) @ rounded_to_tf32(b),
    ),
    "product summed in half precision": (
        "matmul",
        {"M": 32, "N": 32, "K": 1024},
        "float16",
        {},
        "normal",
        lambda a, b, **others: sum(x @ y for x, y in zip(a.split(16, 1), b.split(16, 0), strict=True)),
    ),
    "product without the bias": (
        "matmul",
        {"M": 16, "N": 32, "K": 64},
        "bfloat16",
        {"with_bias": True},
        "normal",
        lambda a, b, **others: a @ b,
    ),
    "residual before the activation": (
        "matmul",
        {"M": 16, "N": 32, "K": 64},
        "bfloat16",
        {"with_residual": True, "activation": "relu"},
        "normal",
        lambda a, b, residual, **others: F.relu(a @ b + residual),
    ),
    "float8 without its scales": (
        "matmul",
        {"M": 16, "N": 32, "K": 64},
        "float8_e4m3fn",
        {},
        "normal",
        lambda a, b, **others: a.bfloat16() @ b.bfloat16(),
    ),
    "causal from the top left": ("flash_attention", ATTENTION, "float32", CAUSAL, "normal", top_left),
    "not causal": ("flash_attention", ATTENTION, "bfloat16", CAUSAL, "normal", attention(causal=False)),
    "no window": (
        "flash_attention",
        ATTENTION,
        "bfloat16",
        {"causal": True, "window": 8},
        "normal",
        attention(window=-1),
    ),
    "window off by one": (
        "flash_attention",
        ATTENTION,
        "bfloat16",
        {"causal": True, "window": 8},
        "normal",
        attention(window=9),
    ),
    "packed as one sequence": (
        "flash_attention",
        ATTENTION,
        "bfloat16",
        {"sequences": 2},
        "normal",
        attention(cu_seqlens_q=None, cu_seqlens_k=None),
    ),
    "no mask": (
        "flash_attention",
        ATTENTION,
        "bfloat16",
        {"mask_kind": "bool"},
        "normal",
        attention(mask=None),
    ),
    "heads of keys in the wrong order": (
        "flash_attention",
        {**ATTENTION, "Hq": 4, "Hk": 2},
        "bfloat16",
        {},
        "normal",
        lambda q, k, v, **others: F.scaled_dot_product_attention(
            q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        ),
    ),
    "gate and up exchanged": (
        "fused_mlp",
        {"M": 8, "D": 32, "H": 64},
        "bfloat16",
        {},
        "normal",
        mutant_of_mlp,
    ),
    "mean over ignored rows": (
        "cross_entropy",
        {"N": 64, "V": 100},
        "float32",
        {},
        "normal",
        mean_over_all_rows,
    ),
    "no label smoothing": (
        "cross_entropy",
        {"N": 64, "V": 100},
        "bfloat16",
        {"label_smoothing": 0.1},
        "normal",
        lambda logits, target, **others: F.cross_entropy(logits.float(), target),
    ),
    "loss in half precision": (
        "cross_entropy",
        {"N": 64, "V": 100},
        "bfloat16",
        {"reduction": "none"},
        "normal",
        lambda logits, target, **others: F.cross_entropy(logits, target, reduction="none").float(),
    ),
    "softmax without the maximum": (
        "cross_entropy",
        {"N": 8, "V": 100},
        "float32",
        {},
        "large",
        lambda logits, target, **others: F.nll_loss(
            (logits.exp() / logits.exp().sum(-1, True)).log(), target
        ),
    ),
    "rotary that reads half of the tables": (
        "rotary_embedding",
        ROTARY,
        "bfloat16",
        {},
        "uniform",
        half_tables,
    ),
    "rotary that turns back": ("rotary_embedding", ROTARY, "bfloat16", {}, "normal", turned_back),
    "maximum that loses NaN": (
        "reduce",
        {"M": 32, "N": 512},
        "float32",
        {"op": "max"},
        "nonfinite",
        maximum_without_nan,
    ),
    "sum in half precision": (
        "reduce",
        {"M": 16, "N": 2048},
        "bfloat16",
        {"op": "mean"},
        "large_offset",
        lambda x, **others: sum(x.unbind(-1)) / x.shape[-1],
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_kernels_are_told_from_right_ones(mutant: str) -> None:
    name, axes, dtype, options, values, function = MUTANTS[mutant]
    kind = kernel_type(name)
    workload = kind.build(axes, dtype, options).model_copy(update={"values": values})
    args = make_inputs(kind, workload, 7)
    expected = expect(kind, workload, args)
    assert not check_values(kind.reference(**args), expected, kind, workload).problem
    outputs = function(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert check_values(outputs, expected, kind, workload).problem


# --- meaning ------------------------------------------------------------------------------------------------------


def bound(kind: KernelType, **args: Any) -> dict[str, Any]:
    return kind.schema.bind(args)


def test_a_query_that_sees_no_key_gives_zero() -> None:
    kind = kernel_type("flash_attention")
    q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (6, 4, 4))
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[2] = False
    for function in (kind.oracle, kind.reference):
        (masked,) = function(**bound(kind, q=q, k=k, v=v, mask=mask))
        assert torch.equal(masked[:, :, 2], torch.zeros(1, 2, 16, dtype=torch.float64))
        assert bool((masked[:, :, 3] != 0).all())
        (causal,) = function(**bound(kind, q=q, k=k, v=v, causal=True))
        assert torch.equal(causal[:, :, :2], torch.zeros(1, 2, 2, 16, dtype=torch.float64))
        torch.testing.assert_close(causal[:, :, 2], v[:, :, 0])


def test_packed_sequences_are_what_each_is_alone() -> None:
    kind = kernel_type("flash_attention")
    q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (12, 15, 15))
    bounds_q, bounds_k = torch.tensor([0, 5, 5, 12]), torch.tensor([0, 3, 7, 15])
    options = {"causal": True, "window": 4}
    (packed,) = kind.oracle(
        **bound(kind, q=q, k=k, v=v, cu_seqlens_q=bounds_q.int(), cu_seqlens_k=bounds_k.int(), **options)
    )
    for i in range(3):
        at_q = slice(int(bounds_q[i]), int(bounds_q[i + 1]))
        at_k = slice(int(bounds_k[i]), int(bounds_k[i + 1]))
        (alone,) = kind.oracle(**bound(kind, q=q[:, :, at_q], k=k[:, :, at_k], v=v[:, :, at_k], **options))
        torch.testing.assert_close(packed[:, :, at_q], alone)


def test_bounds_of_packed_sequences_fit_their_length_and_their_longest() -> None:
    kind = kernel_type("flash_attention")
    for axes, options in (*kind.sweep, *kind.edges):
        workload = kind.build(axes, "float32", options)
        if workload.arg("cu_seqlens_q") is None:
            continue
        args = make_inputs(kind, workload, 0)
        for side in "qk":
            bounds = args[f"cu_seqlens_{side}"]
            lengths = bounds.diff()
            assert bounds.dtype == torch.int32
            assert bounds[0] == 0
            assert bounds[-1] == args[side].shape[2]
            assert bool((lengths >= 0).all())
            assert int(lengths.max()) == args[f"max_seqlen_{side}"]


@pytest.mark.parametrize(
    ("axes", "options", "pairs"),
    [
        ({"Sq": 8}, {}, 64),
        ({"Sq": 8}, {"causal": True}, 36),
        ({"Sq": 4, "Sk": 8}, {"causal": True}, 5 + 6 + 7 + 8),
        ({"Sq": 6, "Sk": 4}, {"causal": True}, 1 + 2 + 3 + 4),
        ({"Sq": 8}, {"causal": True, "window": 3}, 1 + 2 + 6 * 3),
        ({"Sq": 8}, {"window": 3}, 8 + 8 + 8 + 7 + 6 + 5 + 4 + 3),
        ({"Sq": 8, "Sk": 4}, {"sequences": 2}, 6 * 3 + 2 * 1),
    ],
)
def test_attention_counts_the_work_of_visible_pairs(
    axes: dict[str, int], options: dict[str, Any], pairs: int
) -> None:
    kind = kernel_type("flash_attention")
    workload = kind.build({"B": 1, "Hq": 3, "D": 16, **axes}, "float32", options)
    assert kind.flops(workload) == 2 * 3 * pairs * (16 + 16)


def test_loss_of_no_counted_row_is_nan_and_its_sum_zero() -> None:
    kind = kernel_type("cross_entropy")
    logits, target = torch.randn(4, 9, dtype=torch.float64), torch.full((4,), -100)
    for function in (kind.oracle, kind.reference):
        assert math.isnan(function(**bound(kind, logits=logits, target=target))[0])
        assert function(**bound(kind, logits=logits, target=target, reduction="sum"))[0] == 0


def test_reductions_of_nothing_are_as_in_torch() -> None:
    kind = kernel_type("reduce")
    empty = torch.zeros(3, 0)
    assert torch.equal(kind.reference(empty, op="sum")[0], torch.zeros(3))
    assert torch.equal(kind.reference(empty, op="prod")[0], torch.ones(3))
    assert bool(kind.reference(empty, op="mean")[0].isnan().all())
    for op in ("max", "min"):
        with pytest.raises(IndexError):
            kind.reference(empty, op=op)


@pytest.mark.parametrize(
    ("name", "axes", "options", "bytes_moved", "flops"),
    [
        ("matmul", {"M": 8, "N": 16, "K": 32}, {}, 4 * (8 * 32 + 32 * 16 + 8 * 16), 2 * 8 * 16 * 32),
        ("fused_mlp", {"M": 8, "D": 16, "H": 32}, {}, 4 * (2 * 8 * 16 + 3 * 16 * 32), 6 * 8 * 16 * 32),
        ("cross_entropy", {"N": 8, "V": 32}, {}, 4 * 8 * 32 + 8 * 8 + 4, 4 * 8 * 32),
        ("reduce", {"M": 8, "N": 32}, {"dim": 0}, 4 * (8 * 32 + 32), 8 * 32),
        (
            "rotary_embedding",
            {"B": 1, "Hq": 2, "Hk": 1, "S": 8, "D": 16},
            {},
            4 * (2 * 3 * 8 * 16 + 2 * 8 * 16),
            3 * 3 * 8 * 16,
        ),
    ],
)
def test_least_work_is_counted(
    name: str, axes: dict[str, int], options: dict[str, Any], bytes_moved: int, flops: int
) -> None:
    kind = kernel_type(name)
    workload = kind.build(axes, "float32", options)
    assert kind.bytes_moved(workload) == bytes_moved
    assert kind.flops(workload) == flops


# --- the references are what models compute -----------------------------------------------------------------------


def over_reference(name: str, layer: str) -> nn.Module:
    """A layer that ships, over its type's reference in place of a kernel."""
    kind = kernel_type(name)

    def op(*args: Any, **options: Any) -> Any:
        names = [a.name for a in kind.schema.args]
        outputs = kind.reference(**kind.schema.bind({**dict(zip(names, args, strict=False)), **options}))
        return outputs if len(outputs) > 1 else outputs[0]

    return layer_class(name, layer, op)()


def replaced(module: nn.Module, name: str, layer: str) -> Callable[..., Any]:
    """A module's forward as a layer would compute it: the layer has no state, the module's is its own."""
    return types.MethodType(type(over_reference(name, layer)).forward, module)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_bit_for_bit_those_of_models(dtype: torch.dtype, bias: bool) -> None:
    linear, conv = nn.Linear(48, 32, bias=bias).to(dtype), Conv1D(32, 48).to(dtype)
    nn.init.normal_(conv.bias)
    for shape in ((5, 48), (2, 7, 48), (1, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype)
        assert torch.equal(replaced(linear, "matmul", "Linear")(x), linear(x))
        assert torch.equal(replaced(conv, "matmul", "Conv1D")(x), conv(x))


def mlps() -> dict[str, nn.Module]:
    """A block of a real model for each layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4}

    def llama(act: str) -> nn.Module:
        return LlamaMLP(transformers.LlamaConfig(**sizes, mlp_bias=True, hidden_act=act))

    def clip(act: str) -> nn.Module:
        return CLIPMLP(transformers.CLIPVisionConfig(**sizes, hidden_act=act))

    return {
        "FusedSwiGLUMLP": llama("silu"),
        "FusedGeGLUMLP": llama("gelu_pytorch_tanh"),
        "FusedGeGLUErfMLP": llama("gelu"),
        "FusedPackedSwiGLUMLP": Phi3MLP(transformers.Phi3Config(**sizes)),
        "FusedGELUMLP": clip("gelu"),
        "FusedGELUTanhMLP": clip("gelu_pytorch_tanh"),
        "FusedNewGELUMLP": clip("gelu_new"),
        "FusedQuickGELUMLP": clip("quick_gelu"),
        "FusedNeoXMLP": GPTNeoXMLP(transformers.GPTNeoXConfig(**sizes)),
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_feed_forward_layers_are_those_of_models(dtype: torch.dtype) -> None:
    found = mlps()
    assert set(found) == {layer.name for layer in kernel_type("fused_mlp").layers}
    for layer, module in found.items():
        module = module.to(dtype).eval()
        x = torch.randn(2, 9, 32, dtype=dtype)
        ours, theirs = replaced(module, "fused_mlp", layer)(x), module(x)
        if layer == "FusedPackedSwiGLUMLP":  # one product there, two here: the order of summation may differ
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs), layer


def attention_calls() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What transformers' `sdpa` gets: (attributes of the module, arguments)."""

    def heads(H: int, S: int, D: int = 16) -> Tensor:
        return torch.randn(2, S, H, D).transpose(1, 2)

    causal, other = {"is_causal": True}, {"is_causal": False}
    shown = torch.rand(2, 1, 12, 12) < 0.7
    shown[:, :, 3] = False  # a padded query, which sees nothing
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~shown, torch.finfo(torch.float32).min)
    square = {"query": heads(4, 12), "key": heads(4, 12), "value": heads(4, 12)}
    yield causal, {**square, "attention_mask": None, "scaling": 0.3}
    yield other, {**square, "attention_mask": None}
    yield causal, {**square, "attention_mask": None, "is_causal": False}
    yield {}, {**square, "attention_mask": None}
    yield causal, {**square, "attention_mask": shown}
    yield causal, {**square, "attention_mask": additive}
    grouped = {"query": heads(4, 12), "key": heads(2, 12), "value": heads(2, 12)}
    yield {"num_key_value_groups": 2, **causal}, {**grouped, "attention_mask": None}
    yield {"num_key_value_groups": 2, **causal}, {**grouped, "attention_mask": shown}
    decode = {"query": heads(4, 1), "key": heads(4, 12), "value": heads(4, 12)}
    yield causal, {**decode, "attention_mask": None}
    static = {"query": heads(4, 5), "key": heads(4, 12), "value": heads(4, 12)}
    yield causal, {**static, "attention_mask": None}
    tall = {"query": heads(4, 12), "key": heads(4, 5), "value": heads(4, 5)}
    yield causal, {**tall, "attention_mask": None}
    bias = torch.randn(1, 4, 12, 12)
    for attributes in (causal, other):
        yield attributes, {**square, "attention_mask": None, "position_bias": bias}
    yield causal, {**square, "attention_mask": shown, "position_bias": bias}
    yield causal, {**square, "attention_mask": additive / 2, "position_bias": bias}


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    layer = over_reference("flash_attention", "SDPAttention")
    for attributes, call in attention_calls():
        typed = {
            k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()
        }
        module = types.SimpleNamespace(**attributes)
        theirs, _ = sdpa_attention_forward(module, **typed)
        ours, weights = layer.forward(module, **typed)
        assert weights is None
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs), (attributes, {k: getattr(v, "shape", v) for k, v in call.items()})


def test_attention_refuses_what_it_does_not_compute() -> None:
    layer = over_reference("flash_attention", "SDPAttention")
    q = torch.randn(1, 2, 4, 16)
    for unknown in ({"dropout": 0.1}, {"softcap": 30.0}, {"cache": object()}):
        with pytest.raises(NotImplementedError):
            layer.forward(nn.Module(), q, q, q, None, **unknown)


def test_loss_is_bit_for_bit_that_of_torch_in_float32() -> None:
    logits, wide = torch.randn(6, 11), torch.randn(3, 11, 2, 4)
    target, images = torch.randint(11, (6,)), torch.randint(11, (3, 2, 4))
    for options in (
        {},
        {"reduction": "none"},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"ignore_index": 3},
    ):
        module = nn.CrossEntropyLoss(**options)
        target[2] = images[0, 1, 1] = module.ignore_index
        target[0] = 1  # by itself it must not be the ignored one, whose mean is of nothing
        loss = replaced(module, "cross_entropy", "CrossEntropyLoss")
        assert torch.equal(loss(logits, target), module(logits, target))
        # torch sums the classes of an image in another order.
        torch.testing.assert_close(loss(wide, images), module(wide, images))
        assert torch.equal(loss(logits[0], target[0]), module(logits[0], target[0]))
        probabilities = torch.softmax(torch.randn(6, 11), -1)
        if module.reduction == "none" or not options:
            assert torch.equal(loss(logits, probabilities), module(logits, probabilities))
    narrow = replaced(nn.CrossEntropyLoss(), "cross_entropy", "CrossEntropyLoss")(logits.half(), target)
    assert narrow.dtype == torch.float16


# modeling file -> the one layer that computes its function; None: none does.
ROTARY_FUNCTIONS: dict[str, str | None] = {
    "llama": "RotaryEmbedding",
    "mistral": "RotaryEmbedding",
    "qwen3": "RotaryEmbedding",
    "gemma": "RotaryEmbedding",
    "gpt_neox": "RotaryEmbedding",  # the first dimensions only
    "phi3": "RotaryEmbedding",
    "olmo2": "RotaryEmbeddingKeepingDtype",
    "modernbert": "RotaryEmbeddingFloat32",
    "gpt_oss": "RotaryEmbeddingHalfTables",
    "cohere": "RotaryEmbeddingInterleaved",
    "glm": "RotaryEmbeddingInterleavedHalves",
    "ernie4_5": "RotaryEmbeddingInterleavedHalvesFloat32",
    "gptj": None,  # one tensor, interleaved
    "codegen": None,
    "nanochat": None,  # turns the other way, under the same name and hook
    "blt": None,
    "gemma3n": None,  # one tensor
    "qwen4_exp": None,  # k may be left out
    "dinov3_vit": None,  # leading tokens are not rotated
}


@pytest.mark.parametrize("model", ROTARY_FUNCTIONS)
def test_each_rotary_function_is_taken_for_what_it_computes(model: str) -> None:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    layers = [layer.name for layer in ROTARY_LAYERS if computes(module.apply_rotary_pos_emb, layer.name)]
    wanted = ROTARY_FUNCTIONS[model]
    assert layers == ([] if wanted is None else [wanted])


def test_rotary_of_vision_towers_is_found() -> None:
    module = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    assert computes(module.apply_rotary_pos_emb_vision, "RotaryEmbeddingVision")
    assert not computes(module.apply_rotary_pos_emb_vision, "RotaryEmbedding")


@pytest.mark.parametrize("dtype", FLOATS)
def test_rotary_layer_takes_both_orders_of_heads_and_positions(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layer = over_reference("rotary_embedding", "RotaryEmbedding")
    q, k = torch.randn(2, 6, 4, 16, dtype=dtype), torch.randn(2, 6, 2, 16, dtype=dtype)
    cos, sin = torch.randn(2, 1, 6, 16, dtype=dtype)
    for call in (
        (q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        (q, k, cos, sin, 2),
        (q[0], k[0], cos[0], sin[0]),
    ):
        for ours, theirs in zip(layer.forward(*call), apply_rotary_pos_emb(*call), strict=True):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="each head"):
        layer.forward(q, k, torch.randn(6, 4, 16), torch.randn(6, 4, 16), 0)


# --- sites --------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}
IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Counter[str]]]] = {
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SMALL, "num_key_value_heads": 2},
        {
            "matmul": Counter(Linear=15),
            "flash_attention": Counter(SDPAttention=1),
            "fused_mlp": Counter(FusedSwiGLUMLP=2),
            "rotary_embedding": Counter(RotaryEmbedding=1),
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**GPT, **IDS},
        {"matmul": Counter(Linear=1, Conv1D=8), "flash_attention": Counter(SDPAttention=1)},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        SMALL,
        {"matmul": Counter(Linear=14), "flash_attention": Counter(SDPAttention=1)},
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**SMALL, **IDS, "num_key_value_heads": 2, "pad_token_id": 0},
        {
            "matmul": Counter(Linear=9),
            "flash_attention": Counter(SDPAttention=1),
            "fused_mlp": Counter(FusedPackedSwiGLUMLP=2),
            "rotary_embedding": Counter(RotaryEmbedding=1),
        },
    ),
    "cohere": (
        "CohereConfig",
        "CohereForCausalLM",
        {**SMALL, **IDS, "num_key_value_heads": 2},
        {
            "matmul": Counter(Linear=15),
            "flash_attention": Counter(SDPAttention=1),
            "fused_mlp": Counter(FusedSwiGLUMLP=2),
            "rotary_embedding": Counter(RotaryEmbeddingInterleaved=1),
        },
    ),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {**GPT, **IDS, "rotary_dim": 4},
        {"matmul": Counter(Linear=13)},
    ),
}


def tiny(model: str, **changed: Any) -> Any:
    config, cls, options, _ = MODELS[model]
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, config)(**{**options, **changed})).eval()


@pytest.mark.parametrize("model", MODELS)
def test_sites_of_small_models_are_found(model: str) -> None:
    built = tiny(model)
    for name in TYPES:
        sites = kernel_type(name).find(built)
        assert Counter(site.layer for site in sites) == MODELS[model][3].get(name, Counter()), name
        for site in sites:
            if site.attach == "module":
                assert isinstance(built.get_submodule(site.path), nn.Module)


def test_eager_attention_is_no_site() -> None:
    assert kernel_type("flash_attention").find(tiny("llama", attn_implementation="eager")) == []


def test_losses_with_class_weights_are_no_site() -> None:
    model = nn.ModuleDict({"plain": nn.CrossEntropyLoss(), "weighted": nn.CrossEntropyLoss(torch.ones(3))})
    assert [site.path for site in kernel_type("cross_entropy").find(model)] == ["plain"]


def test_subclasses_of_linear_are_no_site() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "attention": nn.MultiheadAttention(4, 2)})
    assert [site.path for site in kernel_type("matmul").find(model)] == ["linear"]


@contextmanager
def patched(model: nn.Module, name: str, sites: list[Site], calls: Counter[str]) -> Iterator[None]:
    """The sites of a type replaced by their layers over the type's reference, their calls counted."""
    undo: list[Callable[[], None]] = []

    def counted(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[path] += 1
            return function(*args, **options)

        return call

    for site in sites:
        if site.attach == "module":
            module = model.get_submodule(site.path)
            module.forward = counted(site.path, replaced(module, name, site.layer))
            undo.append(lambda module=module: delattr(module, "forward"))
            continue
        forward = counted(site.path, over_reference(name, site.layer).forward)
        if site.attach == "function":
            place, attribute = site.path.split(":")
            owner = importlib.import_module(place)
            original = getattr(owner, attribute)
            undo.append(lambda o=owner, a=attribute, f=original: setattr(o, a, f))
            setattr(owner, attribute, forward)
        else:
            undo.append(
                lambda p=site.path, f=ALL_ATTENTION_FUNCTIONS[site.path]: ALL_ATTENTION_FUNCTIONS.register(
                    p, f
                )
            )
            ALL_ATTENTION_FUNCTIONS.register(site.path, forward)
    try:
        yield
    finally:
        for action in undo:
            action()


@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "cohere"])
def test_a_model_with_its_sites_replaced_gives_the_same_bits(model: str) -> None:
    built = tiny(model)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0  # on the left: causal queries that see only padding
    for mask in (torch.ones_like(ids), padding):
        with torch.no_grad():
            plain = built(input_ids=ids, attention_mask=mask).logits
        for name in MODELS[model][3]:
            sites, calls = kernel_type(name).find(built), Counter[str]()
            with patched(built, name, sites, calls), torch.no_grad():
                changed = built(input_ids=ids, attention_mask=mask).logits
            assert torch.equal(changed, plain), name
            assert set(calls) == {site.path for site in sites}, name


# --- the Hub's rules ----------------------------------------------------------------------------------------------


# A layer -> a modeling file whose function it replaces.
ROTARY_OF = {layer: model for model, layer in ROTARY_FUNCTIONS.items() if layer is not None}


def replaced_class(name: str, layer: str) -> type[nn.Module]:
    if name == "fused_mlp":
        return type(mlps()[layer])
    if name == "rotary_embedding":
        vision = layer == "RotaryEmbeddingVision"
        model = "qwen2_vl" if vision else ROTARY_OF[layer]
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        function = module.apply_rotary_pos_emb_vision if vision else module.apply_rotary_pos_emb
        # transformers has made a module of the functions that it offers to kernelize.
        return type(function) if isinstance(function, nn.Module) else _create_func_module(function)
    return {"Linear": nn.Linear, "Conv1D": Conv1D, "CrossEntropyLoss": nn.CrossEntropyLoss}[layer]


@pytest.mark.parametrize("name", ["matmul", "fused_mlp", "cross_entropy", "rotary_embedding"])
def test_layers_keep_the_rules_of_the_hub(name: str) -> None:
    for layer in kernel_type(name).layers:
        cls = layer_class(name, layer.name, lambda *args: args)
        _validate_layer(check_cls=replaced_class(name, layer.name), cls=cls, repo=f"layer {layer.name}")
        assert cls.can_torch_compile is True
        assert cls.has_backward is False


def test_attention_exports_what_transformers_looks_for() -> None:
    """`attn_implementation="ns/name"` wants these two names of a package, and gives masks as to `sdpa`."""
    layer = layer_class("flash_attention", "SDPAttention", lambda *args, **options: args[0])
    names = layer.forward.__globals__
    assert names["supports_flash_attn"] is True
    out, weights = names["flash_attn_forward"](nn.Module(), *[torch.zeros(1, 2, 3, 4)] * 3, None)
    assert out.shape == (1, 3, 2, 4)
    assert weights is None


def calls_of_layers() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A call of every layer, as (name, forward, arguments, options)."""
    linear, conv, loss = nn.Linear(8, 6), Conv1D(6, 8), nn.CrossEntropyLoss()
    yield "Linear", replaced(linear, "matmul", "Linear"), (torch.randn(2, 3, 8),), {}
    yield "Conv1D", replaced(conv, "matmul", "Conv1D"), (torch.randn(2, 3, 8),), {}
    target = torch.randint(8, (4,))
    yield "loss", replaced(loss, "cross_entropy", "CrossEntropyLoss"), (torch.randn(4, 8), target), {}
    for layer, module in mlps().items():
        yield layer, replaced(module, "fused_mlp", layer), (torch.randn(2, 3, 32),), {}
    q, k, cos, sin = (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 2, 5, 8),
        torch.randn(1, 5, 8),
        torch.randn(1, 5, 8),
    )
    for rotary in ROTARY_LAYERS:
        forward = over_reference("rotary_embedding", rotary.name).forward
        if rotary.name == "RotaryEmbeddingVision":
            yield rotary.name, forward, (q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0]), {}
        elif rotary.name == "RotaryEmbeddingHalfTables":
            yield rotary.name, forward, (q, k, cos[..., :4], sin[..., :4]), {}
        else:
            yield rotary.name, forward, (q, k, cos, sin), {}
    attention_forward = over_reference("flash_attention", "SDPAttention").forward
    for attributes, call in list(attention_calls())[::3]:
        module = nn.Module()
        for key, value in attributes.items():
            setattr(module, key, value)
        yield "SDPAttention", attention_forward, (module,), call


def test_layers_compile_without_a_graph_break() -> None:
    for name, forward, args, options in calls_of_layers():
        torch._dynamo.reset()
        traced = torch.compile(forward, backend="eager", fullgraph=True)(*args, **options)
        plain = forward(*args, **options)
        pairs = zip(traced, plain, strict=True) if isinstance(plain, tuple) else [(traced, plain)]
        for t, p in pairs:
            assert t is p is None or torch.equal(t, p), name


@pytest.mark.parametrize("name", TYPES)
def test_every_layer_of_the_file_is_offered(name: str) -> None:
    from autokernel_hf.kernels import layers_source

    source = layers_source(name)
    defined = (
        []
        if source is None
        else [line.split("(")[0][6:] for line in source.splitlines() if line.startswith("class ")]
    )
    assert sorted(defined) == sorted(layer.name for layer in kernel_type(name).layers)


# --- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_peers_on_a_gpu_are_right_where_they_answer(name: str) -> None:
    """A peer that is wrong would be dropped (`Bench`), so that nobody would notice that one is missing."""
    kind, device = kernel_type(name), torch.device("cuda")
    wrong = []
    for axes, options in kind.sweep[:3]:
        for dtype in kind.dtypes:
            workload = kind.build(axes, dtype, options)
            args = make_inputs(kind, workload, 3, device)
            expected: Expected = expect(kind, workload, args)
            for peer in kind.peers:
                run = peer.make(workload, device) if not peer.name.startswith("compile") else None
                if run is None:
                    continue
                outputs = run(**args)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                problem = form_of(outputs, expected)
                problem = problem or check_values(outputs, expected, kind, workload).problem
                if problem:
                    wrong.append(
                        f"{peer.name}, {workload.label} {dtype} {dict(options)}: {problem}; torch's own error is "
                        f"{expected.torch_error}"
                    )
    assert not wrong, "\n".join(wrong)


def test_ligers_loss_is_no_peer_where_it_keeps_the_loss_in_the_logits_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = types.ModuleType("liger_kernel.transformers.functional")
    made.liger_cross_entropy = F.cross_entropy  # type: ignore[attr-defined]
    for parent in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    kind = kernel_type("cross_entropy")
    (liger,) = (peer for peer in kind.peers if peer.name == "liger")
    answers = {
        dtype: liger.make(kind.build({"N": 4, "V": 8}, dtype, {}), torch.device("cuda")) is not None
        for dtype in kind.dtypes
    }
    assert answers == {"float32": True, "float16": False, "bfloat16": False}
