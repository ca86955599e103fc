"""Inputs that a model can be called with: drawn at random, but right for its architecture.

Shapes: text (B, S); vision (B, C, H, W); waveforms (B, samples); spectrograms (B, mels, frames) or (B, frames, mels).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autokernel_hf.errors import ModelError

Inputs: TypeAlias = dict[str, Any]
"""Keyword arguments of the model's forward; tensors, on the model's device."""

DEFAULT_LENGTH = 1024
DEFAULT_SAMPLES = 16_000  # one second at 16 kHz, what speech models are trained on
DECODER_TOKENS_OF_SPEECH = 64  # a sentence, beside half a minute of audio
DEFAULT_IMAGE = 224

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """What a model's forward is called with.

    Args:
        kind: text, image, waveform, spectrogram or text_and_image; decides what `shape` means.
        shape: The shape of the main input.
        longest: The longest text that the model's positions allow; None where nothing limits it.
    """

    kind: str
    shape: tuple[int, ...]
    longest: int | None


def plan(model: nn.Module, shape: tuple[int, ...] | None, name: str) -> InputPlan:
    """Decide the main input and its shape.

    Args:
        model: A transformers model; the meta device will do.
        shape: What the user asked for.
        name: The model's name, for errors.

    Raises:
        ModelError: The shape does not fit the model, or the model takes something that is not known here.
    """
    kind = _kind(model, name)
    longest, hard = longest_input(model)
    default = _default_shape(model, kind, longest)
    if shape is None:
        return InputPlan(kind=kind, shape=default, longest=longest)
    if any(size < 1 for size in shape):
        raise ModelError(
            f"The input shape {_text(shape)} has an empty dimension.", remedy="Use sizes from 1."
        )
    if len(shape) != len(default):
        raise ModelError(
            f"{name} takes {len(default)} dimensions ({_MEANING[kind]}), not {_text(shape)}.",
            remedy=f"Use --input-shape {_text(default)} or alike.",
        )
    if "text" in kind and hard and longest is not None and shape[1] > longest:
        raise ModelError(
            f"{name} has {longest} positions: an input of {shape[1]} tokens is too long.",
            remedy=f"Use --input-shape {shape[0]},{longest} or shorter.",
        )
    if kind in ("image", "spectrogram") and shape[1] != default[1]:
        raise ModelError(
            f"{name} takes {default[1]} {'channels' if kind == 'image' else 'rows'}, not {shape[1]}.",
            remedy=f"Use --input-shape {_text((shape[0], *default[1:]))}.",
        )
    return InputPlan(kind=kind, shape=shape, longest=longest)


_MEANING = {
    "text": "batch, tokens",
    "text_and_image": "batch, tokens",
    "image": "batch, channels, height, width",
    "waveform": "batch, samples",
    "spectrogram": "batch, and the two of a spectrogram",
}


def _text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _kind(model: nn.Module, name: str) -> str:
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    config: Any = model.config
    if "input_ids" in takes and "pixel_values" in takes:
        # A chat model sees an image only where the prompt has its placeholder; twin towers need both.
        has_placeholder = any(hasattr(config, n) for n in ("image_token_id", "image_token_index"))
        return "text" if has_placeholder else "text_and_image"
    if main == "pixel_values" and "pixel_values" in takes:
        return "image"
    if main == "input_features" and _spectrogram(config) is not None:
        return "spectrogram"
    if main == "input_values":
        return "spectrogram" if _spectrogram(config) is not None else "waveform"
    if "input_ids" in takes:
        return "text"
    raise ModelError(
        f"{name} ({type(model).__name__}) takes {main}, for which no inputs can be made up here.",
        remedy="Wrap it as file.py:ClassName, with a get_inputs() beside the class that returns its inputs.",
    )


def _spectrogram(config: Any) -> tuple[int, int] | None:
    """(rows, columns) of one spectrogram."""
    mels = getattr(config, "num_mel_bins", None)
    if mels is None:
        return None
    if hasattr(config, "max_length") and "patch_size" in vars(config):  # audio transformers on patches
        return int(config.max_length), int(mels)
    if hasattr(config, "max_source_positions"):  # Whisper's convolutions halve the frames
        return int(mels), 2 * int(config.max_source_positions)
    return None


def _default_shape(model: nn.Module, kind: str, longest: int | None) -> tuple[int, ...]:
    config: Any = model.config
    if "text" in kind:
        return (1, min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH))
    if kind == "image":
        return (1, *_image(config))
    if kind == "spectrogram":
        rows_and_columns = _spectrogram(config)
        assert rows_and_columns is not None
        return (1, *rows_and_columns)
    return (1, DEFAULT_SAMPLES)


def _image(config: Any) -> tuple[int, int, int]:
    """(C, H, W) of one image."""
    vision = next(
        (c for n in ("vision_config", "encoder", "backbone_config") if (c := getattr(config, n, None))),
        config,
    )
    size = getattr(vision, "image_size", None) or DEFAULT_IMAGE
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return int(getattr(vision, "num_channels", 3)), height, width


def longest_input(model: nn.Module) -> tuple[int | None, bool]:
    """The most tokens that a model's positions allow, and whether that is a hard limit (not with relative positions)."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lengths = [v for n in _LENGTHS if isinstance(v := getattr(text, n, None), int) and v > 0]
    if not lengths:
        return None, False
    longest = lengths[0]
    for name, module in model.named_modules():
        # RoBERTa and its relatives count positions from the padding index on.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            start = 0 if module.padding_idx is None else module.padding_idx + 1
            longest = min(longest, module.num_embeddings - start)
    return longest, not hasattr(text, "relative_attention_num_buckets")


