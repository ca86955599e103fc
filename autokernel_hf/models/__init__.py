"""Models: find, fetch, check and build them, with inputs they can be called with.

loaded = load(ModelSpec(model="gpt2", random_weights=True))
loaded.model(**loaded.inputs)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autokernel_hf.errors import HubError, ModelError
from autokernel_hf.gpu import resolve_device
from autokernel_hf.models import architectures, inputs, user
from autokernel_hf.models.architectures import free_memory
from autokernel_hf.models.fetch import Checkpoint, check_folder, fetch
from autokernel_hf.models.inputs import Inputs
from autokernel_hf.models.source import (
    Bundled,
    Folder,
    HubModel,
    Source,
    UserModule,
    bundled_names,
    source_of,
)
from autokernel_hf.records import ModelSpec, PulledModel

__all__ = [
    "Inputs",
    "LoadedModel",
    "bundled_names",
    "describe",
    "free_memory",
    "load",
    "pull",
    "run_pass",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Args:
        model: In evaluation mode, without gradients, on its device, in its dtype.
        inputs: Ready for `model(**inputs)`.
        pulled: What it is, its revision pinned.
        spec: The request with everything settled that it left open (revision, device, dtype, shape): the same spec
            gives the same model in another process, whatever moves on the Hub.
        make_inputs: Other inputs of the same shapes, by seed.
    """

    model: nn.Module
    inputs: Inputs
    pulled: PulledModel
    spec: ModelSpec
    make_inputs: Callable[[int], Inputs]

    @property
    def device(self) -> torch.device:
        return torch.device(self.spec.device)

    def run(self) -> Any:
        """One forward pass on `inputs`, without gradients.

        Raises:
            ModelError: The model does not run.
        """
        return run_pass(self.model, self.inputs, self.pulled.id)


def run_pass(model: nn.Module, inputs: Inputs, name: str) -> Any:
    """A forward pass without gradients, its failure told as a `ModelError`."""
    try:
        with torch.no_grad():
            return model(**inputs)
    except Exception as error:  # noqa: BLE001 - a model may be anyone's code, and raise anything
        if architectures.out_of_memory(error):
            raise ModelError(
                f"{name} runs out of memory in a forward pass.", remedy="Use a smaller --input-shape."
            ) from error
        shapes = ", ".join(f"{k} {tuple(v.shape)}" for k, v in inputs.items() if isinstance(v, Tensor))
        raise ModelError(
            f"{name} does not run on {shapes}: {type(error).__name__}: {error}",
            remedy="Check --input-shape, --dtype and, for a module of your own, its get_inputs().",
        ) from error


def pull(spec: ModelSpec) -> PulledModel:
    """Fetch a model and check it, without building its weights.

    Raises:
        ModelError: It cannot be used.
        HubError: It cannot be fetched.
    """
    source = source_of(spec)
    if isinstance(source, UserModule):
        return _load_user(source, spec).pulled
    with _quiet():
        return _prepare(source, spec, weights=True).pulled


def describe(spec: ModelSpec) -> PulledModel:
    """What `pull` tells, from the configuration alone: no weights are downloaded or checked."""
    source = source_of(spec)
    if isinstance(source, UserModule):
        return _load_user(source, spec).pulled
    with _quiet():
        return _prepare(source, spec, weights=False).pulled


