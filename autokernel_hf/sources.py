"""The source half of a package: what kernel-builder needs to build it again, its tests and its benchmark.

    build.toml                       edition 5
    src/<type>.cpp|.cu               the kernel, as it was judged (a Triton kernel is torch-ext/<name>/op.py)
    src/binding.cpp, ...             the generated binding
    torch-ext/<name>/                the Python of a variant, on top of the `_ops.py` that kernel-builder writes
    tests/, benchmarks/              against the plain torch expression of the kernel type, which is copied in

All of it follows from the candidate and its kernel type, so the same candidate gives the same bytes.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from autokernel_hf import binding, contract, variant
from autokernel_hf.kernels import kernel_type as find_type
from autokernel_hf.kernels import layers_source
from autokernel_hf.kernels.base import KernelType
from autokernel_hf.records import Candidate, Scalar, TensorSpec, Workload
from autokernel_hf.variant import Domain

# A test of a package is quick on any machine; a benchmark takes the type's own workloads.
_MAX_TEST_ELEMENTS = 1 << 18
_MAX_CASES = 6


def source_files(
    candidate: Candidate,
    *,
    name: str,
    version: int,
    license: str,
    archs: Sequence[str],
    configs: Sequence[Mapping[str, object]] = (),
    gradients: Sequence[str] = (),
) -> dict[str, str]:
    """All source files of a package by path.

    Args:
        configs: Entries of a Triton kernel's `configs.json`.
        gradients: The arguments whose gradients the package computes as well.

    Raises:
        CandidateError: The candidate breaks the contract.
    """
    kernel_type = find_type(candidate.kernel_type)
    domain = contract.check(candidate, kernel_type)
    files = {
        "build.toml": build_toml(candidate, name=name, version=version, license=license, archs=archs),
        f"tests/test_{kernel_type.name}.py": _test_source(kernel_type, domain, candidate.backend, gradients),
        f"benchmarks/benchmark_{kernel_type.name}.py": _benchmark_source(
            kernel_type, domain, candidate.backend
        ),
    }
    package = name.replace("-", "_")
    files |= _torch_ext(candidate, kernel_type, domain, package)
    if candidate.backend == "triton":
        tuned = variant.config_files(kernel_type, configs)
        files |= {f"torch-ext/{package}/{path}": text for path, text in tuned.items()}
    if candidate.backend != "triton":
        files |= {f"src/{path}": text for path, text in _native(candidate, kernel_type).items()}
    return files


# --- for kernel-builder -------------------------------------------------------------------------------------------


def build_toml(candidate: Candidate, *, name: str, version: int, license: str, archs: Sequence[str]) -> str:
    """The build description, in edition 5 of its format."""
    kind, cuda = candidate.kernel_type, candidate.backend == "cuda"
    backends = {"triton": ["cuda", "rocm"], "cuda": ["cuda"], "cpp": ["cpu"]}[candidate.backend]
    lines = [
        "[general]",
        f'name = "{name}"',
        f"version = {version}",
        "edition = 5",
        f'license = "{license}"',
        f"backends = {_toml(backends)}",
        "",
    ]
    if candidate.backend == "triton":
        lines += ["[torch-noarch]", 'pyext = ["py", "json"]']
        return "\n".join(lines) + "\n"
    device = "cuda" if cuda else "cpu"
    common = ["binding.cpp", "binding.h", "module.cpp", "autokernel.h"]
    lines += [
        "[torch]",
        f"src = {_toml([f'src/{file}' for file in common])}",
        'include = ["src"]',
        f"cxx-flags = {_toml(['-fno-gnu-unique', *(['-DUSE_CUDA'] if cuda else [])])}",
        "",
        "[torch.stable-abi]",
        f'{device} = "2.11"',
    ]
    if cuda:
        lines += _kernel_section(kind, "cuda", f"{kind}.cu")
        lines += [
            f"cuda-capabilities = {_toml([arch.removesuffix('+PTX') for arch in archs])}",
            f"cuda-flags = {_toml(['-O3', '-std=c++20', '--expt-relaxed-constexpr', '-lineinfo'])}",
        ]
        return "\n".join(lines) + "\n"
    flags = ["-O3", "-std=c++20", "-fopenmp", "-fno-gnu-unique", "-fvisibility=hidden"]
    # The plain build comes first: where copies of one inline function meet, the linker keeps the first, which must
    # run on every processor.
    lines += [*_kernel_section(kind, "cpu", f"{kind}.cpp"), f"cxx-flags = {_toml(flags)}"]
    for level, short in zip(binding.CPU_LEVELS, _shorts(), strict=True):
        lines += [
            *_kernel_section(f"{kind}_{short}", "cpu", f"unit_{short}.cpp"),
            f"cxx-flags = {_toml([*flags, f'-march={level}'])}",
        ]
    return "\n".join(lines) + "\n"


def _kernel_section(name: str, backend: str, source: str) -> list[str]:
    return [
        "",
        f"[kernel.{name}]",
        f'backend = "{backend}"',
        'depends = ["torch"]',
        f"src = {_toml([f'src/{source}', 'src/autokernel.h'])}",
        'include = ["src"]',
    ]


def _toml(items: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def _shorts() -> list[str]:
    return [level.rsplit("-", 1)[-1] for level in binding.CPU_LEVELS]


def _native(candidate: Candidate, kernel_type: KernelType) -> dict[str, str]:
    """The C++ or CUDA half, under `src/`."""
    name = kernel_type.name
    files = {
        f"{name}{candidate.suffix}": candidate.source,
        # The units of the instruction sets include it before the kernel does.
        "autokernel.h": "#pragma once\n" + binding.HEADER.read_text(encoding="utf-8"),
        "binding.h": binding.RUNTIME.read_text(encoding="utf-8"),
        "module.cpp": _module_source(),
    }
    if candidate.backend == "cuda":
        return files | {"binding.cpp": binding.binding_source(kernel_type, "cuda")}
    files["binding.cpp"] = (
        "#if defined(__x86_64__)\n"
        + binding.binding_source(kernel_type, "cpp", binding.CPU_LEVELS)
        + "#else\n"
        + binding.binding_source(kernel_type, "cpp")
        + "#endif\n"
    )
    for short in _shorts():
        files[f"unit_{short}.cpp"] = _unit(kernel_type, short)
    return files


def _module_source() -> str:
    """The module's entry point as C++: kernel-builder compiles no C."""
    text = binding.MODULE_SOURCE.replace("int ak_register(", 'extern "C" int ak_register(')
    return text.replace(
        "#define Py_LIMITED_API 0x03090000",
        "#ifndef Py_LIMITED_API\n#define Py_LIMITED_API 0x03090000\n#endif",
    )


