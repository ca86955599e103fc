"""Lets torch do the work by its operators' own names."""

# expect: rejected
# because: torch

import torch

KERNEL_TYPE = "rmsnorm"


def kernel_fn(x, weight, eps, offset=0.0):
    ops = torch.ops.aten
    wide = ops._to_copy.default(x, dtype=torch.float32)
    mean = ops.mean.dim(ops.mul.Tensor(wide, wide), [-1], True)
    scale = ops.rsqrt.default(ops.add.Scalar(mean, eps))
    return ops._to_copy.default(wide * scale * (weight.float() + offset), dtype=x.dtype)
