"""Options that several commands share, each said once."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autokernel_hf.errors import UsageError

if TYPE_CHECKING:
    from autokernel_hf.records import ModelSpec

_PANEL = "Model options"
_MAX_ELEMENTS = 2**40
_MODEL_HELP = "A Hub id (gpt2, meta-llama/...), a folder, or file.py:ClassName."
Device = Annotated[
    str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to run.", rich_help_panel=_PANEL)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes from the Hub.", rich_help_panel=_PANEL),
]
TrustConfig = Annotated[
    Path | None,
    typer.Option("--trust-config", metavar="FILE", help="A sigstore of your own; the public one without."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the log.")]
RunOption = Annotated[Path, typer.Option("--run", help="The run folder.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="The target, where the run has several.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of every command that takes a model, as typed."""

    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the Hub.", rich_help_panel=_PANEL)
    ] = None
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Build the architecture with random weights; download none.",
            rich_help_panel=_PANEL,
        ),
    ] = False
    task: Annotated[
        str | None, typer.Option(help="Task, where the configuration names none.", rich_help_panel=_PANEL)
    ] = None
    input_shape: Annotated[
        str | None,
        typer.Option(
            metavar="B,S",
            help="Shape of the input (default: 1 x min(1024, the longest)).",
            rich_help_panel=_PANEL,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="float32|float16|bfloat16",
            help="(default: float32 on a CPU, the checkpoint's on a GPU)",
            rich_help_panel=_PANEL,
        ),
    ] = None
    device: Device = "auto"
    attn: Annotated[
        str | None, typer.Option(metavar="IMPL", help="Attention implementation.", rich_help_panel=_PANEL)
    ] = None
    trust_remote_code: TrustRemoteCode = False
    local_files_only: Annotated[
        bool,
        typer.Option("--local-files-only", help="Use only what is in the cache.", rich_help_panel=_PANEL),
    ] = False
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and search.", rich_help_panel=_PANEL)] = 0

    def spec(self, model: str) -> ModelSpec:
        """What the stages need. Raises UsageError for values that make no sense."""
        from autokernel_hf.records import ModelSpec

        if self.dtype not in (None, "float32", "float16", "bfloat16"):
            raise UsageError(
                f"--dtype {self.dtype} is not supported.", remedy="Use float32, float16 or bfloat16."
            )
        check_device(self.device)
        return ModelSpec(
            model=model,
            revision=self.revision,
            random_weights=self.random_weights,
            task=self.task,
            input_shape=shape(self.input_shape),
            dtype=self.dtype,
            device=self.device,
            attn=self.attn,
            trust_remote_code=self.trust_remote_code,
            local_files_only=self.local_files_only,
            seed=self.seed,
        )


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first two parameters are `model: str` and `options: ModelOptions`, as Typer wants it: flat."""
    own = inspect.signature(command, eval_str=True).parameters
    fields = inspect.signature(ModelOptions, eval_str=True).parameters
    model = own["model"]
    if model.annotation is str:
        model = model.replace(annotation=Annotated[str, typer.Argument(help=_MODEL_HELP)])
    rest = [p for name, p in own.items() if name not in ("model", "options")]
    flat = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (model, *fields.values(), *rest)]

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        options = ModelOptions(**{name: arguments.pop(name) for name in fields})
        command(options=options, **arguments)

    wrapper.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in flat}
    return wrapper


def check_device(text: str) -> None:
    """Raises UsageError where `text` names no device that any machine could have."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", text):
        raise UsageError(f"--device {text} is no device.", remedy="Use auto, cpu, cuda or cuda:N.")


def shape(text: str | None) -> tuple[int, ...] | None:
    """`1,1024` or `1x1024` as numbers. Raises UsageError for anything else."""
    if text is None:
        return None
    parts = re.split(r"[,x]", text.replace(" ", ""))
    # Fifteen digits are more than any memory holds; Python itself refuses to read some thousands.
    if not all(re.fullmatch(r"[0-9]{1,15}", p) and int(p) > 0 for p in parts):
        raise UsageError(f"{text!r} is no shape.", remedy="Write positive numbers with commas, as in 1,1024.")
    sizes = tuple(int(p) for p in parts)
    if math.prod(sizes) > _MAX_ELEMENTS:
        raise UsageError(
            f"{text} has {math.prod(sizes):.1e} elements, more than any memory holds.",
            remedy="Choose a smaller shape.",
        )
    return sizes


def numbers(text: str | None) -> tuple[int, ...]:
    """`0,1` as numbers of GPUs; none for None. Raises UsageError for anything else."""
    if text is None:
        return ()
    parts = text.replace(" ", "").split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}", p) for p in parts):
        raise UsageError(f"--devices {text} is no list of GPUs.", remedy="Write their numbers, as in 0,1.")
    return tuple(map(int, parts))


def seconds(text: str | None) -> float | None:
    """`90`, `90s`, `30m`, `2h` in seconds. Raises UsageError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no duration.", remedy="Write 90s, 30m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
