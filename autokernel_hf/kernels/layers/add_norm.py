"""Stateless output blocks for `kernelize` and for direct use: residual addition and norm in one pass."""

import torch
from torch import nn

from ._ops import add_norm


class AddLayerNorm(nn.Module):
    """BERT's output block: LayerNorm(dropout(dense(x)) + residual)."""

    can_torch_compile = True
    has_backward = False
    dense: nn.Module
    dropout: nn.Module
    LayerNorm: nn.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        norm = self.LayerNorm
        hidden_states = self.dropout(self.dense(hidden_states))
        return add_norm(hidden_states, input_tensor, norm.weight, norm.bias, norm.eps, 0.0, "layer")[0]
