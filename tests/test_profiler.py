"""A profile says where the time goes, at the places that a kernel can replace, each part of the pass once."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autokernel_hf import clocks, profiler
from autokernel_hf.errors import DeviceError, ModelError, UsageError
from autokernel_hf.extract import extract
from autokernel_hf.kernels import kernel_type
from autokernel_hf.models import LoadedModel, load
from autokernel_hf.patch import all_sites, load_layers, patched
from autokernel_hf.profiler import pattern, profile
from autokernel_hf.records import ModelSpec, Profile, Site, SiteProfile
from tests.trained import minilm


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "BUDGET_S", 0.3)


def loaded_from(folder: Path, config: Any, architecture: str, **spec: Any) -> LoadedModel:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return load(ModelSpec(model=str(folder), random_weights=True, device="cpu", **spec))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return loaded_from(tmp_path_factory.mktemp("llama"), config, "LlamaForCausalLM", input_shape=(2, 16))


@pytest.fixture(scope="module")
def llama_profile(tiny_llama: LoadedModel) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "BUDGET_S", 0.3)
        return profile(tiny_llama)


def rows(found: Profile, kernel: str) -> list[SiteProfile]:
    return sorted((r for r in found.sites if r.kernel_type == kernel), key=lambda r: r.name)


# --- what is found ------------------------------------------------------------------------------------------------


def test_sites_of_a_llama_are_grouped_by_type_layer_and_name(llama_profile: Profile) -> None:
    found = {(r.kernel_type, r.name): (len(r.sites), r.calls) for r in llama_profile.sites}
    norms = {name: counts for (kind, name), counts in found.items() if kind == "rmsnorm"}
    assert norms == {
        "model.layers.*.input_layernorm": (2, 2),
        "model.layers.*.post_attention_layernorm": (2, 2),
        "model.norm": (1, 1),
    }
    assert found["rotary_embedding", "modeling_llama:apply_rotary_pos_emb"] == (1, 2)
    assert found["flash_attention", "sdpa"] == (1, 2)
    assert found["gated_activation", "model.layers.*.mlp"] == (2, 2)
    assert found["matmul", "lm_head"] == (1, 1)
    assert not any(kind in ("activation", "cross_entropy") for kind, _ in found)


def test_workloads_are_the_calls_as_they_occur(llama_profile: Profile) -> None:
    (rotary,) = rows(llama_profile, "rotary_embedding")
    (workload,) = rotary.workloads
    q = workload.tensor("q")
    # (B, S, H, D) in memory, seen as (B, H, S, D): a kernel gets these strides.
    assert (q.shape, q.strides) == ((2, 4, 16, 16), (16 * 64, 16, 64, 1))
    assert [name for name, _ in workload.args] == [
        a.name for a in kernel_type("rotary_embedding").schema.args
    ]
    assert workload.arg("interleaved") is False
    norm = rows(llama_profile, "rmsnorm")[0].workloads[0]
    assert (norm.arg("eps"), norm.arg("offset"), norm.calls) == (1e-6, 0.0, 2)
    assert norm.label == norm.shape == "2x16x64,64"


def test_shares_add_up_and_agree_with_the_times(llama_profile: Profile) -> None:
    counted = [r for r in llama_profile.sites if r.nested_in is None]
    assert sum(r.share for r in counted) + llama_profile.other_share == pytest.approx(1.0)
    assert [r.share for r in llama_profile.sites] == sorted(
        (r.share for r in llama_profile.sites), reverse=True
    )
    for row in llama_profile.sites:
        assert 0 < row.share < 1
        assert row.ms == pytest.approx(row.share * llama_profile.total_ms)
        assert row.attainable_ms > 0
        assert row.bound in ("memory", "compute", "launch")
        assert row.calls == sum(w.calls for w in row.workloads)
    assert json.loads(llama_profile.model_dump_json())["sites"][0]["share"] == llama_profile.sites[0].share


def test_what_a_whole_mlp_encloses_is_marked_and_counted_once(llama_profile: Profile) -> None:
    (whole,) = rows(llama_profile, "fused_mlp")
    assert whole.nested_in is None
    inside = {(r.kernel_type, r.name) for r in llama_profile.sites if r.nested_in == whole.name}
    assert inside == {
        ("gated_activation", "model.layers.*.mlp"),
        *(("matmul", f"model.layers.*.mlp.{p}_proj") for p in ("gate", "up", "down")),
    }
    assert len({r.name for r in llama_profile.sites if r.kernel_type != "matmul"}) == len(
        [r for r in llama_profile.sites if r.kernel_type != "matmul"]
    )


def test_targets_of_a_profile_never_overlap(llama_profile: Profile, tiny_llama: LoadedModel) -> None:
    fast = llama_profile.model_copy(  # a floor of nothing: everything is worth a kernel
        update={"sites": tuple(r.model_copy(update={"attainable_ms": 0.0}) for r in llama_profile.sites)}
    )
    targets, _ = extract(fast, top=12)
    assert {"rmsnorm", "rotary_embedding"} <= {t.name for t in targets}
    calls: dict[str, int] = {}

    def layers(site: Any) -> Any:
        kind = kernel_type(site.kernel_type)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls[site.name] = calls.get(site.name, 0) + 1
            out = kind.reference(*args, **kwargs)
            return out if kind.schema.returns > 1 else out[0]

        return load_layers(site.kernel_type, kernel)

    sites = [site for target in targets for site in target.sites]
    with patched(tiny_llama.model, sites, layers):
        tiny_llama.run()
    assert set(calls) == {site.name for site in sites}


def test_a_norm_inside_an_output_block_is_part_of_that_block(tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    found = profile(loaded_from(tmp_path, config, "BertModel", input_shape=(1, 16)))
    blocks = {r.name for r in rows(found, "add_norm")}
    assert blocks == {"encoder.layer.*.output", "encoder.layer.*.attention.output"}
    assert {r.name: r.nested_in for r in rows(found, "layernorm")} == {
        "embeddings.LayerNorm": None,
        **{f"{block}.LayerNorm": block for block in blocks},
    }
    # The projection in the block is still called: it is a site of its own.
    assert all(r.nested_in is None for r in rows(found, "matmul"))
    assert rows(found, "activation")[0].calls == 2


def test_the_model_is_as_it_was_afterwards(tiny_llama: LoadedModel) -> None:
    import transformers.models.llama.modeling_llama as modeling

    original, output = modeling.apply_rotary_pos_emb, tiny_llama.run().logits
    before = {name: set(vars(module)) for name, module in tiny_llama.model.named_modules()}
    profile(tiny_llama, types=["rmsnorm", "rotary_embedding"])
    assert {name: set(vars(module)) for name, module in tiny_llama.model.named_modules()} == before
    assert modeling.apply_rotary_pos_emb is original
    assert torch.equal(tiny_llama.run().logits, output)


def test_only_the_types_asked_for_are_looked_at(tiny_llama: LoadedModel) -> None:
    found = profile(tiny_llama, types=["activation"])
    assert [(r.kernel_type, r.calls) for r in found.sites] == [("activation", 2)]
    with pytest.raises(UsageError, match="no kernel type 'nothing'"):
        profile(tiny_llama, types=["nothing"])


def test_layer_numbers_are_folded_and_other_digits_kept() -> None:
    assert pattern("h.11.mlp.act") == "h.*.mlp.act"
    assert pattern("encoder.layers.0.fc1") == "encoder.layers.*.fc1"
    assert pattern("0.experts.3.w2") == "*.experts.*.w2"


# --- what is measured ---------------------------------------------------------------------------------------------

NET = """
import time
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
    def forward(self, x):
        x = x * 2
        time.sleep(0.004)
        return self.act(self.act(x))
