"""Lets torch write the kernel."""

# expect: rejected
# because: torch.compile|torch compute
# needs: gpu

import torch

KERNEL_TYPE = "rmsnorm"


@torch.compile
def plain(x, weight, eps: float, offset: float):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)).to(
        x.dtype
    )


def kernel_fn(x, weight, eps, offset=0.0):
    return plain(x, weight, eps, offset)
