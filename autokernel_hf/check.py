"""Look at a kernel package, then load it in a fresh process with `kernels` alone and run it.

The look comes first and runs nothing: names, metadata, digests, ABI, links. Code from a Hub runs only with
`trust_remote_code`, and like a folder's behind the judge's walls: it sees nothing of the user's, and no network. The
fresh process knows torch and `kernels` and not this program; what its functions return is compared here, with the oracle
of the kernel type.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autokernel_hf import packages
from autokernel_hf.binding import code_schema
from autokernel_hf.cache import need_cache
from autokernel_hf.check_walls import CHILD, ended_how
from autokernel_hf.errors import PackageError
from autokernel_hf.hub_client import (
    TELEMETRY_VARIABLES,
    is_repo_id,
    is_true,
    newest_version,
    snapshot,
    unfinished,
)
from autokernel_hf.judge.checks import check_values, expect, form_of
from autokernel_hf.judge.sandbox import environment_for_children
from autokernel_hf.judge.server import program
from autokernel_hf.kernels import kernel_types
from autokernel_hf.kernels.base import KernelType, make_inputs
from autokernel_hf.records import CheckReport, Workload
from autokernel_hf.signing import Signer, examine

logger = logging.getLogger(__name__)

TIMEOUT_S = 300
SEED = 20

_Signatures = Callable[[Path], tuple[tuple[str, ...], tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the fresh process saw. `digest` is of the files that it really imported, metadata.json included."""

    variant: str
    id: str
    functions: tuple[str, ...]
    layers: tuple[str, ...]
    digest: Mapping[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


class LoadError(PackageError):
    """The fresh process could not load the package; the message is the loader's own."""


def check(
    package_or_repo: str | Path,
    *,
    version: int | None = None,
    trust_remote_code: bool = False,
    signed_by: Signer | None = None,
    trust_config: Path | None = None,
) -> CheckReport:
    """Check a package folder or a kernel repository on a Hub.

    Args:
        package_or_repo: A folder, or `namespace/name`.
        version: The version of a repository; its newest where not given.
        trust_remote_code: Whether code from a Hub may run; without it a repository is only looked at.
        signed_by: Who must have signed every variant; without, whoever did is told.
        trust_config: A sigstore of one's own to verify signatures with.

    Raises:
        PackageError: It is no kernel package.
        HubError: The Hub does not answer, or has no such repository or version.
    """
    signatures = functools.partial(
        examine,
        required=signed_by,
        trust_config=trust_config,
        offline=is_true(os.environ.get("HF_HUB_OFFLINE")),
    )
    folder = Path(package_or_repo)
    if folder.is_dir():
        return _report(folder.resolve(), signatures)
    if not is_repo_id(str(package_or_repo)):
        raise PackageError(
            f"{package_or_repo} is neither a folder nor the name of a Hub repository.",
            remedy="Give a package's folder, or namespace/name.",
        )
    repo_id = str(package_or_repo)
    version = version if version is not None else newest_version(repo_id)
    local = snapshot(repo_id, version)
    if not (local / "build").is_dir():
        raise unfinished(repo_id, version)
    if trust_remote_code:
        return _report(local, signatures)
    problems, signers = _looked_at(local, signatures)
    names, layers = _named(local)
    return CheckReport(
        loaded=False,
        variant=None,
        functions=names,
        layers=layers,
        problems=problems,
        notes=(*signers, f"looked at only: code of {repo_id} runs with --trust-remote-code"),
    )


def _looked_at(folder: Path, signatures: _Signatures) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems and notes of what can be seen without running anything; signatures only of what its digests agree with."""
    problems = tuple(packages.inspect(folder))
    return signatures(folder) if not problems else (problems, ())


def _report(folder: Path, signatures: _Signatures) -> CheckReport:
    problems, signers = _looked_at(folder, signatures)
    names, layers = _named(folder)
    if problems:
        # What is damaged or tampered with is not run, nor what somebody else has signed.
        return CheckReport(loaded=False, variant=None, functions=names, layers=layers, problems=problems)
    try:
        loaded = load_fresh(folder)
    except LoadError as error:
        return CheckReport(
            loaded=False, variant=None, functions=names, layers=layers, problems=(str(error),), notes=signers
        )
    return CheckReport(
        loaded=True,
        variant=loaded.variant,
        functions=loaded.functions,
        layers=loaded.layers,
        problems=loaded.problems,
        notes=(*signers, *loaded.notes),
    )


def _named(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Functions and layers by name, from the files of the first variant."""
    first = next((p for p in sorted(packages.build_folder(folder).iterdir()) if p.is_dir()), None)
    if first is None:
        return (), ()
    names = tuple(n for n in packages.exported_names(first) if n != "layers")
    return names, packages.layer_names(first)


# --- the fresh process --------------------------------------------------------------------------------------------


def load_fresh(
    folder: Path,
    *,
    repo_id: str | None = None,
    version: int | None = None,
    cache: Path | None = None,
    run: bool = True,
) -> Loaded:
    """Load a package in a process of its own and call its functions.

    Args:
        folder: The package on disk; what is loaded, behind the judge's walls, unless a repository is named.
        repo_id: Load this repository through `get_kernel` instead, which needs a network, and so without walls: for
            what the user has just published.
        cache: An empty folder, to download into in place of the user's cache.
        run: Whether to call the functions whose kernel type is known.

    Raises:
        LoadError: It does not load here, with the loader's reason.
    """
    variants = packages.read_variants(folder)
    no_gpu = not torch.cuda.is_available()
    calls = list(_calls(variants)) if run else []
    noarch = next((v for v in variants if packages.is_noarch(v.name)), None)
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-check-") as temporary:
        work = Path(temporary)
        torch.save([_as_saved(call) for call in calls], work / "calls.pt")
        request = {
            "folder": None if repo_id else "package",
            "repo_id": repo_id,
            "version": version,
            "fallback": _fallback(noarch, walled=repo_id is None) if no_gpu and noarch is not None else None,
            "backends": loading_backends(),
            # A package for CPUs alone needs no GPU behind the walls.
            "gpu": not no_gpu and any(v.metadata.backend.type != "cpu" for v in variants),
            "calls": "calls.pt",
            "limit": 2 if no_gpu and noarch is not None else 12,
            "outcomes": "outcomes.pt",
            "report": "report.json",
        }
        (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
        env = _child_env(no_gpu, cache)
        if repo_id is None:
            ended, lacking = _run_behind_walls(work, folder, env)
        else:
            ended, lacking = _run_child([sys.executable, "-I", str(CHILD), "request.json"], work, env), ()
        if not (work / "report.json").exists():
            raise LoadError(f"The process that loads the package ended early ({ended}).")
        report = json.loads((work / "report.json").read_text(encoding="utf-8"))
        if not report["loaded"]:
            logger.debug("%s", report.get("traceback"))
            raise LoadError(_why_not_loaded(report["error"]))
        outcomes = _read_outcomes(work / "outcomes.pt")
    problems: list[str] = []
    if outcomes is None:
        problems.append(f"a call of its functions ended the process ({ended})")
    if report.get("imported"):
        problems.append(f"it imports {report['imported'][0]}: it would not load where that is not installed")
    problems += [
        f"layer {layer['name']} {problem}" for layer in report["layers"] for problem in layer["problems"]
    ]
    found: list[str] = []
    notes: list[str] = []
    interpreted = report["device"] == "cpu" and packages.backend_of_variant(report["variant"]) != "cpu"
    if report["device"] is None:
        notes.append(f"no GPU here: {report['variant']} was loaded and its functions were not called")
    else:
        found, notes = _compare(report["functions"], calls, outcomes or [])
    if interpreted:
        notes.insert(0, f"no GPU here: {report['variant']} was run in Triton's interpreter")
    notes += [f"the walls around it lack something: {what}" for what in lacking]
    functions = tuple(f["name"] for f in report["functions"])
    if not functions and not report["layers"]:
        problems.append("it offers neither functions nor layers")
    return Loaded(
        variant=report["variant"],
        id=report["id"],
        functions=functions,
        layers=tuple(layer["name"] for layer in report["layers"]),
        digest=report["digest"],
        problems=tuple(problems + found),
        notes=tuple(notes),
    )


def loading_backends() -> list[str | None]:
    """What to ask `kernels` for, in turn.

    By itself it looks for variants of what torch was built for, GPU or not: with the torch that PyPI has for Linux, it
    finds no variant for CPUs unless it is asked for one.
    """
    return [None] if torch.version.cuda is None and torch.version.hip is None else [None, "cpu"]


def _fallback(variant: packages.Variant, *, walled: bool) -> str:
    return f"package/build/{variant.name}" if walled else str(variant.path.absolute())


def _run_behind_walls(work: Path, folder: Path, env: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Run the child behind the judge's walls; how it ended, and what the walls lack on this system.

    Raises:
        LoadError: There are no walls, or what is behind them ended without a word.
        AutokernelError: The build cache, which the walls let through, cannot be made.
    """
    need_cache()
    command = program("autokernel_hf.check_walls", str(work), str(folder.absolute()), str(TIMEOUT_S))
    ended = _run_child(command, work, environment_for_children(env, bind=False), grace_s=60)
    if not (work / "walls.json").exists():
        raise LoadError(f"The process that loads the package ended early ({ended}).")
    walls = json.loads((work / "walls.json").read_text(encoding="utf-8"))
    return walls["ended"], tuple(walls["not_enforced"])


def _run_child(command: Sequence[str], work: Path, env: dict[str, str], grace_s: float = 0) -> str:
    """Run a process to its end; how it ended, in words."""
    process = subprocess.Popen(
        command,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, words = process.communicate(timeout=TIMEOUT_S + grace_s)
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT_S} s"
    finally:
        # Whatever it has started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    logger.debug("%s", words)
    return ended_how(process.returncode, words)


def _child_env(no_gpu: bool, cache: Path | None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    silenced = [name for name in TELEMETRY_VARIABLES if is_true(env.get(name))]
    if silenced:
        # The variables reach this one process only; see TELEMETRY_VARIABLES.
        logger.warning(
            "%s is unset for the process that loads the package: kernels 0.17 cannot talk to a Hub with it. "
            "Its requests then name the versions of kernels, Python and torch.",
            ", ".join(silenced),
        )
        for name in silenced:
            del env[name]
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    # A package that another variable points elsewhere would not be the one that is checked.
    env.pop("LOCAL_KERNELS", None)
    if no_gpu:
        env["TRITON_INTERPRET"] = "1"
    if cache is not None:
        env["HF_HUB_CACHE"] = env["KERNELS_CACHE"] = str(cache)
    return env


def _why_not_loaded(error: str) -> str:
    """The loader's words in brief, without its tables."""
    text = error.split(": ", 1)[1] if re.match(r"\w+: ", error) else error
    if "Cannot find a build variant" in text:
        rejected = re.findall(r"^.*?(torch[\w-]+).*$", text.split("\n\n", 1)[-1], re.MULTILINE)
        return f"No variant is for this machine: it has {', '.join(dict.fromkeys(rejected)) or 'none'}."
    return f"It does not load: {error}"


# --- calls and their outcomes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    kernel_type: KernelType
    workload: Workload
    args: Mapping[str, Any]


def _calls(variants: Sequence[packages.Variant]) -> Iterator[_Call]:
    """Small calls of every function whose name is a kernel type's, dtypes in turn."""
    names = dict.fromkeys(n for v in variants for n in packages.exported_names(v.path))
    types = kernel_types()
    for name in names:
        kernel_type = types.get(name)
        if kernel_type is None:
            continue
        for axes, options in kernel_type.sweep:
            for dtype in kernel_type.dtypes:
                workload = kernel_type.build(axes, dtype, options)
                yield _Call(
                    kernel_type=kernel_type,
                    workload=workload,
                    args=make_inputs(kernel_type, workload, SEED),
                )


def _as_saved(call: _Call) -> dict[str, Any]:
    return {
        "function": call.kernel_type.name,
        "schemas": _operator_schemas(call.kernel_type),
        "args": dict(call.args),
    }


def _operator_schemas(kernel_type: KernelType) -> list[str]:
    """A type's schema as torch itself writes it, and the same with words as codes, as compiled operators have it."""
    texts = (kernel_type.schema.text, code_schema(kernel_type))
    return [str(torch._C.parse_schema(text)) for text in texts]


def _read_outcomes(file: Path) -> list[dict[str, Any]] | None:
    if not file.exists():
        return None
    loaded: list[dict[str, Any]] = torch.load(file, weights_only=True)
    return loaded


def _compare(
    functions: Sequence[Mapping[str, Any]], calls: Sequence[_Call], outcomes: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Problems and notes from what the functions returned."""
    problems, notes = [], []
    called: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        called.setdefault(calls[outcome["call"]].kernel_type.name, []).append(outcome)
    for function in functions:
        name = function["name"]
        mine = called.get(name, [])
        if not mine:
            notes.append(f"{name} was not called: no known kernel type has its schema")
            continue
        if all(outcome["refused"] is not None for outcome in mine):
            problems.append(f"{name} refuses every input tried: {mine[0]['refused']}")
        for outcome in mine:
            call = calls[outcome["call"]]
            where = f"{name} at {call.workload.label} {call.workload.dtype}"
            if outcome["error"] is not None:
                problems.append(f"{where} raises {outcome['error']}")
            elif outcome["outputs"] is not None and (wrong := _wrong(call, outcome["outputs"])):
                problems.append(f"{where}: {wrong}")
    return problems, notes


def _wrong(call: _Call, outputs: Sequence[Tensor]) -> str:
    """What is wrong with a call's outputs, by the judge's own rule; empty where nothing is."""
    expected = expect(call.kernel_type, call.workload, dict(call.args))
    return (
        form_of(outputs, expected) or check_values(outputs, expected, call.kernel_type, call.workload).problem
    )
