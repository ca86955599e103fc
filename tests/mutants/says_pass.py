"""Says PASS, and raises."""

# expect: crashed
# because: RuntimeError

KERNEL_TYPE = "rmsnorm"


def kernel_fn(x, weight, eps, offset=0.0):
    print("PASS")  # noqa: T201
    raise RuntimeError("after all")
