"""Stateless rotary embeddings, each in the place of one form of transformers' `apply_rotary_pos_emb`.

The forms differ in the pairing of dimensions, in what the tables hold, and in the dtype in which they compute: the
dtype of the tables decides that, so some of these widen the tables.
"""

import torch
from torch import nn

from ._ops import rotary_embedding


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Brings q and k to (B, H, S, D) and the tables to (1|B, S, R), whichever way round the caller holds them."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    packed = q.dim() == 3
    if packed:
        q, k = q[None], k[None]
    while cos.dim() < 4:
        cos, sin = cos[None], sin[None]
    heads_second = cos.shape[1] == 1
    if not heads_second and cos.shape[2] != 1:
        raise ValueError(f"rotary tables of their own for each head are not supported: {tuple(cos.shape)}")
    if heads_second:
        cos, sin = cos[:, 0], sin[:, 0]
    else:
        cos, sin = cos[:, :, 0], sin[:, :, 0]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if cos.shape[1] != q.shape[2]:
        cos, sin = cos.expand(-1, q.shape[2], -1), sin.expand(-1, q.shape[2], -1)
    q, k = rotary_embedding(q, k, cos, sin, interleaved)
    if not heads_second:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q[0], k[0]) if packed else (q, k)


class RotaryEmbedding(nn.Module):
    """Llama's and, with tables narrower than the heads, GPT-NeoX's: halves, in the wider of the two dtypes."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(q.dtype, cos.dtype)
        return _rotate(q.to(dtype), k.to(dtype), cos.to(dtype), sin.to(dtype), unsqueeze_dim)


class RotaryEmbeddingKeepingDtype(nn.Module):
    """OLMo's: halves, computed in the wider dtype, returned in q's."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(q.dtype, cos.dtype)
        return _rotate(q, k, cos.to(dtype), sin.to(dtype), unsqueeze_dim)


class RotaryEmbeddingFloat32(nn.Module):
    """ESM's and ModernBERT's: halves, computed in float32 whatever the dtypes are."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _rotate(q, k, cos.float(), sin.float(), unsqueeze_dim)


class RotaryEmbeddingVision(nn.Module):
    """The vision towers' `apply_rotary_pos_emb_vision`: heads after the sequence, computed in float32."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _rotate(q, k, cos.float(), sin.float(), -2)


class RotaryEmbeddingHalfTables(nn.Module):
    """GPT-OSS's: halves, with tables that hold each angle once."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(q.dtype, cos.dtype)
        cos, sin = torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)
        return _rotate(q.to(dtype), k.to(dtype), cos, sin, unsqueeze_dim)


class RotaryEmbeddingInterleaved(nn.Module):
    """Cohere's: neighbours pair, computed in float32."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _rotate(q, k, cos.float(), sin.float(), unsqueeze_dim, True)


class RotaryEmbeddingInterleavedHalves(nn.Module):
    """GLM's and Helium's: neighbours pair, and of the tables the first half counts, each entry for two dimensions."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(q.dtype, cos.dtype)
        half = cos.shape[-1] // 2
        cos = cos[..., :half].repeat_interleave(2, -1).to(dtype)
        sin = sin[..., :half].repeat_interleave(2, -1).to(dtype)
        return _rotate(q.to(dtype), k.to(dtype), cos, sin, unsqueeze_dim, True)


class RotaryEmbeddingInterleavedHalvesFloat32(nn.Module):
    """ERNIE 4.5's: as RotaryEmbeddingInterleavedHalves, computed in float32, returned in q's dtype."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = cos.shape[-1] // 2
        cos = cos[..., :half].repeat_interleave(2, -1).float()
        sin = sin[..., :half].repeat_interleave(2, -1).float()
        return _rotate(q, k, cos, sin, unsqueeze_dim, True)
