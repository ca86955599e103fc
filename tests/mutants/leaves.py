"""Leaves by the door."""

# expect: crashed
# because: SystemExit

KERNEL_TYPE = "rmsnorm"


def kernel_fn(x, weight, eps, offset=0.0):
    raise SystemExit(0)