def load(spec: ModelSpec) -> LoadedModel:
    """A model on its device, with inputs.

    Raises:
        ModelError: It cannot be built, or does not fit the memory or the shape asked for.
        HubError: It cannot be fetched.
        DeviceError: There is no such device.
    """
    source = source_of(spec)
    if isinstance(source, UserModule):
        with architectures.within_memory(source.class_name):
            return _load_user(source, spec)
    with _quiet(), architectures.within_memory(spec.model):
        ready = _prepare(source, spec, weights=True)
        pulled = ready.pulled
        dtype = architectures.DTYPES[pulled.dtype]
        architectures.check_memory(pulled.parameters, dtype, ready.device, pulled.id)
        if pulled.weights == "random":
            model = architectures.random_model(ready.config, spec, dtype, ready.device)
        else:
            assert ready.checkpoint is not None
            architectures.check_memory(pulled.parameters, dtype, torch.device("cpu"), pulled.id)
            model = architectures.trained_model(ready.checkpoint, ready.config, spec, dtype, ready.device)

    def make_inputs(seed: int) -> Inputs:
        with architectures.within_memory(pulled.id):
            return inputs.make(model, ready.plan, dtype=dtype, device=ready.device, seed=seed)

    return LoadedModel(
        model=model,
        inputs=make_inputs(spec.seed),
        pulled=pulled,
        spec=_settled(spec, pulled, ready.device, _location(source, spec)),
        make_inputs=make_inputs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    config: Any
    checkpoint: Checkpoint | None
    plan: inputs.InputPlan
    device: torch.device
    pulled: PulledModel


def _fetch(source: HubModel, spec: ModelSpec, *, weights: bool) -> Checkpoint:
    """A model of the Hub; where it has none of that name, a folder that was meant instead is told."""
    try:
        return fetch(
            source.id,
            revision=spec.revision,
            weights=weights,
            code=spec.trust_remote_code,
            local_files_only=spec.local_files_only,
        )
    except HubError as error:
        if not Path(spec.model).is_dir():
            raise
        raise HubError(
            f"The folder {spec.model} holds neither a config.json nor a GGUF file, and as the name of a Hub model: "
            f"{error.message}",
            remedy=f"Give a folder in Hub layout. {error.remedy}",
        ) from error


def _prepare(source: Bundled | Folder | HubModel, spec: ModelSpec, *, weights: bool) -> _Ready:
    device = resolve_device(spec.device)
    architectures.check_attention(spec)
    wanted = weights and not spec.random_weights
    checkpoint: Checkpoint | None = None
    if isinstance(source, Bundled):
        config = architectures.read_config(source.config_file, spec)
    else:
        if isinstance(source, Folder):
            checkpoint = check_folder(source.path, gguf=source.gguf, weights=wanted)
        else:
            checkpoint = _fetch(source, spec, weights=wanted)
        config = architectures.read_config(checkpoint.path, spec, gguf=checkpoint.gguf)
    dtype = architectures.choose_dtype(spec, device, config, checkpoint)
    skeleton = architectures.skeleton(config, spec)
    name = source.name if isinstance(source, Bundled) else spec.model
    plan = inputs.plan(skeleton, spec.input_shape, name)
    pulled = PulledModel(
        id=_id(source),
        revision=checkpoint.revision if checkpoint is not None else None,
        path=str(checkpoint.path) if checkpoint is not None else None,
        architecture=type(skeleton).__name__,
        parameters=sum(p.numel() for p in skeleton.parameters()),
        weights="random" if spec.random_weights else "trained",
        dtype=str(dtype).removeprefix("torch."),
        input_shape=plan.shape,
    )
    logger.info(
        "%s: %s, %d parameters, %s, input %s",
        pulled.id,
        pulled.architecture,
        pulled.parameters,
        pulled.dtype,
        "x".join(map(str, plan.shape)),
    )
    return _Ready(config=config, checkpoint=checkpoint, plan=plan, device=device, pulled=pulled)


def _id(source: Source) -> str:
    if isinstance(source, Bundled):
        return source.name
    if isinstance(source, HubModel):
        return source.id
    if isinstance(source, Folder):
        return Path(source.gguf).stem if source.gguf is not None else source.path.name
    return f"{source.path.name}:{source.class_name}"


def _location(source: Source, spec: ModelSpec) -> str:
    """The model argument that means the same from any working folder."""
    if isinstance(source, Folder):
        return str(source.path / source.gguf) if source.gguf is not None else str(source.path)
    if isinstance(source, UserModule):
        return f"{source.path}:{source.class_name}"
    return spec.model


def _settled(spec: ModelSpec, pulled: PulledModel, device: torch.device, location: str) -> ModelSpec:
    return spec.model_copy(
        update={
            "model": location,
            "revision": pulled.revision,
            "device": "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
            "dtype": pulled.dtype,
            "input_shape": pulled.input_shape,
        }
    )


def _load_user(source: UserModule, spec: ModelSpec) -> LoadedModel:
    device = resolve_device(spec.device)
    module = user.import_file(source.path)
    model = user.build(module, source.class_name, spec)
    if spec.dtype is not None:
        model = model.to(architectures.choose_dtype(spec, device, None, None))
    elif device.type == "cpu":
        model = model.float()
    dtype = user.input_dtype(model, spec)
    parameters = sum(p.numel() for p in model.parameters())
    if device.type == "cuda":
        architectures.check_memory(parameters, dtype, device, source.class_name)
    model = model.to(device)

    def make_inputs(seed: int) -> Inputs:
        return user.make_inputs(module, model, spec, device=device, seed=seed)

    made = make_inputs(spec.seed)
    shapes = [tuple(v.shape) for v in made.values() if isinstance(v, Tensor)]
    if not shapes:
        raise ModelError(f"{source.class_name} has no tensor input.", remedy="Let get_inputs() return one.")
    pulled = PulledModel(
        id=_id(source),
        revision=None,
        path=str(source.path),
        architecture=source.class_name,
        parameters=parameters,
        weights="random",
        dtype=str(dtype).removeprefix("torch."),
        input_shape=shapes[0],
    )
    # --input-shape means "make one tensor": it stays unset where get_inputs() decides.
    settled = _settled(spec, pulled, device, _location(source, spec))
    return LoadedModel(
        model=model,
        inputs=made,
        pulled=pulled,
        spec=settled.model_copy(update={"input_shape": spec.input_shape, "dtype": spec.dtype}),
        make_inputs=make_inputs,
    )


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep transformers' progress bars and advice off the terminal; errors still come through as errors."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
