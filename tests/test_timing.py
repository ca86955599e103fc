"""What a round's times count for: the device's, or the host's where a model waits for it."""

from __future__ import annotations

import pytest
import torch

from autokernel_hf.extract import extract
from autokernel_hf.judge import statistics
from autokernel_hf.judge.near import Near
from autokernel_hf.judge.timing import Column
from autokernel_hf.judge.turn import Times
from autokernel_hf.kernels import kernel_type
from autokernel_hf.records import ModelSpec, Profile, PulledModel, SiteProfile
from tests.loop_helpers import device


def column(device_us: float, host_us: float, *, launch_bound: bool) -> Column:
    """Ten rounds of three calls each, on a GPU."""
    made = Column(launch_bound=launch_bound)
    for _ in range(10):
        made.add(Times(device_us=(device_us,) * 3, host_us=(host_us,) * 3, late_us=(1.0,) * 3), 1000.0, 0)
    return made


def test_a_launcher_that_takes_longer_than_its_kernel_counts_only_where_the_model_waits_for_it() -> None:
    # A chain of eight short ops against one kernel that is launched from Python: five times less work for the device,
    # as much for the host.
    for launch_bound, expected in ((False, 40 / 7), (True, 48 / 45)):
        eager = column(40.0, 48.0, launch_bound=launch_bound)
        kernel = column(7.0, 45.0, launch_bound=launch_bound)
        compared = statistics.compare(eager.cost_us, kernel.cost_us, epsilon=0.01)
        assert compared.speedup == pytest.approx(expected)


def test_a_long_kernel_costs_what_it_takes_the_device_in_either_case() -> None:
    assert column(500.0, 45.0, launch_bound=True).cost_us == [500.0] * 10
    assert column(500.0, 45.0, launch_bound=False).cost_us == [500.0] * 10


def profile(total_ms: float, device_ms: float | None) -> Profile:
    workload = kernel_type("rmsnorm").build({"M": 512, "N": 2048}, "float16", {})
    site = SiteProfile(
        name="norm", kernel_type="rmsnorm", layer="RMSNorm", sites=(), share=0.3, calls=33, ms=3.0,
        attainable_ms=0.1, shapes=("512x2048",), bound="launch", supported=True, workloads=(workload,),
    )  # fmt: skip
    return Profile(
        spec=ModelSpec(model="llama-1b", device="cuda"),
        model=PulledModel(
            id="llama-1b", revision=None, path=None, architecture="LlamaForCausalLM", parameters=1,
            weights="random", dtype="float16", input_shape=(1, 512),
        ),
        device=device().model_copy(update={"kind": "cuda"}),
        total_ms=total_ms,
        sites=(site,),
        other_share=0.7,
        device_ms=device_ms,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("total_ms", "device_ms", "bound"), [(10.0, 4.0, True), (10.0, 9.5, False), (10.0, None, False)]
)
def test_targets_of_a_pass_that_waits_for_launches_are_judged_by_the_hosts_time_too(
    total_ms: float, device_ms: float | None, bound: bool
) -> None:
    found = profile(total_ms, device_ms)
    assert found.launch_bound is bound
    (target,), _ = extract(found, top=1)
    assert target.launch_bound is bound
    assert Profile.model_validate_json(found.model_dump_json()).launch_bound is bound


def test_an_infinity_in_torchs_output_excuses_no_other_element() -> None:
    softmax = kernel_type("softmax")
    workload = softmax.build({"M": 2, "N": 4}, "float32", {})
    wanted = torch.tensor([[1.0, 2.0, float("inf"), 4.0], [1.0, 1.0, 1.0, 1.0]])
    near = Near(wanted, softmax, workload, torch_error=1e-7)
    assert not near.holds(wanted + torch.tensor([0.0, 0.5, 0.0, 0.0]))
    finite = Near(wanted.nan_to_num(posinf=3.0), softmax, workload, torch_error=1e-7)
    assert finite.holds(wanted.nan_to_num(posinf=3.0))