"""


def replaced_reference(monkeypatch: pytest.MonkeyPatch, name: str, reference: Callable[..., Any]) -> None:
    kinds = profiler.kernel_type_of
    kind = dataclasses.replace(kernel_type(name), reference=reference)
    monkeypatch.setattr(profiler, "kernel_type_of", lambda n: kind if n == name else kinds(n))


def net(folder: Path) -> LoadedModel:
    (folder / "net.py").write_text(NET)
    return load(ModelSpec(model=f"{folder}/net.py:Net", input_shape=(4, 16), device="cpu"))


def test_a_site_s_share_is_its_part_of_the_plain_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site takes twice 3 ms of a pass of 10 ms."""

    def slow(x: Tensor, kind: str) -> tuple[Tensor]:
        time.sleep(0.003)
        return (F.silu(x),)

    loaded = net(tmp_path)
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: slow(x, "silu")[0])
    # `find` reads a forward's source and would not take this one.
    act = Site(name="act", kernel_type="activation", layer="SiLU", attach="module", path="act")
    monkeypatch.setattr(profiler, "all_sites", lambda model, types: [act])
    replaced_reference(monkeypatch, "activation", slow)
    found = profile(loaded)
    (row,) = found.sites
    assert row.calls == 2
    assert found.total_ms > 10
    assert row.share == pytest.approx(0.6, abs=0.1)
    assert found.other_share == pytest.approx(1 - row.share)


