"""Stateless layer norm for `kernelize` and for direct use."""

import torch
from torch import nn

from ._ops import layernorm


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over the last dimension, with or without weight and bias."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layernorm(input, self.weight, self.bias, self.eps)
