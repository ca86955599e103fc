"""Stateless layers for `kernelize` and for direct use: each replaces the forward of a module that has its weight."""

import torch
from torch import nn

from ._ops import rmsnorm


class RMSNorm(nn.Module):
    """Llama's norm and its many relatives: weight `weight`, epsilon `variance_epsilon`."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rmsnorm(hidden_states, self.weight, self.variance_epsilon)


class TorchRMSNorm(nn.Module):
    """torch.nn.RMSNorm over the last dimension, and norms that call their epsilon `eps` as it does."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rmsnorm(x, self.weight, self.eps)


class GemmaRMSNorm(nn.Module):
    """Gemma's norm: the weight is stored around 0 and applied as 1 + weight."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rmsnorm(x, self.weight, self.eps, 1.0)


class T5LayerNorm(nn.Module):
    """T5's norm, which has no mean and no bias either: the output has the weight's dtype."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden_states.dtype == weight.dtype:
            return rmsnorm(hidden_states, weight, self.variance_epsilon)
        # In float16 a T5 keeps its down projections, and so the sums that come from them, in float32.
        return rmsnorm(hidden_states.float(), weight.float(), self.variance_epsilon).to(weight.dtype)
