"""Kernel packages for tests: real ones from starters, and small hand-made ones that are as wrong as a test wants."""

from __future__ import annotations

from pathlib import Path

from autokernel_hf import packages
from autokernel_hf.export_hf import export_file
from autokernel_hf.kernels import starter
from autokernel_hf.records import Candidate, Package

OPS = """import torch

_NAMESPACE = "{id}"
_DOMAIN = "dtype: float32, float16, bfloat16"


@torch.library.custom_op(f"{{_NAMESPACE}}::rmsnorm", mutates_args=(), schema="{schema}")
def _op(x, weight, eps, offset=0.0):
{body}


@_op.register_fake
def _(x, weight, eps, offset=0.0):
    return x.new_empty(x.shape)


def rmsnorm(x, weight, eps, offset=0.0):
    return torch.ops.{id}.rmsnorm(x, weight, eps, offset)
"""
INIT = 'from . import layers\nfrom ._ops import rmsnorm\n\n__all__ = ["layers", "rmsnorm"]\n'
LAYERS = """import torch
from torch import nn

from ._ops import rmsnorm


class RMSNorm(nn.Module):
    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rmsnorm(hidden_states, self.weight, self.variance_epsilon)
"""
SCHEMA = "(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor"
RIGHT = """    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.float())).to(x.dtype)"""


def hand_made(
    folder: Path,
    *,
    id: str = "_test_rmsnorm_1",
    name: str = "tiny-norm",
    body: str = RIGHT,
    schema: str = SCHEMA,
    variant: str = "torch-cpu",
    version: int = 1,
    more: dict[str, str] | None = None,
) -> Path:
    """A package without compiled code: an RMSNorm by torch itself, or whatever `body` does."""
    place = folder / "build" / variant
    place.mkdir(parents=True)
    files = {"__init__.py": INIT, "_ops.py": OPS.format(id=id, schema=schema, body=body), "layers.py": LAYERS}
    for path, text in {**files, **(more or {})}.items():
        (place / path).write_text(text)
    packages.write_metadata(
        place,
        name=name,
        id=id,
        version=version,
        license="apache-2.0",
        backend=packages.backend_of_variant(variant),
        archs=None,
    )
    card = f'---\nlibrary_name: kernels\n---\n\nget_kernel("NAMESPACE/{name}", version={version})\n'
    (folder / "README.md").write_text(card)
    return folder


def candidate(kernel_type: str, backend: str) -> Candidate:
    source = starter(kernel_type, backend)  # type: ignore[arg-type]
    assert source is not None, f"{kernel_type} has no {backend} starter"
    return Candidate(kernel_type=kernel_type, backend=backend, source=source)  # type: ignore[arg-type]


def exported(kernel_type: str, backend: str, out: Path, **options: object) -> Package:
    """A package from a starter, as `export FILE` makes it."""
    return export_file(candidate(kernel_type, backend), f"test-{kernel_type}", out=out, **options)  # type: ignore[arg-type]
