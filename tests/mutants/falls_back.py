"""Tries a kernel that cannot work, and falls back to torch."""

# expect: rejected
# because: torch

import torch

KERNEL_TYPE = "rmsnorm"


def kernel_fn(x, weight, eps, offset=0.0):
    try:
        raise RuntimeError("no such kernel")
    except RuntimeError:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * (weight + offset)).to(x.dtype)