def test_a_type_whose_layers_change_the_output_is_left_out_and_said(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor]:
        return (kernel_type("rmsnorm").reference(x, weight, eps, offset)[0] * 1.01,)

    replaced_reference(monkeypatch, "rmsnorm", wrong)
    with caplog.at_level(logging.WARNING):
        found = profile(tiny_llama, types=["rmsnorm", "rotary_embedding", "fused_mlp"])
    assert {r.kernel_type for r in found.sites} == {"rotary_embedding", "fused_mlp"}
    assert "rmsnorm is left out of the profile" in caplog.text


@pytest.mark.parametrize(
    "line", ["x = x + torch.rand(())", "x.mul_(2)", "self.n = self.n * 2; x = x * self.n"]
)
def test_a_model_that_gives_another_output_each_time_is_told_so(line: str, tmp_path: Path) -> None:
    source = NET.replace("x = x * 2", line).replace("self.act = ", "self.n = 1.0\n        self.act = ")
    (tmp_path / "net.py").write_text(f"import torch\n{source}")
    loaded = load(ModelSpec(model=f"{tmp_path}/net.py:Net", input_shape=(4, 16), device="cpu"))
    with pytest.raises(ModelError, match="another output when it runs again on the same input") as caught:
        profile(loaded)
    assert "random numbers" in caught.value.remedy


class SimulatedGpu:
    """A stream that works behind a host: each launch takes host time, each kernel device time."""

    def __init__(self, launch_ms: float) -> None:
        self.launch_ms = launch_ms
        self.host = self.device = self.worked = 0.0

    def kernel(self, ms: float) -> None:
        self.worked += ms
        self.host += self.launch_ms
        self.device = max(self.device, self.host) + ms

    # As a clock.

    def pass_ms(self, run: Callable[[], Any]) -> float:
        self.join()
        begin = self.host
        run()
        self.join()
        return self.host - begin

    def device_ms(self, run: Callable[[], Any]) -> float:
        before = self.worked
        run()
        return self.worked - before

    def mark(self) -> float:
        self.host += 0.0002
        self.device = max(self.device, self.host)
        return self.device

    def join(self) -> None:
        self.host = self.device = max(self.host, self.device)

    def between(self, begin: float, end: float) -> float:
        return end - begin


