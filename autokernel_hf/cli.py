"""The command line: one command a stage, and `optimize` for all of them. The only module that prints or exits.

Stages are imported inside the commands, so that `--help` answers at once and imports no framework.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel_hf._console import Console, fail, guarded
from autokernel_hf.errors import UsageError

if TYPE_CHECKING:
    from autokernel_hf.records import Evaluation, ModelSpec

app = typer.Typer(
    name="autokernel-hf",
    help="Make a Hugging Face model faster on your own hardware, and publish the kernels that did it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
skill_app = typer.Typer(help="The skill that teaches a coding agent to work here.", no_args_is_help=True)
app.add_typer(skill_app, name="skill")

# --- options that several commands share --------------------------------------------------------------------------

_MODEL = "Model options"
Model = Annotated[
    str, typer.Argument(help="A Hub id (gpt2, meta-llama/...), a folder, or file.py:ClassName.")
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the Hub.", rich_help_panel=_MODEL)
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights", help="Build the architecture without its weights.", rich_help_panel=_MODEL
    ),
]
Task = Annotated[
    str | None, typer.Option(help="Task, where the configuration names none.", rich_help_panel=_MODEL)
]
InputShape = Annotated[
    str | None,
    typer.Option(
        metavar="B,S", help="Shape of the input [1 x min(1024, longest input)].", rich_help_panel=_MODEL
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|float16|bfloat16",
        help="[float32 on a CPU, the checkpoint's on a GPU]",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to run.", rich_help_panel=_MODEL)
]
Attn = Annotated[
    str | None, typer.Option(metavar="IMPL", help="Attention implementation.", rich_help_panel=_MODEL)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes from the Hub.", rich_help_panel=_MODEL),
]
LocalFilesOnly = Annotated[
    bool, typer.Option("--local-files-only", help="Use what is in the cache.", rich_help_panel=_MODEL)
]
Seed = Annotated[int, typer.Option(help="Seed of weights, inputs and search.", rich_help_panel=_MODEL)]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the log.")]
RunOption = Annotated[Path, typer.Option("--run", help="The run folder.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="The target, where the run has several.")]


def _spec(
    model: str,
    revision: str | None,
    random_weights: bool,
    task: str | None,
    input_shape: str | None,
    dtype: str | None,
    device: str,
    attn: str | None,
    trust_remote_code: bool,
    local_files_only: bool,
    seed: int,
) -> ModelSpec:
    from autokernel_hf.records import ModelSpec

    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise UsageError(f"--dtype {dtype} is not supported.", remedy="Use float32, float16 or bfloat16.")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device {device} is no device.", remedy="Use auto, cpu, cuda or cuda:N.")
    return ModelSpec(
        model=model,
        revision=revision,
        random_weights=random_weights,
        task=task,
        input_shape=_shape(input_shape),
        dtype=dtype,
        device=device,
        attn=attn,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        seed=seed,
    )


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = re.split(r"[,x]", text.replace(" ", ""))
    if not all(p.isdigit() and int(p) > 0 for p in parts):
        raise UsageError(f"{text!r} is no shape.", remedy="Write positive numbers with commas, as in 1,1024.")
    return tuple(int(p) for p in parts)


def _seconds(text: str | None) -> float | None:
    """`90`, `90s`, `30m`, `2h` in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no duration.", remedy="Write 90s, 30m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


# --- the main job -------------------------------------------------------------------------------------------------


