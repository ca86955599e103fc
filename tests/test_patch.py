"""A patch replaces exactly its sites, and puts back the very objects that were there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autokernel_hf import patch
from autokernel_hf.errors import ModelError, PackageError
from autokernel_hf.kernels import kernel_type
from autokernel_hf.patch import Patch, all_sites, apply_sites, load_layers, patched, rebound, restore_sites
from autokernel_hf.records import Site


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


IDS = torch.arange(3, 19)[None]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def counting(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)[0]

    return counted, calls


def forwards(model: nn.Module) -> dict[str, Any]:
    """What a caller of each module runs: class functions and instance attributes, by identity."""
    return {name: vars(module).get("forward", type(module).forward) for name, module in model.named_modules()}


def test_reference_layers_leave_the_output_bit_for_bit_and_are_called_once_a_site() -> None:
    model = llama()
    before, sites = logits(model), all_sites(model, ["rmsnorm"])
    function, calls = counting(kernel_type("rmsnorm").reference)
    with patched(model, sites, {"rmsnorm": load_layers("rmsnorm", function)}):
        assert torch.equal(logits(model), before)
    assert len(calls) == len(sites) == 5


def test_every_site_has_the_object_it_had_before() -> None:
    model = llama()
    norm = model.model.norm
    own = norm.forward
    vars(norm)["forward"] = own  # such as another library leaves behind
    before, members = forwards(model), {n: set(vars(m)) for n, m in model.named_modules()}
    function, _ = counting(lambda x, *rest: (x * 2,))
    handle = apply_sites(model, all_sites(model, ["rmsnorm"]), {"rmsnorm": load_layers("rmsnorm", function)})
    assert forwards(model) != before
    restore_sites(handle)
    after = forwards(model)
    assert all(after[name] is before[name] for name in before)
    assert {n: set(vars(m)) for n, m in model.named_modules()} == members
    assert vars(norm)["forward"] is own


def test_an_exception_inside_the_block_restores_and_comes_through() -> None:
    model = llama()
    before = forwards(model)
    with (
        pytest.raises(ZeroDivisionError),
        patched(model, all_sites(model, ["rmsnorm"]), {"rmsnorm": load_layers("rmsnorm", lambda *a: a[0])}),
    ):
        raise ZeroDivisionError
    assert forwards(model) == before


def test_a_patch_on_a_patched_site_is_refused_and_changes_nothing() -> None:
    model = llama()
    sites = all_sites(model, ["rmsnorm"])
    layers = {"rmsnorm": load_layers("rmsnorm", lambda x, *rest: x)}
    with patched(model, sites[-1:], layers):
        inside = forwards(model)
        with pytest.raises(ModelError, match="already replaced, by RMSNorm"):
            apply_sites(model, sites, layers)
        assert forwards(model) == inside


def test_a_site_that_someone_else_changed_meanwhile_is_restored_and_told() -> None:
    model = llama()
    norm, layers = model.model.norm, {"rmsnorm": load_layers("rmsnorm", lambda x, *rest: x)}
    handle = apply_sites(model, all_sites(model, ["rmsnorm"]), layers)
    norm.forward = lambda hidden_states: hidden_states
    with pytest.raises(ModelError, match=r"model\.norm was changed"):
        handle.restore()
    assert "forward" not in vars(norm)


def test_sites_of_another_model_and_layers_that_are_not_there_are_told() -> None:
    small, sites = llama(1), all_sites(llama(2), ["rmsnorm"])
    layers = load_layers("rmsnorm", lambda x, *rest: x)
    with pytest.raises(ModelError, match=r"no module model\.layers\.1"):
        Patch(small, sites, {"rmsnorm": layers})
    with pytest.raises(PackageError, match="no layers of type rmsnorm"):
        Patch(small, sites[:1], {})
    with pytest.raises(PackageError, match="has no layer Other"):
        Patch(small, [sites[0].model_copy(update={"layer": "Other"})], {"rmsnorm": layers})
    with pytest.raises(PackageError, match="has no layers"):
        load_layers("nothing", lambda: None)


# --- functions and attention --------------------------------------------------------------------------------------

ROTARY_LAYERS = """
import torch
from torch import nn