@pytest.mark.parametrize(
    ("launch_ms", "site_ms", "rest_ms", "exact"),
    [(0.01, 0.002, 0.003, True), (0.001, 0.05, 0.1, True), (0.01, 0.03, 0.004, False)],
    ids=["waits for launches", "keeps the device busy", "in between"],
)
def test_on_a_gpu_a_share_predicts_what_the_pass_would_save_without_the_site(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch_ms: float,
    site_ms: float,
    rest_ms: float,
    exact: bool,
) -> None:
    gpu = SimulatedGpu(launch_ms)
    skipped = False

    def site(x: Tensor, kind: str) -> tuple[Tensor]:
        for _ in range(0 if skipped else 5):  # a chain of ops, as `gelu_new` is one
            gpu.kernel(site_ms)
        return (F.silu(x),)

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return site(x, "silu")[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.acts = nn.ModuleList([Act() for _ in range(8)])

        def forward(self, x: Tensor) -> Tensor:
            for act in self.acts:
                for _ in range(10):
                    gpu.kernel(rest_ms)
                x = act(x)
            return x

    loaded = dataclasses.replace(net(tmp_path), model=Net())
    sites = [
        profiler.Site(
            name=f"acts.{i}", kernel_type="activation", layer="SiLU", attach="module", path=f"acts.{i}"
        )
        for i in range(8)
    ]
    monkeypatch.setattr(profiler, "all_sites", lambda model, types: sites)
    monkeypatch.setattr(profiler, "clock_of", lambda device: gpu)
    replaced_reference(monkeypatch, "activation", site)
    found = profile(loaded)
    (row,) = found.sites
    whole = gpu.pass_ms(loaded.run)
    assert found.device_ms == pytest.approx(8 * (5 * site_ms + 10 * rest_ms))
    assert found.launch_bound == (launch_ms > site_ms)
    skipped = True
    saved = whole - gpu.pass_ms(loaded.run)
    if exact:
        assert row.share == pytest.approx(saved / whole, abs=0.03)
    else:  # without the site the rest waits for launches: the share is then the most that there is to save
        assert saved / whole < row.share < 1


@pytest.mark.parametrize(("passes", "told"), [(3.0, True), (1.01, False)])
def test_noise_that_makes_more_than_a_pass_is_scaled_away(
    passes: float, told: bool, llama_profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    by = passes / math.fsum(r.share for r in llama_profile.sites if r.nested_in is None)
    loud = [r.model_copy(update={"share": r.share * by, "ms": r.ms * by}) for r in llama_profile.sites]
    scaled, other = profiler._counted_once(loud)
    counted = [r for r in scaled if r.nested_in is None]
    assert sum(r.share for r in counted) == pytest.approx(1.0)
    assert other == 0.0
    assert scaled[0].ms == pytest.approx(loud[0].ms / passes)
    assert ("add up to" in caplog.text) == told


def test_the_cost_of_an_empty_pair_of_marks_is_small_and_known() -> None:
    overhead = clocks.overhead_ms(clocks.CpuClock())
    assert 0 < overhead < 0.05


# --- files --------------------------------------------------------------------------------------------------------


def test_a_trace_shows_the_sites_by_name(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    trace = tmp_path / "sub" / "trace.json"
    profile(tiny_llama, types=["rmsnorm"], trace=trace)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "rmsnorm model.layers.1.input_layernorm" in names


def test_a_memory_snapshot_needs_a_gpu(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Only a GPU"):
        profile(tiny_llama, memory_snapshot=tmp_path / "snapshot.pickle")


def test_a_file_that_cannot_be_written_is_told(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        profile(tiny_llama, types=["rmsnorm"], trace=tmp_path / "file" / "trace.json")


@pytest.mark.slow
def test_a_compile_log_holds_graphs_breaks_and_code(tmp_path: Path) -> None:
    profile(net(tmp_path), types=[], compile_log=tmp_path / "log")
    explained = (tmp_path / "log" / "explain.txt").read_text()
    assert "Graph Break Count: 1" in explained
    assert "sleep" in explained  # the reason
    assert (tmp_path / "log" / "graph_0.txt").exists()
    code = (tmp_path / "log" / "code_0.py").read_text()
    assert "def call(" in code


# --- trained models and GPUs --------------------------------------------------------------------------------------


def test_reference_layers_at_every_site_of_a_trained_model_leave_its_output() -> None:
    loaded = load(ModelSpec(model=str(minilm()), device="cpu", input_shape=(2, 32)))
    found = profile(loaded)
    assert {r.kernel_type for r in found.sites} >= {"activation", "add_norm", "layernorm", "matmul"}
    assert rows(found, "activation")[0].calls == 6
    before = loaded.run().last_hidden_state
    for kind in ("activation", "add_norm", "layernorm", "flash_attention"):
        reference, single = kernel_type(kind).reference, kernel_type(kind).schema.returns == 1

        def kernel(*args: Any, reference: Any = reference, single: bool = single, **kwargs: Any) -> Any:
            out = reference(*args, **kwargs)
            return out[0] if single else out

        with patched(loaded.model, all_sites(loaded.model, [kind]), {kind: load_layers(kind, kernel)}):
            assert torch.equal(loaded.run().last_hidden_state, before)


@pytest.mark.gpu
def test_on_a_gpu_sites_take_most_of_a_pass_and_a_snapshot_is_written(tmp_path: Path) -> None:
    loaded = load(ModelSpec(model="llama", random_weights=True, device="cuda", input_shape=(4, 512)))
    found = profile(loaded, trace=tmp_path / "trace.json", memory_snapshot=tmp_path / "snapshot.pickle")
    counted = sum(r.share for r in found.sites if r.nested_in is None)
    assert 0.4 < counted <= 1.0 + 1e-9
    assert {r.kernel_type for r in found.sites} >= {"rmsnorm", "rotary_embedding", "matmul", "fused_mlp"}
    assert all(r.supported for r in found.sites if r.kernel_type == "rmsnorm")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.gpu
def test_a_pass_of_many_short_launches_is_launch_bound_and_one_of_few_long_ones_is_not() -> None:
    clock = clocks.CudaClock(torch.device("cuda", 0))
    small = torch.randn(64, 64, device="cuda")
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)

    def many() -> None:
        y = small
        for _ in range(300):
            y = y + 1.0

    def few() -> None:
        y = large
        for _ in range(20):
            y = y @ large

    for run, low, high in ((many, 0.02, 0.7), (few, 0.9, 1.1)):
        run()
        wall_ms = statistics.median(clock.pass_ms(run) for _ in range(5))
        device_ms = clock.device_ms(run)
        assert device_ms is not None
        assert low < device_ms / wall_ms < high
