"""Lets torch do the work under another name."""

# expect: rejected
# because: torch

import torch as numbers

KERNEL_TYPE = "rmsnorm"

functions = getattr(getattr(numbers, "n" + "n"), "func" + "tional")


def kernel_fn(x, weight, eps, offset=0.0):
    return functions.rms_norm(x, x.shape[-1:], weight + offset, eps)