def _unit(kernel_type: KernelType, short: str) -> str:
    """The kernel once more, for one instruction set and under that set's name."""
    name = kernel_type.name
    launcher = binding.launcher_prototype(kernel_type)
    parameters = ", ".join(binding.launcher_parameters(kernel_type))
    return "\n".join(
        (
            f"// The kernel for x86-64-{short} (see build.toml); the binding picks one when the module is imported.",
            "#if defined(__x86_64__)",
            '#include "autokernel.h"',
            f'{launcher} __asm__("ak_{name}_{short}");',
            f'extern "C" int64_t {name}_workspace({parameters}) __asm__("ak_{name}_{short}_workspace");',
            f'#include "{name}.cpp"',
            "#endif",
            "",
        )
    )


def _torch_ext(candidate: Candidate, kernel_type: KernelType, domain: Domain, package: str) -> dict[str, str]:
    """The Python half. kernel-builder writes `_ops.py` itself, so ours is `functions.py` and takes its names there."""
    layers = layers_source(kernel_type.name)
    functions = variant.ops_source(kernel_type, candidate.backend, domain)
    functions = functions.replace(
        f'_NAMESPACE = "{variant.ID}"',
        '_NAMESPACE = _ops.add_op_namespace_prefix("").removesuffix("::")',
    )
    functions = functions.replace(f"torch.ops.{variant.ID}.", "getattr(torch.ops, _NAMESPACE).")
    functions = functions.replace("import torch\n", "import torch\n\nfrom . import _ops\n", 1)
    functions = "\n".join(
        line for line in functions.splitlines() if not line.startswith(f"from . import {variant.ID}")
    )
    assert variant.ID not in functions, "the generated Python names its id in a way that is not known here"
    files = {
        "__init__.py": variant.init_source(kernel_type, layers).replace("._ops", ".functions"),
        "functions.py": functions + "\n",
    }
    if layers is not None:
        files["layers.py"] = layers.replace("from ._ops import", "from .functions import")
    if candidate.backend == "triton":
        files["op.py"] = candidate.source
    return {f"torch-ext/{package}/{path}": text for path, text in files.items()}


