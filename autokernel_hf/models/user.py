"""A user's own module, `file.py:ClassName`: import its file, build the class, find its inputs."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autokernel_hf.errors import AutokernelError, ModelError
from autokernel_hf.models.architectures import DTYPES
from autokernel_hf.models.inputs import Inputs
from autokernel_hf.records import ModelSpec


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a name of its own; its folder is searched last, so that it shadows nothing.

    Raises:
        ModelError: The file does not import.
    """
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"_autokernel_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # torch.compile and pickling look it up by name
    folder = str(path.parent)
    sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except AutokernelError:
        sys.modules.pop(name, None)
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything as it is imported
        sys.modules.pop(name, None)
        raise ModelError(
            f"{path} does not import: {type(error).__name__}: {error}", remedy="Correct the file."
        ) from error
    finally:
        sys.path.remove(folder)
    return module


def build(module: ModuleType, class_name: str, spec: ModelSpec) -> nn.Module:
    """An instance of the class, in evaluation mode: `ClassName(*get_init_inputs())`, or without arguments.

    Raises:
        ModelError: There is no such class, it is no nn.Module, or its constructor fails.
    """
    cls = getattr(module, class_name, None)
    if cls is None:
        known = [
            n
            for n, v in vars(module).items()
            if isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == module.__name__
        ]
        raise ModelError(
            f"{module.__file__} has no class {class_name}.",
            remedy=f"It has {', '.join(known)}." if known else "It defines no nn.Module.",
        )
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ModelError(f"{class_name} is no torch.nn.Module.", remedy="Name a class derived from it.")
    arguments, keywords = _init_inputs(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        try:
            model = cls(*arguments, **keywords)
        except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything
            raise ModelError(
                f"{class_name} cannot be built: {type(error).__name__}: {error}",
                remedy="It is called without arguments, or with those that a get_init_inputs() beside it returns.",
            ) from error
    return model.eval().requires_grad_(False)


def _init_inputs(module: ModuleType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    function = getattr(module, "get_init_inputs", None)
    if function is None:
        return (), {}
    value = _called(function)
    if isinstance(value, dict):
        return (), value
    if not isinstance(value, (list, tuple)):
        raise _returns(function, value)
    return tuple(value), {}


def _called(function: Callable[[], Any]) -> Any:
    """What a function of the user's returns. Raises ModelError where it fails."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise ModelError(
            f"{function.__name__}() fails: {type(error).__name__}: {error}", remedy="Correct it."
        ) from error


def _returns(function: Callable[[], Any], value: object) -> ModelError:
    return ModelError(
        f"{function.__name__}() returns {type(value).__name__}.",
        remedy="Let it return a list of values, or a dict by parameter name.",
    )


def make_inputs(
    module: ModuleType, model: nn.Module, spec: ModelSpec, *, device: torch.device, seed: int
) -> Inputs:
    """The module's inputs: a tensor of --input-shape if there is one, else what `get_inputs()` returns.

    Floating inputs have the dtype of the spec, or of the model's parameters.

    Raises:
        ModelError: There is neither, or they do not fit the module's forward.
    """
    names = _positional(model)
    generator = torch.Generator().manual_seed(seed)
    inputs: Inputs
    if spec.input_shape is not None:
        required = [n for n, p in _parameters(model).items() if p.default is p.empty and p.kind in _BY_NAME]
        if not (required or names):
            raise ModelError(
                f"{type(model).__name__}.forward names no parameter for its input.",
                remedy="Give it one, or wrap it in a module that has one.",
            )
        if len(required) > 1:
            raise ModelError(
                f"{type(model).__name__}.forward needs {', '.join(required)}, and --input-shape makes one tensor.",
                remedy="Write a get_inputs() beside the class, and leave --input-shape out.",
            )
        inputs = {(required or names)[0]: torch.randn(spec.input_shape, generator=generator)}
    else:
        inputs = _from_function(module, model, names, seed)
    dtype = input_dtype(model, spec)
    return {name: _placed(value, dtype, device) for name, value in inputs.items()}


def input_dtype(model: nn.Module, spec: ModelSpec) -> torch.dtype:
    if spec.dtype is not None:
        return DTYPES[spec.dtype]
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(floating, torch.float32)


def _from_function(module: ModuleType, model: nn.Module, names: list[str], seed: int) -> Inputs:
    function = getattr(module, "get_inputs", None)
    if function is None:
        raise ModelError(
            f"The inputs of {type(model).__name__} are not known.",
            remedy="Give --input-shape, or write a get_inputs() beside the class.",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        value = _called(function)
    if isinstance(value, dict):
        return dict(value)
    if not isinstance(value, (Tensor, list, tuple)):
        raise _returns(function, value)
    values = [value] if isinstance(value, Tensor) else list(value)
    if len(values) > len(names):
        raise ModelError(
            f"get_inputs() returns {len(values)} values; {type(model).__name__}.forward names {len(names)}.",
            remedy="Return a dict by parameter name.",
        )
    return dict(zip(names, values, strict=False))


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _positional(model: nn.Module) -> list[str]:
    return [n for n, p in _parameters(model).items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _placed(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.to(dtype) if value.is_floating_point() else value).to(device)
