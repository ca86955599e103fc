"""The part of a GPU's L2 cache that a program may set aside, so that its data outlive what others write.

Data kept there would be warm where a benchmark means it to be cold: overwriting the cache does not reach them. By default
nothing is set aside. Source: CUDA driver API, `CUlimit`, `cuCtxResetPersistingL2Cache`.
"""

from __future__ import annotations

import ctypes

from autokernel_hf.errors import CandidateError

_PERSISTING_L2_CACHE_SIZE = 6  # of CUlimit


class Persisting:
    """Looks at the current context's share, as it was when this was made and is now.

    Where the driver does not know of any (before CUDA 11, or on other makers' devices) there is nothing to look at.
    """

    def __init__(self) -> None:
        try:
            self._driver: ctypes.CDLL | None = ctypes.CDLL("libcuda.so.1")
        except OSError:
            self._driver = None
        self._at_first = self._set_aside()

    def forget(self) -> None:
        """Make all that was kept there ordinary again.

        Raises:
            CandidateError: More is set aside than at first.
        """
        if self._driver is None:
            return
        now = self._set_aside()
        if now > self._at_first:
            raise CandidateError(
                f"it sets {now} bytes of the L2 cache aside, so that its data outlive a cold cache"
            )
        self._driver.cuCtxResetPersistingL2Cache()

    def _set_aside(self) -> int:
        if self._driver is None:
            return 0
        size = ctypes.c_size_t(0)
        code = self._driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2_CACHE_SIZE)
        return int(size.value) if code == 0 else 0