# --- tests and benchmarks -----------------------------------------------------------------------------------------


def _test_source(kernel_type: KernelType, domain: Domain, backend: str, gradients: Sequence[str] = ()) -> str:
    tolerance = kernel_type.tolerance
    on_cpu = backend == "cpp"
    where = '"cpu"' if on_cpu else '"cuda" if torch.cuda.is_available() else "cpu"'
    # Else `kernels` looks for what torch was built for.
    asked = ', backend="cpu"' if on_cpu else ""
    cases = []
    for workload in _test_workloads(kernel_type, domain):
        ulps = tolerance.ulps * tolerance.growth(workload)
        made = _arguments(workload, indent=8)
        cases.append(
            f'    (\n        "{_label(workload)}",\n        lambda device: {made},\n        {ulps:.6g},\n    ),'
        )
    return f'''"""{kernel_type.name} against float64, with the error that torch itself makes in the same dtype as the measure.

Run with pytest on a local copy of this repository.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import get_local_kernel
from torch import Tensor

K = {tolerance.k:.6g}
DEVICE = {where}
CASES = [
{chr(10).join(cases)}
]


{standalone(kernel_type.oracle, kernel_type.reference)}

@pytest.fixture(scope="module")
def kernel():
    return get_local_kernel(Path(__file__).resolve().parent.parent{asked})


def exact(args):
    wide = {{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in args.items()}}
    return {kernel_type.oracle.__name__}(**wide)


@pytest.mark.parametrize("make, ulps", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_error_is_of_the_size_of_torchs_own(kernel, make, ulps):
    torch.manual_seed(0)
    args = make(DEVICE)
    outputs = kernel.{kernel_type.name}(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for output, wanted, plain in zip(outputs, exact(args), {kernel_type.reference.__name__}(**args)):
        assert output.shape == wanted.shape and output.dtype == plain.dtype
        if output.numel() == 0:  # the gradient of an absent tensor
            continue
        own = (plain.double() - wanted).abs().max().item()
        scale = wanted.abs().clamp_min(wanted.square().mean().sqrt().item())
        allowed = K * own + ulps * torch.finfo(output.dtype).eps * scale
        assert ((output.double() - wanted).abs() <= allowed).all()
{_gradients_test(kernel_type, gradients)}'''


def _gradients_test(kernel_type: KernelType, gradients: Sequence[str]) -> str:
    if not gradients:
        return ""
    return f"""

@pytest.mark.parametrize("make", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_gradients_are_those_of_the_plain_expression(kernel, make):
    torch.manual_seed(0)
    args = make(DEVICE)
    leaves = [args[n].requires_grad_() for n in {_toml(gradients)} if args[n] is not None]
    outputs = kernel.{kernel_type.name}(**args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn_like(o) for o in outputs]
    plain = torch.autograd.grad({kernel_type.reference.__name__}(**args), leaves, grads)
    for a, b in zip(torch.autograd.grad(outputs, leaves, grads), plain):
        assert a.dtype == b.dtype
        allowed = (1e-4 if a.dtype == torch.float32 else 3e-2) * b.float().abs().max()
        assert ((a.float() - b.float()).abs() <= allowed).all()
"""


