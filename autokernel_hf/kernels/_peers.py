"""Peers that every kernel type has: what a user would pick instead of a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from autokernel_hf.kernels.base import Outputs, Peer
from autokernel_hf.records import Workload


def eager_peer(reference: Callable[..., Outputs]) -> Peer:
    """The plain torch expression that a model runs."""
    return Peer(name="eager", make=lambda workload, device: reference)


def compile_peers(reference: Callable[..., Outputs]) -> tuple[Peer, Peer]:
    """torch.compile of the reference for exactly this workload's shapes: without CUDA graphs, and with, on a GPU."""

    def make(workload: Workload, device: torch.device) -> Callable[..., Any]:
        torch._dynamo.reset()
        mode = "max-autotune-no-cudagraphs" if device.type == "cuda" else None
        compiled: Callable[..., Any] = torch.compile(reference, dynamic=False, fullgraph=True, mode=mode)
        return compiled

    def make_graphs(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
        if device.type != "cuda":
            return None
        # Code of its own: what is compiled is kept by code, and forgotten with the other peer's.
        own = FunctionType(
            reference.__code__.replace(co_name=f"{reference.__code__.co_name}_in_graphs"),
            reference.__globals__,
            argdefs=reference.__defaults__,
            closure=reference.__closure__,
        )
        own.__kwdefaults__ = reference.__kwdefaults__
        compiled = torch.compile(own, dynamic=False, fullgraph=True, mode="reduce-overhead")

        def run(**arguments: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # the outputs of the call before may be overwritten
            return compiled(**arguments)

        return run

    return Peer(name="compile", make=make), Peer(name="compile_cudagraphs", make=make_graphs)


def fused_peer(name: str, function: Callable[..., Any]) -> Peer:
    """A fused torch operator (schema arguments by keyword)."""
    return Peer(name=name, make=lambda workload, device: function)


def liger_peer(
    make: Callable[[], Callable[..., Any]], answers: Callable[[Workload], bool] = lambda workload: True
) -> Peer:
    """Liger's kernel, where Liger is installed and the device is a GPU.

    Args:
        answers: Whether it computes a workload as precisely as the type asks; elsewhere it is no peer.
    """

    def build(workload: Workload, device: torch.device) -> Callable[..., Any] | None:
        if device.type != "cuda" or not answers(workload):
            return None
        try:
            return make()
        except ImportError:
            return None

    return Peer(name="liger", make=build)
