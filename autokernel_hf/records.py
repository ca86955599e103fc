"""What crosses a stage or touches disk.

Every record is a frozen pydantic model: it validates what it reads, writes JSON, and is never changed after it was
made. Units stand in the names: `_ms`, `_us`, `_gb_s`, `_tflops`, `_bytes`; `share` is 0 to 1, `_pct` 0 to 100;
`speedup` is old time over new time; an interval is `(low, high)` at 95 %.

This module imports neither torch nor triton, so that any process can read a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autokernel_hf.errors import RecordError

SCHEMA_VERSION = 1

Backend = Literal["triton", "cuda", "cpp"]
BenchStatus = Literal[
    "passed",
    "incorrect",
    "nondeterministic",
    "crashed",
    "timeout",
    "out_of_memory",
    "compile_error",
    "rejected",
    "unsupported",
]
StageStatus = Literal["passed", "failed", "skipped"]
RunStatus = Literal["won", "no_speedup", "failed"]
TargetStatus = Literal["won", "no_speedup", "failed", "skipped"]
Decision = Literal["keep", "revert", "quarantine"]
Interval = tuple[float, float]
Scalar = float | int | bool | str | None

SOURCE_SUFFIX: dict[str, str] = {"triton": ".py", "cuda": ".cu", "cpp": ".cpp"}

R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """Base of all records: frozen, strict about unknown fields, JSON in and out."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def save(self, path: Path) -> Path:
        """Write as JSON, whole or not at all."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls: type[R], path: Path) -> R:
        """Read what `save` wrote.

        Raises:
            RecordError: The file is damaged, of another version, or something else.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            what = f"{field}: {first['msg']}" if field else first["msg"]
        except UnicodeDecodeError:
            what = "it is not UTF-8 text"
        raise RecordError(
            f"{path} cannot be read as a {cls.__name__} record: {what}.",
            remedy="Name the right file; if it was damaged, restore it from a copy or make it again.",
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Raises:
        OSError: It cannot be written; `filename` is `path`, whatever the file was called meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        # Not by `tempfile`, whose files are for their owner alone: a run is read by whoever may read its folder.
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


# --- devices and models -------------------------------------------------------------------------------------------


class DeviceInfo(Record):
    """The device of a measurement, and the versions that produced it."""

    kind: Literal["cpu", "cuda"]
    index: int = 0
    name: str
    arch: str  # sm_90a, x86-64-v4, ...
    units: int  # multiprocessors, or cores
    memory_bytes: int
    torch: str
    triton: str | None = None
    cuda: str | None = None
    driver: str | None = None
    date: str  # ISO 8601


class ModelSpec(Record):
    """What the user asked for: enough to build the same model and inputs again in another process."""

    model: str
    revision: str | None = None
    random_weights: bool = False
    task: str | None = None
    input_shape: tuple[int, ...] | None = None
    dtype: str | None = None  # None: float32 on a CPU, the checkpoint's on a GPU
    device: str = "auto"
    attn: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False
    seed: int = 0


class PulledModel(Record):
    """A model that is here: fetched or built, checked, its revision pinned."""

    id: str
    revision: str | None  # a 40-digit sha for Hub models, None otherwise
    path: str | None  # the folder of its files; None for bundled architectures
    architecture: str  # the model class
    parameters: int
    weights: Literal["trained", "random"]
    dtype: str
    input_shape: tuple[int, ...]


# --- workloads ----------------------------------------------------------------------------------------------------


class TensorSpec(Record):
    """A tensor argument as it occurs: `strides` None means contiguous; `offset` is into its storage, in elements."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    offset: int = 0


class Workload(Record):
    """One concrete call of a kernel type: every schema argument, tensors by their spec, scalars by value.

    `values` names the regime that fills the floating tensors (see `kernels.base.VALUES`). `calls` and `share` say how
    often a model makes this call in one pass and what part of the pass it takes; they are 0 for synthetic workloads.
    """

    label: str
    args: tuple[tuple[str, TensorSpec | bool | int | float | str | None], ...]
    values: str = "normal"
    calls: int = 0
    share: float = 0.0
    lead: str = ""  # the tensor whose dtype is the call's, where that is not the first

    def arg(self, name: str) -> TensorSpec | bool | int | float | str | None:
        for key, value in self.args:
            if key == name:
                return value
        raise KeyError(name)

    def tensor(self, name: str) -> TensorSpec:
        value = self.arg(name)
        if not isinstance(value, TensorSpec):
            raise KeyError(f"{name} is not a tensor in workload {self.label}")
        return value

    @property
    def tensors(self) -> tuple[tuple[str, TensorSpec], ...]:
        return tuple((k, v) for k, v in self.args if isinstance(v, TensorSpec))

    @property
    def dtype(self) -> str:
        """The dtype of the leading tensor argument, which the type's domain is about."""
        return self.tensor(self.lead).dtype if self.lead else self.tensors[0][1].dtype

    @property
    def shape(self) -> str:
        """The shapes of all tensors, as text: `1x1024x3072` or `1024x768,768`."""
        return ",".join("x".join(map(str, spec.shape)) for _, spec in self.tensors)


# --- profile and targets ------------------------------------------------------------------------------------------


class Site(Record):
    """A place in a model that computes one kernel type and can be replaced by one of its layers.

    `attach` says how it is replaced: a `module`'s forward; a `function` looked up as an attribute (`path` is
    `package.module:attribute`); an entry of transformers' `attention` functions (`path` is the key).
    """

    name: str  # the module's path in the model, or the function's qualified name
    kernel_type: str
    layer: str  # class in the type's layers file
    attach: Literal["module", "function", "attention"]
    path: str


class SiteProfile(Record):
    """Where the time goes, for all sites of one kernel type and call signature group that share a name pattern."""

    name: str  # site names with layer numbers replaced by `*`
    kernel_type: str
    layer: str
    sites: tuple[Site, ...]
    share: float
    calls: int
    ms: float
    attainable_ms: float  # the floor for the same calls: bytes over bandwidth or flops over rate
    shapes: tuple[str, ...]
    bound: str  # memory | compute | launch
    supported: bool  # a starter of a usable backend exists
    workloads: tuple[Workload, ...]
    nested_in: str | None = None  # name of the enclosing site, whose time this is part of


class Profile(Record):
    schema_version: int = SCHEMA_VERSION
    spec: ModelSpec
    model: PulledModel
    device: DeviceInfo
    total_ms: float
    sites: tuple[SiteProfile, ...]
    other_share: float
    device_ms: float | None = None  # how long a GPU works in it: the rest is waiting for launches

    @property
    def launch_bound(self) -> bool:
        """Whether the device waits for the host in a tenth of the pass or more."""
        return self.device_ms is not None and self.device_ms < 0.9 * self.total_ms


class Target(Record):
    """One kernel type to optimize in one model, with the workloads that the model really runs."""

    name: str
    kernel_type: str
    backend: Backend
    share: float
    attainable_speedup: float  # of the whole model, if this target ran at its floor (Amdahl)
    sites: tuple[Site, ...]
    workloads: tuple[Workload, ...]
    device: str = "cpu"
    launch_bound: bool = (
        False  # of the pass: what a call costs the host then counts as much as what it takes the device
    )


# --- candidates and builds ----------------------------------------------------------------------------------------


class Candidate(Record):
    """One source file to be judged."""

    kernel_type: str
    backend: Backend
    source: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def suffix(self) -> str:
        return SOURCE_SUFFIX[self.backend]


class Resources(Record):
    """What the compiler says of a kernel; the largest over its entry points. None: not known for this backend."""

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None


class Built(Record):
    """A candidate turned into a package variant: the folder that is judged, verified and shipped.

    The folder holds `__init__.py`, `_ops.py`, `layers.py` where the type has layers, and either `<id>.abi3.so` or
    `op.py`. It is imported under the name `id`, which no other content has.
    """

    id: str  # _ak_<type>_<backend>_<hash>
    kernel_type: str
    backend: Backend
    path: str
    variant: str  # torch-cuda, torch-stable-abi211-cpu-x86_64-linux, ...
    archs: tuple[str, ...]  # 9.0a, x86-64-v3, ...
    resources: Resources
    machine_code: str | None = None  # digest of the candidate's own, where it is compiled and could be read
    seconds: float
    cached: bool


class CompileReport(Record):
    arch: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    seconds: float
    log: str = ""


# --- the judge ----------------------------------------------------------------------------------------------------


class Stages(Record):
    smoke: StageStatus = "skipped"
    shapes: StageStatus = "skipped"
    numerics: StageStatus = "skipped"
    determinism: StageStatus = "skipped"
    edges: StageStatus = "skipped"


class DeviceState(Record):
    """How a GPU was at a moment. None: its driver does not tell.

    `throttled` names what held its clocks below the highest: power_cap, thermal, idle, ...; empty where nothing did.
    """

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] | None = None


