"""Lets torch do the work in a program that torch has recorded."""

# expect: rejected
# because: torch

import torch

KERNEL_TYPE = "rmsnorm"

PROGRAMS = {}


def plain(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def kernel_fn(x, weight, eps, offset=0.0):
    key = (x.shape, x.dtype)
    if key not in PROGRAMS:
        PROGRAMS[key] = torch.jit.trace(plain, (x, weight), check_trace=False)
    return PROGRAMS[key](x, weight)
