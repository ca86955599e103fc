"""Packages that were made with one set of versions load and compute the same with others.

`scripts/test-versions` runs this with the oldest and the newest versions that `pyproject.toml` allows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autokernel_hf import packages
from autokernel_hf.kernels import kernel_types, starter
from autokernel_hf.kernels.base import KernelType, make_inputs
from tests.hub_server import HubServer
from tests.package_factory import exported

# A Python with torch and `kernels` of other versions; nothing of this project need be there.
OTHER = os.environ.get("AUTOKERNEL_HF_OTHER_PYTHON")
CPP = [name for name in sorted(kernel_types()) if starter(name, "cpp") is not None]
CUDA = ["rmsnorm", "flash_attention"]

# Calls every function of a package, and saves what comes out.
CALL = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
torch.set_num_threads(1)
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
function = getattr(kernel, sys.argv[2])
results = []
with torch.no_grad():
    for args in torch.load(sys.argv[3], weights_only=True):
        result = function(**args)
        results.append(list(result) if isinstance(result, tuple) else [result])
torch.save(results, sys.argv[4])
print(torch.__version__)
"""


def calls(kernel_type: KernelType) -> list[dict[str, object]]:
    """Arguments of the type's small workloads, in every dtype."""
    found = []
    for axes, options in kernel_type.sweep[:4]:
        for dtype in kernel_type.dtypes:
            if dtype != "float8_e4m3fn":  # the C++ starters refuse it
                found.append(dict(make_inputs(kernel_type, kernel_type.build(axes, dtype, options), seed=3)))
    return found


def call(
    python: str, package: str, name: str, folder: Path, out: str
) -> tuple[str, list[list[torch.Tensor]]]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS", "PYTHON"))}
    done = subprocess.run(
        [python, "-B", "-c", CALL, package, name, str(folder / "calls.pt"), str(folder / out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**clean, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1], torch.load(folder / out, weights_only=True)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", CPP)
def test_a_compiled_package_computes_the_same_bits_under_another_torch(name: str, tmp_path: Path) -> None:
    if OTHER is None:
        pytest.skip("AUTOKERNEL_HF_OTHER_PYTHON names no other Python")
    package = exported(name, "cpp", tmp_path)
    torch.save(calls(kernel_types()[name]), tmp_path / "calls.pt")
    here, mine = call(sys.executable, package.path, name, tmp_path, "mine.pt")
    there, theirs = call(OTHER, package.path, name, tmp_path, "theirs.pt")
    assert here != there, "the other Python has the same torch"
    assert len(mine) == len(theirs) > 2
    for a, b in zip(mine, theirs, strict=True):
        assert [t.dtype for t in a] == [t.dtype for t in b]
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CUDA)
def test_a_cuda_package_loads_under_another_torch_that_was_built_for_cuda(name: str, tmp_path: Path) -> None:
    if OTHER is None:
        pytest.skip("AUTOKERNEL_HF_OTHER_PYTHON names no other Python")
    package = exported(name, "cuda", tmp_path, archs=("9.0a",))
    code = (
        "import sys, torch; from pathlib import Path; from kernels import get_local_kernel\n"
        "if torch.version.cuda is None: sys.exit(77)\n"
        "kernel = get_local_kernel(Path(sys.argv[1]))\n"
        f"print(torch._C._dispatch_has_kernel_for_dispatch_key(kernel.__name__ + '::{name}', 'CUDA'))\n"
    )
    done = subprocess.run(
        [OTHER, "-B", "-c", code, package.path], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 77:
        pytest.skip("that torch was not built for CUDA")
    assert done.stdout.strip() == "True", done.stderr


LOAD = """
import json
import torch
import autokernel_hf as ak
from autokernel_hf.check import check
from kernels import get_kernel
direct = get_kernel("acme/test-rmsnorm", version=1, backend="cpu", trust_remote_code=True)
x, weight = torch.randn(3, 8), torch.ones(8)
wanted = torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
model = ak.apply(torch.nn.Sequential(torch.nn.RMSNorm(8, eps=1e-6)).eval(), "acme/test-rmsnorm", version=1, trust_remote_code=True)
kernel = ak.load("acme/test-rmsnorm", version=1, trust_remote_code=True)
with torch.no_grad():
    errors = [(f - wanted).abs().max().item() for f in (direct.rmsnorm(x, weight, 1e-6), kernel.rmsnorm(x, weight, 1e-6), model(x))]
print(json.dumps({"same": direct is kernel, "errors": errors, "problems": check("acme/test-rmsnorm", version=1).problems}))
"""


def test_a_repository_loads_with_every_client_that_reads_kernel_repositories(tmp_path: Path) -> None:
    """Also with those of huggingface_hub that cannot upload to one."""
    package = Path(exported("rmsnorm", "cpp", tmp_path).path)
    files = {path: file.read_bytes() for path, file in packages.files_of(package)}
    with HubServer() as hub:
        hub.add_kernel("acme/test-rmsnorm", {"v1": files})
        done = hub.run_client(LOAD)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same"] and found["problems"] == []
    assert max(found["errors"]) < 1e-5