class WorkloadResult(Record):
    """One timed workload. `speedup` is against `baseline`, the fastest right peer; both are None where not timed.

    `latency_us`, and with it every other time and ratio here, is the device's time; in a session whose calls come from
    a launch-bound pass it is the device's or the host's, whichever is longer.
    """

    label: str
    shape: str
    dtype: str
    share: float = 0.0
    latency_us: float | None = None
    device_us: float | None = None
    host_us: float | None = None  # the host's time until the call returned; the same as the device's on a CPU
    baseline: str | None = None
    baseline_us: float | None = None
    speedup: float | None = None
    ci95: Interval | None = None
    eager_us: float | None = None  # the plain torch expression that the model runs
    speedup_vs_eager: float | None = None
    ci95_vs_eager: Interval | None = None
    incumbent_us: float | None = None
    speedup_vs_incumbent: float | None = None
    ci95_vs_incumbent: Interval | None = None
    peers_us: dict[str, float] = Field(default_factory=dict)
    gb_s: float | None = None
    tflops: float | None = None
    pct_peak: float | None = None
    max_abs_error: float | None = None
    error_ratio: float | None = None  # candidate's error over torch's own in this dtype
    # Beside the cold times, on a GPU, of candidates that pass all stages: one call after the other on the same input
    # (`hot`), and as a CUDA graph of several calls (`graph`). The device's time, and eager torch's own.
    hot_us: float | None = None
    graph_us: float | None = None
    eager_hot_us: float | None = None
    eager_graph_us: float | None = None