def _benchmark_source(kernel_type: KernelType, domain: Domain, backend: str) -> str:
    methods = []
    # The runner names a device by what torch was built for.
    where = '"cpu"' if backend == "cpp" else "self.device"
    for i, workload in enumerate(_timed_workloads(kernel_type, domain, backend)):
        methods.append(f"""    # {_label(workload)}
    def setup_{i}(self) -> None:
        device = {where}
        self.args = {_arguments(workload, indent=8)}

    def benchmark_{i}(self) -> None:
        self.result = self.kernel.{kernel_type.name}(**self.args)

    def verify_{i}(self) -> torch.Tensor:
        return self.compared()
""")
    return (
        f'''"""{kernel_type.name} beside the plain torch expression. Run on a local copy: `kernels benchmark ./FOLDER`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from kernels import Benchmark
from torch import Tensor


{standalone(kernel_type.reference)}

class {_camel(kernel_type.name)}Benchmark(Benchmark):
    seed = 0
    checked = False

    def compared(self) -> torch.Tensor:
        """The plain result, which is what is timed; the first time it is also held against the kernel's.

        The runner compares with an absolute 1e-2, which says nothing where values are small and is less than one
        rounding of bfloat16 where they are large: so the comparison is made here, relative to the size of the values.
        """
        wanted = {kernel_type.reference.__name__}(**self.args)
        if not self.checked:
            self.checked = True
            got = self.result if isinstance(self.result, tuple) else (self.result,)
            for a, b in zip(got, wanted):
                scale = b.float().abs().max().item() if b.numel() else 0.0
                if b.numel() and not (a.float() - b.float()).abs().max().item() <= 2e-2 * scale:
                    raise RuntimeError("the kernel and the plain expression differ")
            self.out = wanted[0]
        return wanted[0]

{chr(10).join(methods)}'''.rstrip()
        + "\n"
    )


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _label(workload: Workload) -> str:
    words = [str(v) for _, v in workload.args if isinstance(v, str)]
    return " ".join((workload.shape, workload.dtype, *words))


def in_domain(workload: Workload, domain: Domain) -> bool:
    """Whether a candidate of this domain must be able to do a workload."""
    return workload.dtype in domain.dtypes and all(
        workload.arg(name) in values for name, values in domain.values.items()
    )


def _plain(workload: Workload) -> bool:
    """Whether random tensors of the right shapes make sensible arguments (packed sequences have offsets that do not)."""
    return all(spec.dtype != "int32" for _, spec in workload.tensors)


def _elements(workload: Workload) -> int:
    total = 0
    for _, spec in workload.tensors:
        count = 1
        for size in spec.shape:
            count *= size
        total += count
    return total


def small_workloads(kernel_type: KernelType, domain: Domain) -> list[Workload]:
    """Workloads of the type's sweep that lie in the domain and take no time, dtypes in turn."""
    found = []
    for axes, options in kernel_type.sweep:
        for dtype in domain.dtypes:
            workload = kernel_type.build(axes, dtype, options)
            if in_domain(workload, domain) and _plain(workload) and _elements(workload) <= _MAX_TEST_ELEMENTS:
                found.append(workload)
    return found


def _test_workloads(kernel_type: KernelType, domain: Domain) -> list[Workload]:
    return small_workloads(kernel_type, domain)[:_MAX_CASES]


def _timed_workloads(kernel_type: KernelType, domain: Domain, backend: str) -> list[Workload]:
    own = kernel_type.workloads["cpu" if backend == "cpp" else "cuda"]
    fitting = [w for w in own if in_domain(w, domain) and _plain(w)]
    return (fitting or small_workloads(kernel_type, domain))[:2]


def _arguments(workload: Workload, indent: int) -> str:
    """Python that makes the arguments of a call, on `device`."""
    first = workload.tensor(workload.lead) if workload.lead else workload.tensors[0][1]
    lines = [
        f'"{name}": {tensor_code(value, first) if isinstance(value, TensorSpec) else _literal(value)},'
        for name, value in workload.args
    ]
    return "\n".join(("{", *(" " * (indent + 4) + line for line in lines), " " * indent + "}"))


def _literal(value: Scalar) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def tensor_code(spec: TensorSpec, first: TensorSpec, device: str = ", device=device") -> str:
    """Python that makes a tensor of a spec: random, or class numbers below the leading argument's last size."""
    sizes = ", ".join(map(str, spec.shape))
    shape = f"({sizes}{',' if len(spec.shape) == 1 else ''})"
    if spec.dtype == "int64":
        return f"torch.randint({first.shape[-1]}, {shape}{device})"
    if spec.dtype == "bool":
        return f"torch.ones({shape}, dtype=torch.bool{device})"
    if spec.dtype.startswith("float8"):
        return f"torch.randn({shape}{device}).to(torch.{spec.dtype})"
    if spec.strides is not None and len(spec.shape) >= 2 and spec.strides[-2] == 1 and spec.shape[-2] > 1:
        swapped = ", ".join(map(str, (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])))
        return f"torch.randn(({swapped}), dtype=torch.{spec.dtype}{device}).mT"
    return f"torch.randn({shape}, dtype=torch.{spec.dtype}{device})"


