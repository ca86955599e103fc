"""Make a Hugging Face model faster on your own hardware, and publish the kernels that did it.

import autokernel_hf as ak

run = ak.optimize("openai-community/gpt2", device="cuda")
kernel = ak.load("ns/name", version=1, trust_remote_code=True)
model = ak.apply(model, "ns/name", version=1, trust_remote_code=True)
ak.restore(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autokernel_hf.version import __version__

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from torch import nn

    from autokernel_hf.records import RunRecord

__all__ = ["__version__", "apply", "load", "optimize", "restore"]

_SPEC_FIELDS = frozenset(
    [
        "revision",
        "random_weights",
        "task",
        "input_shape",
        "dtype",
        "device",
        "attn",
        "trust_remote_code",
        "local_files_only",
        "seed",
    ]
)


def optimize(
    model: str, *, out: str | Path = "runs", resume: str | Path | None = None, **options: Any
) -> RunRecord:
    """The whole main job, as `autokernel-hf optimize` does it; the record is the one that `--json` prints.

    Args:
        model: A Hub id, a folder in Hub layout, or file.py:ClassName.
        out: Where the run folder is made.
        resume: A run folder to go on with, whose own settings are used.
        **options: As on the command line, with underscores: device, dtype, input_shape, random_weights, revision, top,
            max_experiments, budget_s, target_speedup, backend, proposer, devices, name, license, ...

    Raises:
        AutokernelError: A known failure, with its remedy.
        TypeError: An unknown option.
    """
    from pathlib import Path

    from autokernel_hf import pipeline
    from autokernel_hf.records import ModelSpec
    from autokernel_hf.runs import RunSettings

    known = set(RunSettings.model_fields) - {"schema_version", "spec", "created"}
    unknown = set(options) - _SPEC_FIELDS - known
    if unknown:
        raise TypeError(f"optimize() has no option {', '.join(sorted(unknown))}")
    spec = ModelSpec(model=model, **{k: v for k, v in options.items() if k in _SPEC_FIELDS})
    settings = RunSettings(spec=spec, **{k: v for k, v in options.items() if k in known})
    return pipeline.optimize(settings, out=Path(out), resume=Path(resume) if resume is not None else None)


def load(
    name: str, *, version: int | None = None, trust_remote_code: bool = False, backend: str | None = None
) -> ModuleType:
    """A kernel package from the Hub or a folder: a thin wrapper of `kernels.get_kernel`.

    Without a backend: for what torch was built for, else for CPUs.
    """
    from autokernel_hf import hub

    return hub.load(name, version=version, trust_remote_code=trust_remote_code, backend=backend)


def apply(
    model: nn.Module, name: str, *, version: int | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """Replace every site of a model that the package's layers fit; raises if there is none."""
    from autokernel_hf import hub

    return hub.apply(model, name, version=version, trust_remote_code=trust_remote_code)


def restore(model: nn.Module) -> nn.Module:
    """Undo `apply`."""
    from autokernel_hf import hub

    return hub.restore(model)
