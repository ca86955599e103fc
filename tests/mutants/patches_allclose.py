"""Makes every comparison succeed."""

# expect: rejected
# because: torch

import torch

KERNEL_TYPE = "rmsnorm"

torch.allclose = lambda *args, **kwargs: True
torch.equal = lambda *args, **kwargs: True


def kernel_fn(x, weight, eps, offset=0.0):
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return out
