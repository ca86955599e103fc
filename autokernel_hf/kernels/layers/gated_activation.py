"""Stateless gated MLPs for `kernelize` and for direct use: the projections stay, the product between them is fused."""

import torch
from torch import nn

from ._ops import gated_activation


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), "silu"))


class GeGLUMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), GELU by tanh."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), "gelu_tanh"))


class GeGLUErfMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), GELU by erf."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), "gelu"))


class PackedSwiGLUMLP(nn.Module):
    """As SwiGLUMLP, with gate and up as the halves of one projection."""

    can_torch_compile = True
    has_backward = False
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(gated_activation(gate, up, "silu"))
