"""From a configuration to a transformers model: which class, which dtype, whether it fits, random or trained weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from autokernel_hf.errors import ModelError, UsageError, first_line
from autokernel_hf.models.fetch import Checkpoint
from autokernel_hf.records import ModelSpec

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# The Hub's task names, and transformers' automatic class for each.
TASKS = {
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "summarization": "AutoModelForSeq2SeqLM",
    "translation": "AutoModelForSeq2SeqLM",
    "feature-extraction": "AutoModel",
    "sentence-similarity": "AutoModel",
    "image-feature-extraction": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "image-classification": "AutoModelForImageClassification",
    "image-segmentation": "AutoModelForImageSegmentation",
    "object-detection": "AutoModelForObjectDetection",
    "depth-estimation": "AutoModelForDepthEstimation",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
    "audio-classification": "AutoModelForAudioClassification",
}

# What transformers raises for a configuration or checkpoint that it cannot make a model of.
_REFUSALS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    NotImplementedError,
    StrictDataclassError,
)

_ACTIVATION_ROOM = 1.15
"""Weights are not all that a pass needs: outputs and activations come on top."""


def read_config(source: Path, spec: ModelSpec, *, gguf: str | None = None) -> Any:
    """The configuration in a folder, or in a file of its own, as transformers' object.

    Raises:
        ModelError: It is damaged, of an architecture that this transformers does not know, or needs remote code.
    """
    import transformers

    try:
        if gguf:
            # In two steps, because AutoConfig reads the whole of a GGUF's metadata twice.
            values, _ = transformers.PreTrainedConfig.get_config_dict(
                source, gguf_file=gguf, local_files_only=True
            )
            config = transformers.AutoConfig.for_model(**values)
        else:
            config = transformers.AutoConfig.from_pretrained(
                source, local_files_only=True, trust_remote_code=spec.trust_remote_code
            )
    except _REFUSALS as error:
        raise _config_error(spec, error) from error
    if gguf and not config.architectures:
        # A GGUF file names no class; what it holds is a language model wherever the architecture has one.
        causal = transformers.AutoModelForCausalLM._model_mapping
        if type(config) in causal:
            config.architectures = [causal[type(config)].__name__]
    return config


def _config_error(spec: ModelSpec, error: Exception) -> ModelError:
    text = first_line(error)
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{spec.model} runs on Python code of its own repository, which is not trusted.",
            remedy="Read that code, then add --trust-remote-code.",
        )
    if isinstance(error, ImportError):
        return ModelError(f"{spec.model} needs a package that is not installed: {text}", remedy="Install it.")
    if "does not recognize this architecture" in str(error) or "Unrecognized model" in str(error):
        return ModelError(
            f"{spec.model} is of an architecture that this transformers does not know: {text}",
            remedy="Install a transformers that knows it, or wrap the model as file.py:ClassName.",
        )
    return ModelError(
        f"The configuration of {spec.model} cannot be used: {text}",
        remedy="Correct its config.json, or fetch the model again.",
    )


def model_class(config: Any, spec: ModelSpec) -> Any:
    """The class to build: the task's automatic class if the spec names a task, else what the configuration names.

    Raises:
        UsageError: The task is not known.
    """
    import transformers

    if spec.task is not None:
        if spec.task not in TASKS:
            raise UsageError(f"There is no task {spec.task!r}.", remedy=f"Known tasks: {', '.join(TASKS)}.")
        auto = getattr(transformers, TASKS[spec.task])
        if spec.task == "automatic-speech-recognition" and type(config) not in auto._model_mapping:
            auto = transformers.AutoModelForCTC
        return auto
    remote = getattr(config, "auto_map", None) or {}
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
        for auto_name, reference in remote.items():
            if str(reference).endswith(f".{name}") and auto_name.startswith("AutoModel"):
                return getattr(transformers, auto_name)
    return transformers.AutoModel


def choose_dtype(
    spec: ModelSpec, device: torch.device, config: Any, checkpoint: Checkpoint | None
) -> torch.dtype:
    """The dtype asked for; else float32 on a CPU, and on a GPU the checkpoint's.

    Raises:
        UsageError: The dtype is not one that models run in.
    """
    if spec.dtype is not None:
        if spec.dtype not in DTYPES:
            raise UsageError(f"There is no dtype {spec.dtype!r}.", remedy=f"Choose from {', '.join(DTYPES)}.")
        return DTYPES[spec.dtype]
    if device.type == "cpu":
        return torch.float32
    named = getattr(config, "dtype", None) or (checkpoint.dtype if checkpoint is not None else None)
    return DTYPES.get(str(named).removeprefix("torch."), torch.float32)


def check_attention(spec: ModelSpec) -> None:
    """Refuse an attention implementation that transformers does not have.

    Raises:
        UsageError: It has none of that name.
    """
    if spec.attn is None or "/" in spec.attn:  # with a slash it is a kernel of the Hub
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if spec.attn not in known:
        raise UsageError(
            f"There is no attention implementation {spec.attn!r}.", remedy=f"Choose from {', '.join(known)}."
        )


# --- building -----------------------------------------------------------------------------------------------------


def skeleton(config: Any, spec: ModelSpec) -> nn.Module:
    """The model without any memory for its weights (on the meta device), for its sizes and signature."""
    import copy

    return _from_config(copy.deepcopy(config), spec, torch.float32, torch.device("meta"))


def random_model(config: Any, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The architecture with transformers' own random initialization; the seed decides the weights on a device kind."""
    with _seeded(spec.seed, device):
        return _from_config(config, spec, dtype, device).to(device)


