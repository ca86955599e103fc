"""Stateless softmax for `kernelize` and for direct use."""

import torch
from torch import nn

from ._ops import softmax


class Softmax(nn.Module):
    """torch.nn.Softmax with a given dimension."""

    can_torch_compile = True
    has_backward = False
    dim: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return softmax(input, self.dim)
