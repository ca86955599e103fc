"""Lets torch do the work."""

# expect: rejected
# because: torch

import torch

KERNEL_TYPE = "rmsnorm"


def kernel_fn(x, weight, eps, offset=0.0):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
