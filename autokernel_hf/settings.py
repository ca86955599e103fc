"""What was asked of a run, looked over before anything is fetched: one place for the command line and for Python."""

from __future__ import annotations

from autokernel_hf.errors import UsageError
from autokernel_hf.runs import RunSettings

BACKENDS = ("auto", "triton", "cuda", "cpp")
PROPOSERS = ("playbook", "llm", "external")


def check_settings(settings: RunSettings) -> None:
    """Refuse now what would be refused, or mean nothing, when the model is pulled and profiled.

    Raises:
        UsageError: A word is unknown, a count is none, options contradict each other, no package can be called so
            whichever kernels win, or it is no licence.
    """
    if settings.backend not in BACKENDS:
        raise UsageError(f"--backend {settings.backend} is unknown.", remedy="Use auto, triton, cuda or cpp.")
    if settings.proposer not in PROPOSERS:
        raise UsageError(
            f"--proposer {settings.proposer} is unknown.", remedy="Use playbook, llm or external."
        )
    for name, value in (("top", settings.top), ("max-experiments", settings.max_experiments)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value} leaves nothing to do.", remedy="Use a number from 1.")
    if settings.budget_s is not None and not 0 < settings.budget_s < float("inf"):
        raise UsageError(
            f"A budget of {settings.budget_s:g} s leaves nothing to do, or no end.",
            remedy="Give a time, as in --budget 2h.",
        )
    _check_language_model(settings)
    _check_names(settings)


def _check_language_model(settings: RunSettings) -> None:
    asked = (
        settings.llm,
        settings.base_url,
        settings.max_tokens,
        settings.max_cost,
        settings.price_in,
        settings.price_out,
    )
    if settings.proposer != "llm":
        if any(value is not None for value in asked):
            raise UsageError(
                "--llm, --base-url, --max-tokens, --max-cost and prices mean nothing to the "
                f"{settings.proposer} proposer.",
                remedy="Add --proposer llm, or leave them out.",
            )
        return
    if settings.llm is None:
        raise UsageError("The llm proposer needs a model.", remedy="Name one with --llm.")
    if (settings.price_in is None) != (settings.price_out is None):
        raise UsageError("--price-in and --price-out go together.", remedy="Give both, or neither.")
    if settings.base_url is not None:
        from autokernel_hf.llm import check_base_url

        check_base_url(settings.base_url)


def _check_names(settings: RunSettings) -> None:
    from autokernel_hf.export_hf import check_license, package_name
    from autokernel_hf.kernels import kernel_types

    check_license(settings.license)
    if settings.name is not None:
        package_name(settings.name, max(kernel_types(), key=len))
