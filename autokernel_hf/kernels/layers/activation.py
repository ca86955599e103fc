"""Stateless activation layers for `kernelize` and for direct use."""

import torch
from torch import nn

from ._ops import activation


class NewGELU(nn.Module):
    """GELU by tanh, as GPT-2 writes it out."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "gelu_new")


class FastGELU(nn.Module):
    """GELU by tanh with its constant in ten digits: the same function, and another chain of ops."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "gelu_new")


class GeLU(nn.Module):
    """GELU by erf."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "gelu")


class GeluTanh(nn.Module):
    """GELU by tanh, as torch's operator."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "gelu_tanh")


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 * x)."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "quick_gelu")


class SiLU(nn.Module):
    """x * sigmoid(x)."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "silu")


class ReLU(nn.Module):
    """max(x, 0)."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "relu")


class ReLUSquared(nn.Module):
    """max(x, 0) squared."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return activation(input, "relu2")