class Evaluation(Record):
    """The judge's verdict on one candidate."""

    status: BenchStatus
    stages: Stages
    reason: str = ""
    workloads: tuple[WorkloadResult, ...] = ()
    resources: Resources = Resources()
    peak_vram_mb: float | None = None
    seconds: float = 0.0
    phases: tuple[tuple[str, float], ...] = ()  # where the seconds went, in order
    built_id: str | None = None
    machine_code: str | None = None  # digest of what the timed calls run, where it could be told
    confirmed: bool = False  # timings are from a run of their own, not from the search that chose the winner
    notes: tuple[str, ...] = ()  # what a user should know although it decided nothing
    device_states: tuple[DeviceState, ...] = ()  # of a GPU, before the first timing and right after the last


# --- optimization -------------------------------------------------------------------------------------------------


class Proposal(Record):
    """What a proposer wants tried next."""

    source: str
    rationale: str  # the hypothesis, in one line: the experiment's commit message
    tags: tuple[str, ...] = ()
    tunables: dict[str, Scalar] = Field(default_factory=dict)
    backend: Backend | None = None  # None: the incumbent's


class Experiment(Record):
    """A judged proposal: one row of results.tsv, one event of the ledger, one commit."""

    experiment: int
    target: str
    tag: str
    description: str
    kernel_type: str
    backend: Backend
    digest: str
    evaluation: Evaluation
    decision: Decision
    reason: str
    commit: str | None = None
    tunables: dict[str, Scalar] = Field(default_factory=dict)
    seconds: float = 0.0
    against: int | None = None  # the experiment that was the incumbent, where one was
    device: str | None = None  # the device that judged it, where a run has several
    duplicate_of: int | None = None  # the experiment with the same machine code, for which it was not judged


class TargetResult(Record):
    """A target's outcome. `speedup` is against the model's own code at that site."""

    name: str
    kernel_type: str
    backend: Backend | None
    share: float
    experiments: int = 0
    kept: int = 0
    baseline_us: float | None = None
    best_us: float | None = None
    speedup: float | None = None
    speedup_ci95: Interval | None = None
    status: TargetStatus
    reason: str = ""


class Winner(Record):
    """A target's best candidate, as judged in full and confirmed."""

    target: Target
    candidate: Candidate
    evaluation: Evaluation


# --- verification, packages, runs ---------------------------------------------------------------------------------


class Latency(Record):
    """Median wall time of one pass in ms; None where a column was not measured (`Verification.notes` says why)."""

    eager: float | None = None
    eager_kernels: float | None = None
    compile: float | None = None
    compile_kernels: float | None = None
    compile_cudagraphs: float | None = None
    compile_kernels_cudagraphs: float | None = None
    eager_cudagraphs: float | None = None
    eager_kernels_cudagraphs: float | None = None


class Speedup(Record):
    vs_eager: float | None = None
    vs_compile: float | None = None


class SpeedupInterval(Record):
    vs_eager: Interval | None = None
    vs_compile: Interval | None = None


class OutputError(Record):
    """The patched model's error against a run in higher precision."""

    max_abs: float
    ratio_to_eager: float
    top1_agreement: float | None = None  # language models
    kl: float | None = None


class Verification(Record):
    passed: bool
    kernel_calls: dict[str, int]
    latency_ms: Latency
    speedup: Speedup
    speedup_ci95: SpeedupInterval
    error: OutputError | None
    reason: str = ""
    notes: tuple[str, ...] = ()
    device: DeviceInfo | None = None


class Package(Record):
    """A Kernel Hub package on disk."""

    path: str
    name: str
    version: int
    variants: tuple[str, ...]
    functions: tuple[str, ...]
    layers: tuple[str, ...]


class CheckReport(Record):
    """What loading a package in a fresh process showed."""

    loaded: bool
    variant: str | None
    functions: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what was not checked, and why


class Published(Record):
    repo_id: str
    url: str
    version: int
    revision: str | None
    files: tuple[str, ...]
    loaded: bool


class RunModel(Record):
    """The `model` of a run's record."""

    id: str
    revision: str | None
    architecture: str
    weights: Literal["trained", "random"]


class RunRecord(Record):
    """The outcome of `optimize`, as `--json` prints it; in the run folder, with the verdict of the last verification."""

    schema_version: int = SCHEMA_VERSION
    status: RunStatus
    reason: str = ""
    run_dir: str
    model: RunModel
    device: DeviceInfo
    targets: tuple[TargetResult, ...]
    verification: Verification | None
    packages: tuple[Package, ...]
    seconds: float = 0.0