# --- copying functions out of this package --------------------------------------------------------------------------


def standalone(*functions: Callable[..., Any]) -> str:
    """The source of functions with every function and constant of this package that they use, each before its use.

    They may use math, torch, `torch.nn.functional as F` and Tensor beside; the file that holds them imports these, and
    postpones its annotations, which may name types of this package.
    """
    done: dict[str, str] = {}
    for function in functions:
        _collect_function(function, done)
    return "\n\n".join(f"{text}\n" for text in done.values())


def _collect_function(function: Callable[..., Any], done: dict[str, str]) -> None:
    if function.__name__ in done:
        return
    text = textwrap.dedent(inspect.getsource(function)).strip()
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    module = sys.modules[function.__module__]
    for other, attribute in _collect_used(definition.body, module, done):
        text = text.replace(f"{other}.{attribute}(", f"{attribute}(")
    done[function.__name__] = text


def _collect_constant(name: str, module: types.ModuleType, done: dict[str, str]) -> None:
    """The top-level statements of a module that set a name, or an entry of it."""
    if name in done:
        return
    source = inspect.getsource(module)
    statements = [s for s in ast.parse(source).body if name in _assigned(s)]
    if not statements:
        return
    done[name] = ""  # a statement that sets an entry reads the name itself
    _collect_used(statements, module, done)
    del done[name]  # what it uses comes before it
    done[name] = "\n".join(ast.get_source_segment(source, s) or "" for s in statements)


def _collect_used(
    statements: Sequence[ast.stmt], module: types.ModuleType, done: dict[str, str]
) -> list[tuple[str, str]]:
    """Collect what statements use; return functions that they reach through another module, as (module, function)."""
    through = []
    nodes = [node for statement in statements for node in ast.walk(statement)]
    for name in dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)):
        value = getattr(module, name, None)
        if _is_ours(value):
            _collect_function(value, done)
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("autokernel_hf"):
            for node in nodes:
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == name
                ):
                    _collect_function(getattr(value, node.attr), done)
                    through.append((name, node.attr))
        elif name.isupper():
            _collect_constant(name, module, done)
    return through


def _assigned(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.AnnAssign):
        targets: list[ast.expr] = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    else:
        return set()
    places = (t.value if isinstance(t, ast.Subscript) else t for t in targets)
    return {place.id for place in places if isinstance(place, ast.Name)}


def _is_ours(value: Any) -> TypeGuard[Callable[..., Any]]:
    return inspect.isfunction(value) and value.__module__.startswith("autokernel_hf")


def example_call(kernel_type: KernelType, domain: Domain, device: str) -> list[str]:
    """Python lines that call the function on a small input: `y = kernel.rmsnorm(x, weight, 1e-06)`."""
    found = small_workloads(kernel_type, domain)
    if not found:
        return []
    workload = found[0]
    first = workload.tensor(workload.lead) if workload.lead else workload.tensors[0][1]
    suffix = "" if device == "cpu" else f', device="{device}"'
    lines = [f"{name} = {tensor_code(spec, first, suffix)}" for name, spec in workload.tensors]
    defaults = {a.name: a.default for a in kernel_type.schema.args}
    words: list[str] = []
    positional = True
    for name, value in workload.args:
        if not isinstance(value, TensorSpec) and _same(value, defaults[name]):
            positional = False
            continue
        text = name if isinstance(value, TensorSpec) else _literal(value)
        words.append(text if positional else f"{name}={text}")
    outputs = ", ".join(["y", "z", "w"][: kernel_type.schema.returns])
    lines.append(f"{outputs} = kernel.{kernel_type.name}({', '.join(words)})")
    return lines


def _same(value: Scalar, default: object) -> bool:
    return type(value) is type(default) and value == default