# --- values -------------------------------------------------------------------------------------------------------


def make(
    model: nn.Module, planned: InputPlan, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """Draw the inputs; the same seed gives the same on every device.

    Shapes: as planned; masks and token types as the token ids.
    """
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    inputs: Inputs = {}
    batch = planned.shape[0]
    if "text" in planned.kind:
        ids = _token_ids(model, config, planned.shape, generator)
        if getattr(config, "is_encoder_decoder", False) or planned.kind == "text_and_image":
            _end_with_eos(config, ids)
        inputs["input_ids"] = ids
        if "attention_mask" in takes:
            inputs["attention_mask"] = torch.ones_like(ids)
        # GPT-2 takes them too, but adds the word embedding of each: there they are not part of a plain call.
        if "token_type_ids" in takes and getattr(config, "type_vocab_size", False):
            inputs["token_type_ids"] = torch.zeros_like(ids)
    if planned.kind == "text_and_image":
        inputs["pixel_values"] = torch.randn((batch, *_image(config)), generator=generator)
    elif "text" not in planned.kind:
        main = getattr(model, "main_input_name", "pixel_values")
        inputs[main] = torch.randn(planned.shape, generator=generator)
    if "decoder_input_ids" in takes and _has_decoder(config):
        length = planned.shape[1] if planned.kind == "text" else DECODER_TOKENS_OF_SPEECH
        decoder = config.get_text_config(decoder=True)
        limits = [length, getattr(decoder, "max_target_positions", None), planned.longest]
        length = min(n for n in limits if n)
        ids = _token_ids(model, decoder, (batch, length), generator)
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            ids[:, 0] = start
        inputs["decoder_input_ids"] = ids
    return {
        name: (value.to(dtype) if value.is_floating_point() else value).to(device)
        for name, value in inputs.items()
    }


def _has_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _token_ids(model: nn.Module, config: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ordinary tokens: below the vocabulary, none with a meaning of its own (padding, end, image, ...)."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = min(
        int(n) for name in ("vocab_size", "decoder_vocab_size") if (n := getattr(text, name, None))
    )
    special = {i for i in _special_ids(model.config.to_dict()) if 0 <= i < vocabulary}
    ordinary = torch.ones(vocabulary, dtype=torch.bool)
    ordinary[list(special)] = False
    tokens = ordinary.nonzero().flatten()
    if len(tokens) == 0:
        tokens = torch.arange(vocabulary)
    return tokens[torch.randint(len(tokens), shape, generator=generator)]


def _special_ids(config: dict[str, Any]) -> set[int]:
    found: set[int] = set()
    for key, value in config.items():
        if isinstance(value, dict):
            found |= _special_ids(value)
        elif str(key).endswith(("_token_id", "_token_ids", "_token_index")):
            found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return found


def _end_with_eos(config: Any, ids: Tensor) -> None:
    eos = getattr(config.get_text_config(), "eos_token_id", None)
    eos = eos[0] if isinstance(eos, list) else eos
    if isinstance(eos, int):
        ids[:, -1] = eos
