"""What calls of a Triton candidate launch: the digest of machine code, launch grids and arguments, in their order.

Two sources whose digests are the same do the same on these calls: the same kernels, compiled to the same PTX by the same
options, launched on the same grids with the same numbers, around the same operators of torch. Constants that these calls
do not reach make no difference, which a search wants to know before it spends the device on them.

A child tells the digest of the candidate that it holds. One that lies is taken for new, or for an old one that is known;
neither gains it anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LINE_NUMBERS = re.compile(r"^\s*\.(?:loc|file)\b.*$|^\$L__(?:tmp|func)\w*:$", re.MULTILINE)
_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_DEBUG = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", re.MULTILINE)


class UnknownLaunchError(Exception):
    """Something is launched that cannot be told from another by its description."""


def digest_of(kernel_fn: Callable[..., Any], calls: Iterable[dict[str, Any]]) -> str | None:
    """The digest of what these calls launch; None where it cannot be told.

    Raises:
        Exception: What the candidate raises.
    """
    from triton.runtime.jit import JITFunction

    told: list[str] = []
    try:
        with _told(JITFunction, told), _Operators(told):
            for arguments in calls:
                told.append("call")
                kernel_fn(**arguments)
    except UnknownLaunchError:
        return None
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


@contextlib.contextmanager
def _told(owner: Any, told: list[str]) -> Iterator[None]:
    """Have every launch described before it returns."""
    run = owner.run

    def described(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        seen: list[Any] = []

        def noted(meta: Any) -> Any:
            seen.append(grid(meta))
            return seen[-1]

        kernel = run(self, *args, grid=noted if callable(grid) else grid, warmup=warmup, **options)
        told.append(_described(self, kernel, args, options, seen[-1] if seen else grid))
        return kernel

    owner.run = described
    try:
        yield
    finally:
        owner.run = run


def _described(function: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], grid: Any) -> str:
    try:
        ptx, metadata = kernel.asm["ptx"], kernel.metadata._asdict()
        passed = {**dict(zip((p.name for p in function.params), args, strict=False)), **options}
        values = [
            f"{p.name}={_value(passed[p.name])}"
            for p in function.params
            if p.name in passed and not p.is_constexpr
        ]
    except (
        AttributeError,
        KeyError,
        TypeError,
    ) as error:  # another version of Triton may name things otherwise
        raise UnknownLaunchError(str(error)) from None
    how = {k: str(v) for k, v in metadata.items() if k not in ("hash", "debug")}
    return repr((plain(ptx), sorted(how.items()), tuple(grid), values))


def plain(ptx: str) -> str:
    """PTX without line numbers, comments and what debuggers read: the path of the source is in all of them."""
    bare = _COMMENT.sub("", _LINE_NUMBERS.sub("", _DEBUG.sub("", ptx)))
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}, {value.untyped_storage().nbytes()} bytes from {value.storage_offset()}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    described = [getattr(value, name, None) for name in ("shape", "strides", "block_shape")]
    base = getattr(value, "base", None)
    if isinstance(base, Tensor) and None not in described:  # a tensor descriptor
        return f"{_value(base)} as {described}"
    raise UnknownLaunchError(f"an argument of type {type(value).__name__}")


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run under it, with what they return."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `audit.Recorder`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        forms = [
            f"{r.dtype} {tuple(r.shape)} {tuple(r.stride())}"
            for r in (result if isinstance(result, tuple | list) else (result,))
            if isinstance(r, Tensor)
        ]
        self._told.append(f"{func.name()} {forms}")
        return result