class Rotary(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotary(q, k, cos, sin)
"""

ATTENTION_LAYERS = """
import torch
from torch import nn

class Attention(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
        return attention(module, query, key, value, attention_mask, scaling)
"""


def layers_of(source: str, **names: Any) -> ModuleType:
    module = ModuleType(f"_test_layers_{len(sys.modules)}")
    sys.modules[module.__name__] = module
    vars(module).update(names)
    exec(source, vars(module))
    return module


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


ROTARY_SITE = Site(
    name="modeling_llama:apply_rotary_pos_emb",
    kernel_type="rotary_embedding",
    layer="Rotary",
    attach="function",
    path="transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
)
SDPA_SITE = Site(
    name="sdpa", kernel_type="flash_attention", layer="Attention", attach="attention", path="sdpa"
)


def test_a_function_made_into_a_module_by_a_decorator_is_replaced_and_put_back() -> None:
    import transformers.models.llama.modeling_llama as modeling

    model, original = llama(), modeling.apply_rotary_pos_emb
    assert isinstance(original, nn.Module)  # else this test would prove less than it says
    before, calls = logits(model), []

    def counted(*args: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return rotary(*args)

    with patched(model, [ROTARY_SITE], {"rotary_embedding": layers_of(ROTARY_LAYERS, rotary=counted)}):
        assert torch.equal(logits(model), before)
    assert len(calls) == 2
    assert modeling.apply_rotary_pos_emb is original


def test_two_models_share_a_function_s_replacement_but_not_two_different_ones() -> None:
    import transformers.models.llama.modeling_llama as modeling

    original = modeling.apply_rotary_pos_emb
    layers = {"rotary_embedding": layers_of(ROTARY_LAYERS, rotary=rotary)}
    first = apply_sites(llama(), [ROTARY_SITE], layers)
    second = apply_sites(llama(), [ROTARY_SITE], layers)
    with pytest.raises(ModelError, match="already replaced"):
        apply_sites(llama(), [ROTARY_SITE], {"rotary_embedding": layers_of(ROTARY_LAYERS, rotary=rotary)})
    first.restore()
    assert modeling.apply_rotary_pos_emb is not original
    second.restore()
    assert modeling.apply_rotary_pos_emb is original


def test_an_attention_entry_is_replaced_and_put_back_also_where_there_was_none() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, calls = llama(), []
    before, original = logits(model), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float
    ) -> tuple[Tensor, None]:
        calls.append(tuple(q.shape))
        return original(module, q, k, v, mask, scaling=scaling)

    layers = {"flash_attention": layers_of(ATTENTION_LAYERS, attention=attention)}
    with patched(model, [SDPA_SITE], layers):
        assert torch.equal(logits(model), before)
    assert calls == [(1, 4, 16, 16)] * 2
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is original
    eager = SDPA_SITE.model_copy(update={"path": "eager"})
    with patched(model, [eager], layers):
        assert "eager" in ALL_ATTENTION_FUNCTIONS
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


def test_a_patched_model_compiles_whole_and_runs_the_replacements() -> None:
    """Also after the patch was taken out and put in again: the replacing objects stay the same."""

    @torch.library.custom_op("ak_test_patch::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    double.register_fake(torch.empty_like)
    calls: list[int] = []
    torch._dynamo.reset()
    plain = llama()
    model = copy.deepcopy(plain)
    layers = {
        "rmsnorm": load_layers("rmsnorm", lambda x, *rest: torch.ops.ak_test_patch.double(x)),
        "rotary_embedding": layers_of(ROTARY_LAYERS, rotary=lambda q, k, cos, sin: (k.new_zeros(q.shape), k)),
    }
    change = Patch(model, [*all_sites(model, ["rmsnorm"]), ROTARY_SITE], layers)
    with change:
        expected = logits(model)
    assert not torch.allclose(expected, logits(plain))
    calls.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled_plain = torch.compile(plain, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with change:
            assert torch.allclose(logits(compiled), expected, atol=1e-5)
        assert torch.allclose(logits(compiled_plain), logits(plain), atol=1e-5)
    assert (
        len(calls) == 10
    )  # 5 norms a pass: the compiled code runs the op, it did not fall back to the plain forward


def test_rebound_layers_call_the_new_function_and_leave_the_old_ones_alone() -> None:
    model = llama()
    sites = all_sites(model, ["rmsnorm"])
    old, old_calls = counting(kernel_type("rmsnorm").reference)
    new, new_calls = counting(kernel_type("rmsnorm").reference)
    layers = load_layers("rmsnorm", old)
    with patched(model, sites, {"rmsnorm": rebound(layers, "rmsnorm", new)}):
        logits(model)
    assert (len(old_calls), len(new_calls)) == (0, 5)
    with patched(model, sites, {"rmsnorm": layers}):
        logits(model)
    assert (len(old_calls), len(new_calls)) == (5, 5)
    with pytest.raises(PackageError, match="do not call a function softmax"):
        rebound(layers, "softmax", new)


@pytest.mark.parametrize("name", ["flash_attention", "rotary_embedding", "fused_mlp", "gated_activation"])
def test_rebound_layers_reach_kernels_that_are_called_in_helpers_of_the_layers_file(name: str) -> None:
    model, kind = llama(), kernel_type(name)
    sites = kind.find(model)
    assert sites
    before = logits(model)

    def returning(calls: list[int]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            out = kind.reference(*args, **kwargs)
            return out if kind.schema.returns > 1 else out[0]

        return function

    old_calls: list[int] = []
    new_calls: list[int] = []
    layers = rebound(load_layers(name, returning(old_calls)), name, returning(new_calls))
    with patched(model, sites, {name: layers}):
        assert torch.allclose(logits(model), before, atol=1e-5)
    assert (len(old_calls), len(new_calls)) == (0, 2)


def test_nothing_is_left_in_the_registry() -> None:
    assert patch._shared == {}