def _from_config(config: Any, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    cls = model_class(config, spec)
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    options: dict[str, Any] = {"dtype": dtype}
    if spec.attn is not None:
        options["attn_implementation"] = spec.attn
    if hasattr(cls, "from_config"):
        options["trust_remote_code"] = spec.trust_remote_code
    try:
        with torch.device(device):
            model: nn.Module = make(config, **options)
    except _REFUSALS as error:
        if out_of_memory(error):
            raise  # told by `within_memory`
        raise ModelError(
            f"{spec.model} cannot be built: {first_line(error)}",
            remedy="Check --task and --attn, and that the configuration is that of a whole model.",
        ) from error
    return _for_inference(model)


def trained_model(
    checkpoint: Checkpoint, config: Any, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The model with the checkpoint's weights.

    Raises:
        ModelError: The weights do not load, or do not belong to this architecture.
    """
    cls = model_class(config, spec)
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "trust_remote_code": spec.trust_remote_code,
        "output_loading_info": True,
    }
    if spec.attn is not None:
        options["attn_implementation"] = spec.attn
    if checkpoint.gguf is not None:
        options["gguf_file"] = checkpoint.gguf
    else:
        options["use_safetensors"] = True
    try:
        with _seeded(spec.seed, torch.device("cpu")):  # heads that the checkpoint lacks are drawn at random
            model, loading = cls.from_pretrained(checkpoint.path, **options)
    except _REFUSALS as error:
        if out_of_memory(error):
            raise  # told by `within_memory`
        if isinstance(error, ImportError) and checkpoint.gguf is not None:
            raise ModelError(
                "GGUF files need the packages gguf and accelerate.",
                remedy="pip install 'autokernel-hf[gguf]'",
            ) from error
        raise ModelError(
            f"The weights of {spec.model} do not load: {first_line(error)}",
            remedy="Pull the model again; check --task, --attn and --revision.",
        ) from error
    missing = sorted(loading.get("missing_keys", ()))
    total = len(list(model.named_parameters()))
    if missing and len(missing) >= total:
        raise ModelError(
            f"The weights of {spec.model} belong to another architecture: none fits {type(model).__name__}.",
            remedy="Name the right --task.",
        )
    if missing:
        logger.warning(
            "%d of %d weights of %s are not in the checkpoint and are random, such as %s",
            len(missing),
            total,
            type(model).__name__,
            missing[0],
        )
    return _for_inference(model).to(device)


def _for_inference(model: nn.Module) -> nn.Module:
    """Evaluation mode, no gradients, and no key-value cache from a plain forward pass."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", False):
            config.use_cache = False
    return model.eval().requires_grad_(False)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


# --- memory -------------------------------------------------------------------------------------------------------


def check_memory(parameters: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Refuse a model that the device cannot hold, before anything is built.

    Raises:
        ModelError: It needs more memory than is free.
    """
    needed = int(parameters * dtype.itemsize * _ACTIVATION_ROOM)
    free = free_memory(device)
    if needed > free:
        raise ModelError(
            f"{name} has {parameters / 1e9:.2f} billion parameters and needs {needed / 1e9:.1f} GB "
            f"in {str(dtype).removeprefix('torch.')}; {device} has {free / 1e9:.1f} GB free.",
            remedy="Use a smaller model, --dtype bfloat16, or a device with more memory.",
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation failed: on a CPU, torch raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


@contextmanager
def within_memory(name: str) -> Iterator[None]:
    """Tell a failed allocation as what it is: `check_memory` knows neither the inputs nor a process's own limits.

    Raises:
        ModelError: The memory was not enough.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ModelError(
            f"{name} and its inputs do not fit the memory that this process may use.",
            remedy="Use a smaller model, a smaller --input-shape, --dtype bfloat16, or a device with more memory.",
        ) from error


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on a CPU within the container's limit, if it has one."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds without using it can be used again.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available: int | None = None
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(Path(limit_file)), _number(Path(used_file))
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used + _reclaimable(Path(limit_file).parent)))
    return available


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(group: Path) -> int:
    """File pages that a control group counts as used but gives back when asked."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
