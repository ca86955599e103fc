"""Attention in the place of transformers' `sdpa` entry, and as `attn_implementation="namespace/name"`.

For the latter transformers looks for `flash_attn_forward` and `supports_flash_attn` in the package itself, and gives it
masks as it gives them to `sdpa`.
"""

import torch
from torch import nn

from ._ops import flash_attention

supports_flash_attn = True


def flash_attn_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query (B, Hq, Sq, D), key and value (B, Hk, Sk, D) -> (B, Sq, Hq, D), contiguous.

    Raises:
        NotImplementedError: Dropout, a soft cap or a paged cache is asked for.
    """
    if dropout or kwargs.get("softcap") is not None or kwargs.get("cache") is not None:
        raise NotImplementedError("this attention kernel has no dropout, no soft cap and no paged cache")
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # A single query is a decoding step and sees all keys; a mask holds the causal pattern itself.
    causal = queries > 1 and attention_mask is None and bool(is_causal)
    if causal and keys > queries:
        # The first step with a static cache: what lies behind the queries is not filled yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
        if position_bias is not None:
            position_bias = position_bias[..., :queries]
        keys = queries
    mask = attention_mask
    if causal and (keys < queries or position_bias is not None):
        # This causality counts from the first key, the kernel's from the last: alike only on a square.
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()[None, None]
        causal = False
    if position_bias is not None:
        lowest = torch.finfo(key.dtype).min
        if mask is None:
            mask = position_bias
        elif mask.dtype == torch.bool:
            mask = torch.where(mask, position_bias, lowest)
        else:
            mask = position_bias + mask
    out = flash_attention(query, key, value, mask=mask, scale=scaling, causal=causal)
    return out.transpose(1, 2).contiguous(), None


class SDPAttention(nn.Module):
    """What `ALL_ATTENTION_FUNCTIONS["sdpa"]` does, by the kernel."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        return flash_attn_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
