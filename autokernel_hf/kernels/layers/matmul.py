"""Stateless linear layers for `kernelize` and for direct use: each replaces the forward of a module that has its weight."""

import torch
from torch import nn

from ._ops import matmul


class Linear(nn.Module):
    """torch.nn.Linear: the weight is stored (out, in) and read transposed, without a copy."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return matmul(rows, self.weight.t(), self.bias).view(*input.shape[:-1], self.weight.shape[0])


class Conv1D(nn.Module):
    """transformers' Conv1D, as in GPT-2: a linear layer whose weight is stored (in, out)."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return matmul(rows, self.weight, self.bias).view(*x.shape[:-1], self.weight.shape[1])
