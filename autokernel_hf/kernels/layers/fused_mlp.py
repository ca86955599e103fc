"""Stateless feed-forward blocks for `kernelize` and for direct use: the whole block is one operation.

A class for each way in which models name the projections and for each activation: a stateless layer cannot look the
activation up.
"""

import torch
from torch import nn

from ._ops import fused_mlp


def _gated(mlp: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return fused_mlp(x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias, activation)


def _plain(up: nn.Linear, down: nn.Linear, x: torch.Tensor, activation: str) -> torch.Tensor:
    return fused_mlp(x, None, up.weight, down.weight, None, up.bias, down.bias, activation)


class FusedSwiGLUMLP(nn.Module):
    """Llama's down(silu(gate(x)) * up(x)) and its many relatives."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(self, x, "silu")


class FusedGeGLUMLP(nn.Module):
    """Gemma's down(gelu(gate(x)) * up(x)), GELU by tanh."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(self, x, "gelu_tanh")


class FusedGeGLUErfMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), GELU by erf."""

    can_torch_compile = True
    has_backward = False
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(self, x, "gelu")


class FusedPackedSwiGLUMLP(nn.Module):
    """Phi-3's: as FusedSwiGLUMLP, with gate and up as the halves of one weight."""

    can_torch_compile = True
    has_backward = False
    gate_up_proj: nn.Linear
    down_proj: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        packed, down = self.gate_up_proj, self.down_proj
        gate, up = packed.weight.chunk(2)
        b_gate, b_up = (None, None) if packed.bias is None else packed.bias.chunk(2)
        return fused_mlp(hidden_states, gate, up, down.weight, b_gate, b_up, down.bias, "silu")


class FusedGELUMLP(nn.Module):
    """fc2(gelu(fc1(x))), GELU by erf: ViT, OPT-like encoders."""

    can_torch_compile = True
    has_backward = False
    fc1: nn.Linear
    fc2: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _plain(self.fc1, self.fc2, hidden_states, "gelu")


class FusedGELUTanhMLP(nn.Module):
    """SigLIP's fc2(gelu(fc1(x))), GELU by tanh."""

    can_torch_compile = True
    has_backward = False
    fc1: nn.Linear
    fc2: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _plain(self.fc1, self.fc2, hidden_states, "gelu_tanh")


class FusedNewGELUMLP(nn.Module):
    """Phi's fc2(gelu_new(fc1(x)))."""

    can_torch_compile = True
    has_backward = False
    fc1: nn.Linear
    fc2: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _plain(self.fc1, self.fc2, hidden_states, "gelu_new")


class FusedQuickGELUMLP(nn.Module):
    """CLIP's fc2(quick_gelu(fc1(x)))."""

    can_torch_compile = True
    has_backward = False
    fc1: nn.Linear
    fc2: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _plain(self.fc1, self.fc2, hidden_states, "quick_gelu")


class FusedNeoXMLP(nn.Module):
    """GPT-NeoX's dense_4h_to_h(gelu(dense_h_to_4h(x))), GELU by erf."""

    can_torch_compile = True
    has_backward = False
    dense_h_to_4h: nn.Linear
    dense_4h_to_h: nn.Linear

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _plain(self.dense_h_to_4h, self.dense_4h_to_h, hidden_states, "gelu")