@app.command()
def optimize(
    model: Annotated[str | None, typer.Argument(help="A Hub id, a folder, or file.py:ClassName.")] = None,
    revision: Revision = None,
    random_weights: RandomWeights = False,
    task: Task = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    device: Device = "auto",
    attn: Attn = None,
    trust_remote_code: TrustRemoteCode = False,
    local_files_only: LocalFilesOnly = False,
    seed: Seed = 0,
    backend: Annotated[str, typer.Option(metavar="auto|triton|cuda|cpp", help="Kind of kernels.")] = "auto",
    proposer: Annotated[
        str, typer.Option(metavar="playbook|llm|external", help="Who proposes experiments.")
    ] = "playbook",
    llm: Annotated[str | None, typer.Option(metavar="MODEL", help="Chat model of the llm proposer.")] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server for --llm.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Completion tokens that the run may spend.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="Money that the run may spend, in dollars.")] = None,
    devices: Annotated[str | None, typer.Option(metavar="0,1", help="GPUs to share the work.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Targets at most.")] = 3,
    max_experiments: Annotated[int, typer.Option(min=1, help="Experiments a target.")] = 20,
    budget: Annotated[str | None, typer.Option(metavar="2h", help="Time for all searches together.")] = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the packages [the model's].")] = None,
    license: Annotated[str, typer.Option(help="Licence of the packages.")] = "Apache-2.0",
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole main job: pull, profile, extract, optimize, verify, export."""
    del yes  # nothing here asks
    with guarded("optimize", json, debug) as console:
        from autokernel_hf import pipeline
        from autokernel_hf.runs import RunSettings

        if (model is None) == (resume is None):
            raise UsageError(
                "Name a model, or a run with --resume, not both or neither.", remedy="See optimize --help."
            )
        if backend not in ("auto", "triton", "cuda", "cpp"):
            raise UsageError(f"--backend {backend} is unknown.", remedy="Use auto, triton, cuda or cpp.")
        if proposer not in ("playbook", "llm", "external"):
            raise UsageError(f"--proposer {proposer} is unknown.", remedy="Use playbook, llm or external.")
        if max_cost is not None:
            raise UsageError("--max-cost is not counted yet.", remedy="Bound the run with --max-tokens.")
        if devices is not None and len(devices.split(",")) > 1:
            raise UsageError("Several devices are not shared yet.", remedy="Name one with --device cuda:N.")
        spec = _spec(
            model or "",
            revision,
            random_weights,
            task,
            input_shape,
            dtype,
            f"cuda:{devices}" if devices and device == "auto" else device,
            attn,
            trust_remote_code,
            local_files_only,
            seed,
        )
        settings = RunSettings(
            spec=spec,
            backend=backend,
            proposer=proposer,
            llm=llm,
            base_url=base_url,
            max_tokens=max_tokens,
            top=top,
            max_experiments=max_experiments,
            budget_s=_seconds(budget),
            name=name,
            license=license,
        )
        record = pipeline.optimize(settings, out=out, resume=resume, progress=console)
        console.result(record, _optimize_text)
        if record.status == "failed":
            raise typer.Exit(1)


def _optimize_text(console: Console, record: Any) -> None:
    console.table(
        [
            "target",
            "share",
            "experiments",
            "kept",
            "model's own us",
            "kernel us",
            "speed-up",
            "95 %",
            "status",
        ],
        [
            [
                t.name,
                f"{100 * t.share:.1f} %",
                str(t.experiments),
                str(t.kept),
                _number(t.baseline_us),
                _number(t.best_us),
                _ratio(t.speedup),
                _interval(t.speedup_ci95),
                t.status if t.status == "won" else f"{t.status}: {t.reason}",
            ]
            for t in record.targets
        ],
    )
    if record.verification is not None:
        _verification_text(console, record.verification)
    for package in record.packages:
        console.line(f"Package {package.name}: {package.path}")
    console.line(f"{record.status}: {record.reason}" if record.reason else record.status)
    console.line(f"Run: {record.run_dir}")


def _verification_text(console: Console, verification: Any) -> None:
    latency = verification.latency_ms
    cells = [(k.replace("_", " + ", 1), v) for k, v in latency.model_dump().items() if v is not None]
    console.table([f"{k} ms" for k, _ in cells], [[f"{v:.2f}" for _, v in cells]])
    speedup, interval = verification.speedup, verification.speedup_ci95
    console.line(
        f"Whole model: {_ratio(speedup.vs_eager)} against eager {_interval(interval.vs_eager)}, "
        f"{_ratio(speedup.vs_compile)} against torch.compile {_interval(interval.vs_compile)}"
    )
    if verification.error is not None:
        error = verification.error
        more = f", top-1 agreement {error.top1_agreement:.4f}" if error.top1_agreement is not None else ""
        console.line(
            f"Error: largest {error.max_abs:.3g}, {error.ratio_to_eager:.2f} times eager's own{more}; "
            f"calls {', '.join(f'{k} {v}' for k, v in verification.kernel_calls.items())}"
        )


# --- one stage a command ------------------------------------------------------------------------------------------


@app.command()
def pull(
    model: Model,
    revision: Revision = None,
    random_weights: RandomWeights = False,
    task: Task = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    device: Device = "auto",
    attn: Attn = None,
    trust_remote_code: TrustRemoteCode = False,
    local_files_only: LocalFilesOnly = False,
    seed: Seed = 0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch and check a model, with its revision pinned."""
    with guarded("pull", json, debug) as console:
        from autokernel_hf import pipeline

        spec = _spec(
            model,
            revision,
            random_weights,
            task,
            input_shape,
            dtype,
            device,
            attn,
            trust_remote_code,
            local_files_only,
            seed,
        )
        console.stage(f"Pulling {model}")
        pulled = pipeline.pull(spec)
        console.result(
            pulled,
            lambda c, p: c.line(
                f"{p.id} ({p.architecture}, {p.parameters / 1e6:.1f} M parameters, {p.weights} weights)"
                + (f" at {p.revision}" if p.revision else "")
                + (f" in {p.path}" if p.path else "")
            ),
        )


@app.command()
def profile(
    model: Model,
    revision: Revision = None,
    random_weights: RandomWeights = False,
    task: Task = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    device: Device = "auto",
    attn: Attn = None,
    trust_remote_code: TrustRemoteCode = False,
    local_files_only: LocalFilesOnly = False,
    seed: Seed = 0,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
    memory_snapshot: Annotated[Path | None, typer.Option(help="Write a memory snapshot.")] = None,
    compile_log: Annotated[Path | None, typer.Option(help="Folder for torch.compile's logs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile, for extract.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Where the time of one forward pass goes."""
    with guarded("profile", json, debug) as console:
        from autokernel_hf import pipeline

        spec = _spec(
            model,
            revision,
            random_weights,
            task,
            input_shape,
            dtype,
            device,
            attn,
            trust_remote_code,
            local_files_only,
            seed,
        )
        console.stage(f"Profiling {model}")
        found = pipeline.profile_model(
            spec, trace=trace, memory_snapshot=memory_snapshot, compile_log=compile_log
        )
        if out is not None:
            found.save(out)
        console.result(found, _profile_text)


def _profile_text(console: Console, found: Any) -> None:
    console.line(f"{found.model.id} on {found.device.name}: {found.total_ms:.2f} ms a pass")
    console.table(
        ["site", "kernel type", "share", "calls", "ms", "floor ms", "bound", "shapes", "starter"],
        [
            [
                s.name + (f" (in {s.nested_in})" if s.nested_in else ""),
                s.kernel_type,
                f"{100 * s.share:.1f} %",
                str(s.calls),
                f"{s.ms:.3f}",
                f"{s.attainable_ms:.3f}",
                s.bound,
                " ".join(s.shapes[:2]),
                "yes" if s.supported else "no",
            ]
            for s in found.sites
        ],
    )
    console.line(f"Not covered by any kernel type: {100 * found.other_share:.1f} %")


@app.command()
def extract(
    model: Annotated[str, typer.Argument(help="A model, or a profile that `profile --out` wrote.")],
    revision: Revision = None,
    random_weights: RandomWeights = False,
    task: Task = None,
    input_shape: InputShape = None,
    dtype: Dtype = None,
    device: Device = "auto",
    attn: Attn = None,
    trust_remote_code: TrustRemoteCode = False,
    local_files_only: LocalFilesOnly = False,
    seed: Seed = 0,
    top: Annotated[int, typer.Option(min=1, help="Targets at most.")] = 3,
    backend: Annotated[str, typer.Option(metavar="auto|triton|cuda|cpp")] = "auto",
    max_experiments: Annotated[int, typer.Option(min=1, help="Experiments a target, for the agent.")] = 100,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Targets with their real workloads and starters, as a run folder."""
    with guarded("extract", json, debug) as console:
        from autokernel_hf import pipeline
        from autokernel_hf.records import Profile
        from autokernel_hf.runs import Run, RunSettings

        known = Profile.load(Path(model)) if model.endswith(".json") and Path(model).is_file() else None
        spec = (
            known.spec
            if known
            else _spec(
                model,
                revision,
                random_weights,
                task,
                input_shape,
                dtype,
                device,
                attn,
                trust_remote_code,
                local_files_only,
                seed,
            )
        )
        settings = RunSettings(
            spec=spec, backend=backend, proposer="external", top=top, max_experiments=max_experiments
        )
        found = known or pipeline.profile_model(spec)
        with Run.create(out, found.model.id, settings) as run:
            run.save_profile(found)
            targets = pipeline.prepare(run, found)
            document = {
                "run_dir": str(run.path),
                "targets": [t.model_dump(mode="json") for t in targets],
            }
        console.result(document, _extract_text)


def _extract_text(console: Console, document: Any) -> None:
    for target in document["targets"]:
        console.line(
            f"{target['name']}: {100 * target['share']:.1f} % of the pass, "
            f"at best {target['attainable_speedup']:.3f}x for the whole model"
        )
    if not document["targets"]:
        console.line("No kernel type has enough to gain in this model on this device.")
    console.line(f"Run: {document['run_dir']}")


@app.command()
def bench(
    file: Annotated[Path, typer.Argument(help="The candidate.")],
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Only this dtype.")] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="M,N", help="Time this shape, in the type's axes.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke, sweep and timing only.")] = False,
    target: Annotated[Path | None, typer.Option(help="A target.json, for its real workloads.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fix the secret seed, to reproduce a verdict.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge one candidate file: right everywhere, and how fast against what a user would pick instead."""
    with guarded("bench", json, debug) as console:
        from autokernel_hf.candidates import read_candidate
        from autokernel_hf.evaluate import evaluate
        from autokernel_hf.kernels import kernel_type
        from autokernel_hf.records import Target

        candidate = read_candidate(file)
        found = kernel_type(candidate.kernel_type)
        workloads = None
        if target is not None:
            workloads = Target.load(target).workloads
        elif shape is not None:
            sizes = _shape(shape) or ()
            if len(sizes) != len(found.axes):
                raise UsageError(
                    f"{found.name} has the axes {', '.join(found.axes)}; {shape} has {len(sizes)} numbers.",
                    remedy="Give one number an axis.",
                )
            workloads = (found.build(dict(zip(found.axes, sizes, strict=True)), dtype or "float32", {}),)
        console.stage(f"Judging {file}")
        evaluation = evaluate(
            candidate,
            device=device,
            workloads=workloads,
            dtypes=(dtype,) if dtype else None,
            quick=quick,
            seed=seed,
        )
        console.result(evaluation, _bench_text)
        if evaluation.status != "passed":
            raise typer.Exit(1)


def _bench_text(console: Console, evaluation: Evaluation) -> None:
    console.line(f"{evaluation.status}{': ' + evaluation.reason if evaluation.reason else ''}")
    console.line(", ".join(f"{k} {v}" for k, v in evaluation.stages.model_dump().items()))
    console.table(
        [
            "shape",
            "dtype",
            "us",
            "fastest peer",
            "its us",
            "speed-up",
            "95 %",
            "GB/s",
            "TFLOP/s",
            "% of peak",
        ],
        [
            [
                w.shape,
                w.dtype,
                _number(w.latency_us),
                w.baseline or "",
                _number(w.baseline_us),
                _ratio(w.speedup),
                _interval(w.ci95),
                _number(w.gb_s),
                _number(w.tflops),
                _number(w.pct_peak),
            ]
            for w in evaluation.workloads
        ],
    )


@app.command()
def compile(
    file: Annotated[Path, typer.Argument(help="The candidate.")],
    arch: Annotated[str, typer.Option(help="sm_80, sm_90, sm_90a, sm_100, or x86-64-v2 to v4.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile a candidate without running it; needs no GPU."""
    with guarded("compile", json, debug) as console:
        from autokernel_hf.build import compile_only
        from autokernel_hf.candidates import read_candidate

        report = compile_only(read_candidate(file), arch)
        console.result(
            report,
            lambda c, r: c.line(
                f"{r.arch}: {_known(r.registers)} registers, {_known(r.spill_bytes)} bytes spilled, "
                f"{_known(r.shared_bytes)} bytes shared, {r.seconds:.1f} s"
            ),
        )


@app.command()
def types(json: Json = False, debug: Debug = False) -> None:
    """The kernel types, and which backends have a starter."""
    with guarded("types", json, debug) as console:
        from autokernel_hf.kernels import backends, kernel_types

        document = {
            "types": [
                {
                    "name": t.name,
                    "schema": t.schema.text,
                    "backends": list(backends(t.name)),
                    "patches_models": bool(t.layers),
                }
                for t in kernel_types().values()
            ]
        }
        console.result(
            document,
            lambda c, d: c.table(
                ["type", "backends", "patches models", "schema"],
                [
                    [t["name"], " ".join(t["backends"]), "yes" if t["patches_models"] else "no", t["schema"]]
                    for t in d["types"]
                ],
            ),
        )


@app.command()
def starter(
    type: Annotated[str, typer.Argument(metavar="TYPE")],
    backend: Annotated[str, typer.Option(metavar="triton|cuda|cpp")],
    debug: Debug = False,
) -> None:
    """Print a starter's source."""
    with guarded("starter", False, debug) as console:
        from autokernel_hf.kernels import backends, kernel_type
        from autokernel_hf.kernels import starter as source_of

        kernel_type(type)
        if backend not in ("triton", "cuda", "cpp"):
            raise UsageError(f"--backend {backend} is unknown.", remedy="Use triton, cuda or cpp.")
        source = source_of(type, backend)  # type: ignore[arg-type]
        if source is None:
            raise UsageError(
                f"{type} has no {backend} starter.", remedy=f"It has: {', '.join(backends(type)) or 'none'}."
            )
        console.raw(source)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check the whole model again with a run's winners in place."""
    with guarded("verify", json, debug) as console:
        from autokernel_hf import pipeline
        from autokernel_hf.runs import opened

        with opened(run) as found:
            verification = pipeline.verify(found, pipeline.staged_again(found), console)
        console.result(verification, _verification_text)
        if not verification.passed:
            console.line(verification.reason)
            raise typer.Exit(1)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder or a candidate file.")],
    name: Annotated[str, typer.Option(help="Name of the package.")],
    version: Annotated[int, typer.Option(min=1, help="Version: an API change asks for a new one.")] = 1,
    archs: Annotated[
        str | None, typer.Option(metavar="8.0,9.0a", help="GPU architectures to build for.")
    ] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="All kernels in one repository.")] = False,
    license: Annotated[str, typer.Option(help="Licence.")] = "Apache-2.0",
    out: Annotated[Path, typer.Option(help="Where packages are written.")] = Path("packages"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make Kernel Hub packages of a run's winners, or of one file."""
    with guarded("export", json, debug) as console:
        from autokernel_hf import pipeline

        if bundle:
            raise UsageError("--bundle is not there yet.", remedy="Export one package a kernel type.")
        wanted = tuple(a.strip() for a in archs.split(",")) if archs else ()
        console.stage(f"Exporting {source}")
        packages = pipeline.export(source, name=name, version=version, archs=wanted, license=license, out=out)
        console.result({"packages": [p.model_dump(mode="json") for p in packages]}, _packages_text)


def _packages_text(console: Console, document: Any) -> None:
    for package in document["packages"]:
        console.line(
            f"{package['name']} v{package['version']}: {package['path']} ({', '.join(package['variants'])})"
        )


@app.command()
def publish(
    package: Annotated[Path, typer.Argument(help="A package folder.")],
    repo_id: Annotated[str, typer.Option(metavar="NS/NAME", help="The kernel repository.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Version branch [the package's].")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Upload a package to the Kernel Hub, and load it back."""
    with guarded("publish", json, debug) as console:
        from autokernel_hf import hub

        console.stage(f"Publishing {package} to {repo_id}")
        published = hub.publish(
            package, repo_id, private=private, dry_run=dry_run, message=message, version=version
        )
        console.result(published, _published_text)
        if not dry_run and not published.loaded:
            raise typer.Exit(1)


def _published_text(console: Console, published: Any) -> None:
    for file in published.files:
        console.line(file)
    state = "loaded back" if published.loaded else "not loaded back"
    console.line(f"{published.url} v{published.version} ({state})")


@app.command()
def check(
    package: Annotated[str, typer.Argument(metavar="PACKAGE|NS/NAME")],
    version: Annotated[int | None, typer.Option(min=1, help="Version, for a Hub repository.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a package in a fresh process with `kernels` alone, and run it."""
    with guarded("check", json, debug) as console:
        from autokernel_hf.check import check as check_package

        console.stage(f"Checking {package}")
        report = check_package(package, version=version, trust_remote_code=trust_remote_code)
        console.result(report, _check_text)
        if report.problems or not report.loaded:
            raise typer.Exit(1)


def _check_text(console: Console, report: Any) -> None:
    console.line(f"loaded: {'yes' if report.loaded else 'no'}, variant {report.variant}")
    console.line(
        f"functions: {', '.join(report.functions) or 'none'}; layers: {', '.join(report.layers) or 'none'}"
    )
    for problem in report.problems:
        console.line(f"problem: {problem}")


@app.command()
def tune(
    package: Annotated[str, typer.Argument(metavar="PACKAGE|NS/NAME")],
    version: Annotated[int | None, typer.Option(min=1)] = None,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = "auto",
    max_experiments: Annotated[int, typer.Option(min=2, help="Configurations to try.")] = 12,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the best configuration of a package's kernel on this device; its code stays as it is."""
    with guarded("tune", json, debug) as console:
        from autokernel_hf.tune import tune as tune_package

        console.stage(f"Tuning {package}")
        document = tune_package(
            package,
            version=version,
            trust_remote_code=trust_remote_code,
            device=device,
            max_experiments=max_experiments,
            progress=console,
        )
        console.result(document, _tune_text)


def _tune_text(console: Console, document: Any) -> None:
    console.table(
        ["configuration", "status", "speed-up over the package's"],
        [
            [", ".join(f"{k}={v}" for k, v in c.values.items()), c.status, _ratio(c.speedup)]
            for c in document.configs
        ],
    )
    console.line(
        f"Best on {document.device}: {_ratio(document.speedup)} over the package's own configuration"
    )


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN")], json: Json = False, debug: Debug = False
) -> None:
    """Write report.html and progress.png of a run."""
    with guarded("report", json, debug) as console:
        from autokernel_hf.report import write_report

        path = write_report(run)
        console.result({"path": str(path)}, lambda c, d: c.line(d["path"]))


# --- the verbs of an external coding agent ------------------------------------------------------------------------


@app.command()
def context(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """What a coding agent needs to know before its next attempt."""
    with guarded("context", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.result(agent_verbs.context(run, target), agent_verbs.context_text)


@app.command("try")
def try_(
    file: Annotated[Path, typer.Argument(help="The candidate.")],
    note: Annotated[str, typer.Option(help="The hypothesis: what changed, and why it should be faster.")],
    run: RunOption,
    target: TargetOption = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge an attempt, keep or revert it, and record it; exit code 0 whatever the verdict."""
    with guarded("try", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.stage(f"Judging {file}")
        console.result(agent_verbs.attempt(run, target, file, note, console), agent_verbs.attempt_text)


@app.command()
def best(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """The best candidate of a target so far."""
    with guarded("best", json, debug) as console:
        from autokernel_hf import agent_verbs

        document = agent_verbs.best(run, target)
        console.result(document, lambda c, d: c.raw(d["source"]))


@app.command()
def ledger(run: RunOption, target: TargetOption = None, json: Json = False, debug: Debug = False) -> None:
    """All experiments of a run."""
    with guarded("ledger", json, debug) as console:
        from autokernel_hf import agent_verbs

        console.result(agent_verbs.ledger(run, target), agent_verbs.ledger_text)


@skill_app.command("add")
def skill_add(
    claude: Annotated[bool, typer.Option("--claude", help="For Claude Code: ~/.claude/skills.")] = False,
    codex: Annotated[bool, typer.Option("--codex", help="For Codex: ~/.codex/skills.")] = False,
    dest: Annotated[Path | None, typer.Option(help="Another folder of skills.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Install the agent skill."""
    with guarded("skill add", json, debug) as console:
        from autokernel_hf.skill import add_skill

        chosen = [Path.home() / ".claude/skills"] * claude + [Path.home() / ".codex/skills"] * codex
        chosen += [dest] if dest else []
        if len(chosen) != 1:
            raise UsageError("Name one place.", remedy="Use --claude, --codex or --dest DIR.")
        path = add_skill(chosen[0])
        console.result({"path": str(path)}, lambda c, d: c.line(d["path"]))


# --- the machine --------------------------------------------------------------------------------------------------


@app.command()
def doctor(json: Json = False, debug: Debug = False) -> None:
    """What works on this machine, what is missing, and the remedy."""
    with guarded("doctor", json, debug) as console:
        from autokernel_hf.doctor import examine

        checks = examine()
        document = {"checks": [c.model_dump(mode="json") for c in checks]}
        console.result(
            document,
            lambda c, d: c.table(
                ["check", "ok", "detail", "remedy"],
                [[x["name"], "yes" if x["ok"] else "NO", x["detail"], x["remedy"]] for x in d["checks"]],
            ),
        )


@app.command()
def gpus(json: Json = False, debug: Debug = False) -> None:
    """The devices here, and the table of known ones."""
    with guarded("gpus", json, debug) as console:
        from autokernel_hf.doctor import device_tables

        document = device_tables()
        console.result(document, _gpus_text)


def _gpus_text(console: Console, document: Any) -> None:
    console.table(
        ["device", "arch", "units", "memory GB"],
        [
            [d["name"], d["arch"], str(d["units"]), f"{d['memory_bytes'] / 1e9:.0f}"]
            for d in document["devices"]
        ],
    )
    columns = [
        k for k in (document["known"][0] if document["known"] else {}) if k not in ("patterns", "source")
    ]
    console.table(columns, [[_cell(row[c]) for c in columns] for row in document["known"]])


# --- formatting ---------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}x"


def _interval(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"[{value[0]:.3f}, {value[1]:.3f}]"


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def main() -> None:
    """Entry point of the `autokernel-hf` program."""
    try:
        app()
    except KeyboardInterrupt:
        fail("Interrupted.", "")
        sys.exit(130)


if __name__ == "__main__":
    main()
