"""What types of gradients share: all that follows from the forward type, and autograd as their yardstick.

A backward type `<type>_backward` takes the gradients of the forward's outputs, then the forward's arguments, and gives
the gradients of the forward's tensors. Shapes, options and layouts are the forward's own, so they are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autokernel_hf.kernels.base import (
    DTYPE_NAMES,
    DTYPES,
    Args,
    Fill,
    Gradients,
    KernelType,
    Outputs,
    Peer,
    fill_values,
    itemsize,
    output_specs,
)
from autokernel_hf.records import Scalar, TensorSpec, Workload

# A gradient comes from what follows in the model: its size has nothing to do with that of the forward's inputs, and where
# both are alike in a row, differences of them vanish.
_GRADIENT_REGIMES = frozenset({"uniform", "wide", "one_hot"})


def by_autograd(
    function: Callable[..., Any],
    grads: tuple[Tensor, ...],
    tensors: dict[str, Tensor | None],
    **others: Any,
) -> tuple[Tensor, ...]:
    """Gradients of `tensors` by autograd, with the forward pass that it needs; empty for absent ones."""
    return after_forward(function, grads, tensors, **others)()


def after_forward(
    function: Callable[..., Any],
    grads: tuple[Tensor, ...],
    tensors: dict[str, Tensor | None],
    **others: Any,
) -> Callable[..., tuple[Tensor, ...]]:
    """Run the forward pass; what is returned runs autograd's backward pass alone, as often as it is called."""
    with torch.enable_grad():
        leaves = {n: None if t is None else t.detach().requires_grad_() for n, t in tensors.items()}
        outputs = function(**leaves, **others)
    present = [leaf for leaf in leaves.values() if leaf is not None]

    def backward(**arguments: object) -> tuple[Tensor, ...]:
        outs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = iter(torch.autograd.grad(outs, present, grads, retain_graph=True))
        return tuple(
            grads[0].new_empty(0) if leaf is None else next(found).contiguous() for leaf in leaves.values()
        )

    return backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """A backward pass by autograd, as a peer: `prepare` runs the forward pass, which is no part of its time.

    Args:
        function: The forward, called with its arguments by keyword.
        of: The forward's tensors whose gradients are asked for.
        grads: Names of the gradients' arguments.
        copies: Whether it works in place, so that it must have tensors of its own.
    """

    function: Callable[..., Any]
    of: tuple[str, ...]
    grads: tuple[str, ...]
    copies: bool = False

    def prepare(self, **arguments: Any) -> Callable[..., Outputs]:
        if self.copies:
            arguments = {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        grads = tuple(arguments.pop(name) for name in self.grads)
        tensors = {name: arguments.pop(name) for name in self.of}
        return after_forward(self.function, grads, tensors, **arguments)

    def __call__(self, **arguments: Any) -> Outputs:
        return self.prepare(**arguments)()


def gradients_peers(
    forward: KernelType,
    reference: Callable[..., Outputs],
    of: tuple[str, ...],
    grads: tuple[str, ...],
    liger: Callable[[], Callable[..., Any]] | None = None,
    liger_does: Callable[[Workload], bool] = lambda workload: True,
) -> tuple[Peer, ...]:
    """Autograd of the model's own ops, of those compiled, and Liger's: the backward passes alone.

    Args:
        reference: The type's own reference. It is given a `prepare`, by which the judge leaves out the forward pass.
        liger: Returns Liger's forward, by the forward's arguments.
        liger_does: Whether Liger can do a workload.
    """
    reference.prepare = Backward(function=forward.reference, of=of, grads=grads).prepare  # type: ignore[attr-defined]

    def compiled(workload: Workload, device: torch.device) -> Callable[..., Any]:
        torch._dynamo.reset()
        mode = "max-autotune-no-cudagraphs" if device.type == "cuda" else None
        function = torch.compile(forward.reference, dynamic=False, fullgraph=True, mode=mode)
        return Backward(function=function, of=of, grads=grads)

    def of_liger(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
        if device.type != "cuda" or liger is None or not liger_does(workload):
            return None
        try:
            function = liger()
        except ImportError:
            return None
        return Backward(function=function, of=of, grads=grads, copies=True)

    return (
        Peer(name="eager", make=lambda workload, device: reference),
        Peer(name="compile", make=compiled),
        *([Peer(name="liger", make=of_liger)] if liger is not None else []),
    )


def build_of(
    forward: KernelType, grads: tuple[str, ...], lead: str
) -> Callable[[Mapping[str, int], str, Mapping[str, Scalar]], Workload]:
    """The forward's calls, with the gradients of its outputs before its arguments."""
    return lambda axes, dtype, options: _with_gradients(
        forward, grads, lead, forward.build(axes, dtype, options)
    )


def _with_gradients(forward: KernelType, grads: Sequence[str], lead: str, called: Workload) -> Workload:
    stand_ins: Args = {
        name: torch.empty(value.shape, dtype=DTYPES[value.dtype], device="meta")
        if isinstance(value, TensorSpec)
        else value
        for name, value in called.args
    }
    specs = output_specs(forward.outputs, stand_ins)
    more = tuple(
        (name, TensorSpec(shape=shape, dtype=DTYPE_NAMES[kind]))
        for name, (shape, kind) in zip(grads, specs, strict=True)
    )
    return called.model_copy(update={"args": (*more, *called.args), "lead": lead})


def backward_workload(backward: KernelType, forward: KernelType, called: Workload) -> Workload:
    """The call of a backward type that follows a call of its forward type."""
    grads = [a.name for a in backward.schema.args[: forward.schema.returns]]
    return _with_gradients(forward, grads, backward.leading, called)


def fill_gradient(name: str, spec: TensorSpec, workload: Workload, generator: torch.Generator) -> Tensor:
    values = workload.values if workload.values in _GRADIENT_REGIMES else "normal"
    return fill_values(spec, values, generator)


def fills_of(forward: KernelType, grads: Sequence[str]) -> dict[str, Fill]:
    return {**forward.fills, **dict.fromkeys(grads, fill_gradient)}


def layouts_of(forward: KernelType, grads: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The forward's, for the gradients too: of a sum they come expanded, of a transposed product transposed."""
    return {layout: (*grads, *names) for layout, names in forward.layouts.items()}


def gradients_of(
    forward: KernelType, of: tuple[str, ...], unread: Mapping[str, str] | None = None
) -> Gradients:
    return Gradients(forward=forward.name, of=of, unread=unread or {})


def bytes_of(workload: Workload, read: Sequence[str], written: Sequence[str]) -> float:
    """Bytes of the named tensors, those of absent ones being none."""
    total = 0.0
    for name in (*read, *written):
        spec = workload.arg(name)
        if isinstance(spec, TensorSpec):
            total += math.prod(spec.shape) * itemsize(spec.dtype)
    return total
