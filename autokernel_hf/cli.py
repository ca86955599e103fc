"""The command line: one command a stage, and `optimize` for all of them. The only module that prints or exits.

Stages are imported inside the commands, so that `--help` answers at once and imports no framework.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autokernel_hf import _agent_commands as agent_commands
from autokernel_hf import _render as render
from autokernel_hf._console import fail, guarded
from autokernel_hf._options import (
    Debug,
    Device,
    Json,
    ModelOptions,
    TrustConfig,
    TrustRemoteCode,
    check_device,
    numbers,
    seconds,
    takes_model,
)
from autokernel_hf._options import shape as parse_shape
from autokernel_hf.errors import UsageError

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="autokernel-hf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
skill_app = typer.Typer(help="The skill that teaches a coding agent to work here.", no_args_is_help=True)
app.add_typer(skill_app, name="skill")


def _tell_version(asked: bool) -> None:
    if asked:
        from autokernel_hf.version import __version__

        sys.stdout.write(f"autokernel-hf {__version__}\n")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_tell_version),
    ] = False,
) -> None:
    """Make a Hugging Face model faster on your own hardware, and publish the kernels that did it."""
    del version  # its callback has told it


# --- the main job -------------------------------------------------------------------------------------------------


@app.command()
@takes_model
def optimize(
    options: ModelOptions,
    model: Annotated[str | None, typer.Argument(help="A Hub id, a folder, or file.py:ClassName.")] = None,
    backend: Annotated[str, typer.Option(metavar="auto|triton|cuda|cpp", help="Kind of kernels.")] = "auto",
    proposer: Annotated[
        str,
        typer.Option(
            metavar="playbook|llm|external", help="Who proposes experiments; external: an agent, by `try`."
        ),
    ] = "playbook",
    llm: Annotated[str | None, typer.Option(metavar="MODEL", help="Chat model of the llm proposer.")] = None,
    base_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server for --llm.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the run may spend, questions and answers together.")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(min=0.0, help="Dollars that the run may spend.")] = None,
    price_in: Annotated[
        float | None,
        typer.Option(min=0.0, help="Dollars per million tokens of questions (default: as the server says)."),
    ] = None,
    price_out: Annotated[
        float | None,
        typer.Option(min=0.0, help="Dollars per million tokens of answers (default: as the server says)."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="0,1", help="GPUs to judge on side by side; the model runs on the first."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Kernel types to work on, at most.")] = 3,
    max_experiments: Annotated[
        int | None, typer.Option(min=1, help="Experiments a target [20, or what the budget allows].")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="2h", help="Time for all searches together.")] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="X", help="Enough for a target, against the model's own code."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the packages (default: the model's).")] = None,
    license: Annotated[str, typer.Option(help="Licence of the packages.")] = "Apache-2.0",
    yes: Annotated[bool, typer.Option("--yes", help="For scripts: nothing here asks.")] = False,
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
        spec = options.spec(model or "")
        settings = RunSettings(
            spec=spec,
            backend=backend,
            proposer=proposer,
            llm=llm,
            base_url=base_url,
            max_tokens=max_tokens,
            max_cost=max_cost,
            price_in=price_in,
            price_out=price_out,
            top=top,
            max_experiments=max_experiments,
            budget_s=seconds(budget),
            target_speedup=target_speedup,
            name=name,
            license=license,
            devices=numbers(devices),
        )
        if resume is not None and settings != RunSettings(spec=ModelOptions().spec("")):
            logger.warning("A resumed run keeps its own settings: the other options are ignored.")
        record = pipeline.optimize(settings, out=out, resume=resume, progress=console)
        console.result(record, render.optimize_text)
        if record.status == "failed":
            raise typer.Exit(1)


# --- one stage a command ------------------------------------------------------------------------------------------


@app.command()
@takes_model
def pull(
    model: str,
    options: ModelOptions,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch and check a model, with its revision pinned."""
    with guarded("pull", json, debug) as console:
        from autokernel_hf import pipeline

        spec = options.spec(model)
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
@takes_model
def profile(
    model: str,
    options: ModelOptions,
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

        spec = options.spec(model)
        console.stage(f"Profiling {model}")
        found = pipeline.profile_model(
            spec, trace=trace, memory_snapshot=memory_snapshot, compile_log=compile_log
        )
        console.result(found, render.profile_text)  # first: a disk that is full must not cost the measurement
        if out is not None:
            found.save(out)


@app.command()
@takes_model
def extract(
    model: Annotated[str, typer.Argument(help="A model, or a profile that `profile --out` wrote.")],
    options: ModelOptions,
    top: Annotated[int, typer.Option(min=1, help="Kernel types to work on, at most.")] = 3,
    backend: Annotated[str, typer.Option(metavar="auto|triton|cuda|cpp", help="Kind of kernels.")] = "auto",
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
        from autokernel_hf.settings import check_settings

        known = Profile.load(Path(model)) if model.endswith(".json") and Path(model).is_file() else None
        spec = known.spec if known else options.spec(model)
        settings = RunSettings(
            spec=spec, backend=backend, proposer="external", top=top, max_experiments=max_experiments
        )
        check_settings(settings)
        found = known or pipeline.profile_model(spec)
        with Run.create(out, found.model.id, settings) as run:
            run.save_profile(found)
            targets = pipeline.prepare(run, found)
            document = {
                "run_dir": str(run.path),
                "targets": [t.model_dump(mode="json") for t in targets],
            }
        console.result(document, render.extract_text)


@app.command()
def bench(
    file: Annotated[Path, typer.Argument(help="The candidate: a .cpp, .cu or .py file.")],
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Only this dtype.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="M,N", help="Time this shape, in the type's axes (docs/candidates.md)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smoke stage and a short timing only.")] = False,
    target: Annotated[Path | None, typer.Option(help="A target.json, for its real workloads.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fix the secret seed, to reproduce a verdict.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge one candidate file: right everywhere, and how fast against what a user would pick instead."""
    with guarded("bench", json, debug) as console:
        from autokernel_hf.cache import need_cache
        from autokernel_hf.candidates import read_candidate
        from autokernel_hf.evaluate import evaluate
        from autokernel_hf.kernels import kernel_type
        from autokernel_hf.records import Target

        check_device(device)
        candidate = read_candidate(file)
        found = kernel_type(candidate.kernel_type)
        workloads = None
        if target is not None:
            workloads = Target.load(target).workloads
        elif shape is not None:
            sizes = parse_shape(shape) or ()
            if len(sizes) != len(found.axes):
                raise UsageError(
                    f"{found.name} has the axes {', '.join(found.axes)}; {shape} has {len(sizes)} numbers.",
                    remedy="Give one number an axis.",
                )
            workloads = (found.build(dict(zip(found.axes, sizes, strict=True)), dtype or "float32", {}),)
        need_cache()
        console.stage(f"Judging {file}")
        evaluation = evaluate(
            candidate,
            device=device,
            workloads=workloads,
            dtypes=(dtype,) if dtype else None,
            quick=quick,
            seed=seed,
        )
        console.result(evaluation, render.bench_text)
        if evaluation.status != "passed":
            raise typer.Exit(1)


@app.command()
def compile(
    file: Annotated[Path, typer.Argument(help="The candidate: a .cpp, .cu or .py file.")],
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
            render.compiled_text,
        )


@app.command()
def types(json: Json = False, debug: Debug = False) -> None:
    """The kernel types, and which backends have a starter."""
    with guarded("types", json, debug) as console:
        from autokernel_hf.kernels import backends, kernel_types

        document: dict[str, list[dict[str, Any]]] = {
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
    type: Annotated[str, typer.Argument(metavar="TYPE", help="A kernel type: see `types`.")],
    backend: Annotated[str, typer.Option(metavar="triton|cuda|cpp", help="Language of the source.")],
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
        from autokernel_hf import shipping
        from autokernel_hf.runs import opened

        with opened(run) as found:
            verification = shipping.verify_again(found, console)
        console.result(verification, render.verification_text)
        if not verification.passed:
            console.line(verification.reason)
            raise typer.Exit(1)


@app.command()
def export(
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|FILE", help="A run folder or a candidate file; several files with --bundle."
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of the package.")],
    version: Annotated[int, typer.Option(min=1, help="Version: an API change asks for a new one.")] = 1,
    archs: Annotated[
        str | None,
        typer.Option(
            metavar="8.0,9.0a",
            help="GPU architectures to build for, for a CUDA file (default: the GPU's here, else 9.0a).",
        ),
    ] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="All kernels in one package.")] = False,
    backward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|starter", help="A kernel of gradients to ship with its kernel; may be repeated."
        ),
    ] = None,
    license: Annotated[str, typer.Option(help="Licence.")] = "Apache-2.0",
    out: Annotated[Path, typer.Option(help="Where packages are written.")] = Path("packages"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make Kernel Hub packages of a run's winners, or of one file."""
    with guarded("export", json, debug) as console:
        from autokernel_hf import shipping

        wanted = tuple(a.strip() for a in archs.split(",")) if archs else ()
        console.stage(f"Exporting {', '.join(map(str, source))}")
        packages = shipping.export(
            *source,
            name=name,
            version=version,
            archs=wanted,
            license=license,
            out=out,
            bundle=bundle,
            backward=backward or (),
        )
        console.result({"packages": [p.model_dump(mode="json") for p in packages]}, render.packages_text)


@app.command()
def publish(
    package: Annotated[Path, typer.Argument(help="A package folder.")],
    repo_id: Annotated[str, typer.Option(metavar="NS/NAME", help="The kernel repository.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version branch (default: the package's).")
    ] = None,
    sign: Annotated[
        bool, typer.Option("--sign", help="Sign with sigstore, as whoever you are logged in as.")
    ] = False,
    trust_config: TrustConfig = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Upload a package to the Kernel Hub, and load it back."""
    with guarded("publish", json, debug) as console:
        from autokernel_hf import hub

        console.stage(f"{'Looking at' if dry_run else 'Publishing'} {package} for {repo_id}")
        published = hub.publish(
            package,
            repo_id,
            private=private,
            dry_run=dry_run,
            message=message,
            version=version,
            sign=sign,
            trust_config=trust_config,
        )
        console.result(published, render.published_text)
        if not dry_run and not published.loaded:
            raise typer.Exit(1)


@app.command()
def check(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE|NS/NAME", help="A package folder, or a kernel repository on the Hub."
        ),
    ],
    version: Annotated[int | None, typer.Option(min=1, help="Version, for a Hub repository.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    signed_by: Annotated[
        str | None,
        typer.Option(metavar="IDENTITY", help="Who must have signed it, as `check` names signers."),
    ] = None,
    signed_issuer: Annotated[
        str | None, typer.Option(metavar="URL", help="The identity provider that vouches for IDENTITY.")
    ] = None,
    trust_config: TrustConfig = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Load a package in a fresh process with `kernels` alone, and run it; look only at a repository that is not trusted."""
    with guarded("check", json, debug) as console:
        from autokernel_hf.check import check as check_package
        from autokernel_hf.signing import required_signer

        console.stage(f"Checking {package}")
        report = check_package(
            package,
            version=version,
            trust_remote_code=trust_remote_code,
            signed_by=required_signer(signed_by, signed_issuer),
            trust_config=trust_config,
        )
        console.result(report, render.check_text)
        if report.problems:
            raise typer.Exit(1)


@app.command()
def tune(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE|NS/NAME", help="A package folder, or a kernel repository on the Hub."
        ),
    ],
    version: Annotated[int | None, typer.Option(min=1, help="Version, for a Hub repository.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    device: Device = "auto",
    max_experiments: Annotated[int, typer.Option(min=2, help="Configurations to try.")] = 12,
    out: Annotated[
        Path | None, typer.Option(help="Write the package with the better configuration into this folder.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the best configuration of a package's kernel on this device; its code stays as it is."""
    with guarded("tune", json, debug) as console:
        from autokernel_hf.cache import need_cache
        from autokernel_hf.tune import tune as tune_package

        check_device(device)
        need_cache()
        console.stage(f"Tuning {package}")
        document = tune_package(
            package,
            version=version,
            trust_remote_code=trust_remote_code,
            device=device,
            max_experiments=max_experiments,
            out=out,
            progress=console,
        )
        console.result(document, render.tune_text)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write report.html and progress.png of a run."""
    with guarded("report", json, debug) as console:
        from autokernel_hf.report import write_report

        path = write_report(run)
        console.result({"path": str(path)}, lambda c, d: c.line(d["path"]))


# --- the verbs of an external coding agent ------------------------------------------------------------------------

app.command()(agent_commands.context)
app.command("try")(agent_commands.try_)
app.command()(agent_commands.best)
app.command()(agent_commands.ledger)
skill_app.command("add")(agent_commands.skill_add)


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
        console.result(document, render.gpus_text)


def main() -> None:
    """Entry point of the `autokernel-hf` program."""
    # As in our other processes: a user's `profile.py` in the current folder or on PYTHONPATH shadows nothing.
    standard = Path(os.__file__).parent
    sys.path.sort(key=lambda entry: Path(entry) not in (standard, standard / "lib-dynload"))
    # A stream that the caller has closed is none here, and would fail in whatever writes to it.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the program runs
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    try:
        app()
    except KeyboardInterrupt:
        fail("Interrupted.", "")
        sys.exit(130)


if __name__ == "__main__":
    main()
