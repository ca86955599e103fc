"""How this program talks to a Hub: the client, what its refusals mean, and what a kernel repository holds."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from autokernel_hf.errors import HubError, UsageError
from autokernel_hf.packages import BYTECODE, altered_files, is_name
from autokernel_hf.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

# With one of these set, kernels 0.17 sends a User-Agent that no HTTP client accepts, and every call to a Hub fails.
TELEMETRY_VARIABLES = ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
# Before, the client's commits take models, datasets and spaces only.
UPLOADS_SINCE = (2, 3)
RETRIES = 3
FIRST_DELAY_S = 1.0


def api() -> Any:
    """A client of the Hub that the environment names now (`HF_ENDPOINT`)."""
    from huggingface_hub import HfApi

    return HfApi(
        endpoint=os.environ.get("HF_ENDPOINT") or None,
        library_name="autokernel_hf",
        library_version=__version__,
    )


def endpoint() -> str:
    """The Hub that the environment names, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_repo_id(text: str) -> bool:
    """Whether this reads as `namespace/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None and ".." not in text


def check_repo_id(repo_id: str) -> None:
    """Refuse what the Kernel Hub would refuse as a repository's name.

    Raises:
        UsageError: It is not `namespace/name`, or the name is no kernel's.
    """
    if not is_repo_id(repo_id):
        raise UsageError(
            f"{repo_id!r} is not the name of a repository.",
            remedy="Write it as namespace/name, for example ada/gpt2-activation.",
        )
    name = repo_id.split("/")[1]
    if not is_name(name) or len(repo_id) > 96:
        raise UsageError(
            f"{name!r} cannot be a kernel's name.",
            remedy="Use lowercase letters, digits and dashes; start with a letter and end with a letter or digit; "
            "keep namespace/name under 97 characters.",
        )


def token() -> str:
    """The user's Hub token.

    Raises:
        HubError: There is none.
    """
    from huggingface_hub import get_token

    found = get_token()
    if not found:
        raise HubError(
            "There is no Hub token.", remedy="Run `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    return str(found)


def need_kernel_uploads() -> None:
    """Say at once that this client cannot write to kernel repositories, where it only reads them.

    Raises:
        HubError: huggingface_hub is older than 2.3.
    """
    from huggingface_hub import __version__ as version

    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < UPLOADS_SINCE:
        raise HubError(
            f"huggingface_hub {version} reads kernel repositories and cannot write to them.",
            remedy='Install a newer one: pip install -U "huggingface_hub>=2.3".',
        )


def sends_by_xet(repo_id: str, branch: str) -> bool:
    """Whether large files of a commit travel by Xet: the client here can, it is not switched off, and the Hub does.

    The client asks no Hub beforehand, and calls one that knows nothing of Xet unreachable.

    Raises:
        HfHubHTTPError: The Hub refuses the upload, or has a fault.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    url = f"{endpoint()}/api/kernels/{repo_id}/xet-write-token/{branch}"
    answer = get_session().get(url, headers=build_hf_headers())
    if answer.status_code == 404:
        logger.debug("%s has no Xet: large files go through Git LFS", endpoint())
        return False
    hf_raise_for_status(answer)
    return True


def is_true(value: str | None) -> bool:
    """How the ecosystem reads a switch in the environment."""
    return value is not None and value.upper() in ("1", "ON", "YES", "TRUE")


def refuse_broken_telemetry() -> None:
    """Say at once why `kernels` could not reach a Hub from this process.

    Raises:
        HubError: One of the variables is set.
    """
    for name in TELEMETRY_VARIABLES:
        if is_true(os.environ.get(name)):
            raise HubError(
                f"With {name}={os.environ[name]}, kernels 0.17 cannot talk to a Hub: its User-Agent is malformed.",
                remedy=f"Unset {name} for this command, or load the package from a folder.",
            )


# --- refusals -----------------------------------------------------------------------------------------------------


def transport_errors() -> tuple[type[Exception], ...]:
    """What an unreachable Hub raises, whichever HTTP library huggingface_hub uses."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    found: list[type[Exception]] = [ConnectionError, OfflineModeIsEnabled]
    for name in ("httpx2", "httpx"):
        try:
            found.append(importlib.import_module(name).TransportError)
        except ModuleNotFoundError:
            continue
    return tuple(found)


@contextmanager
def friendly(doing: str, repo_id: str) -> Iterator[None]:
    """Turn what the Hub's client raises into one sentence and a remedy.

    Args:
        doing: What was being done, for the sentence: "create the repository".

    Raises:
        HubError: In place of the client's own errors.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unreachable = transport_errors()
    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(error, doing, repo_id) from error
    except HFValidationError as error:
        raise HubError(
            f"{repo_id!r} is not the name of a repository.", remedy="Write it as namespace/name."
        ) from error
    except (LocalEntryNotFoundError, *unreachable) as error:
        # So hf_xet tells that its store refused, or gave up.
        status = re.search(r"HTTP status (?:client|server) error \((\d+[^)]*)\)", str(error))
        if status is not None:
            raise HubError(
                f"Cannot {doing}: the Hub's store of large files answers {status[1]}.",
                remedy="Try again; HF_HUB_DISABLE_XET=1 makes large files travel without that store.",
            ) from error
        raise HubError(
            f"Cannot {doing}: {endpoint()} cannot be reached ({type(error).__name__}).",
            remedy="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE.",
        ) from error
    except ValueError as error:
        if "Invalid filename" not in str(error):
            raise
        raise HubError(
            f"{repo_id} holds a file whose name leads out of the repository; nothing of it is used.",
            remedy="Do not trust it, and tell the Hub.",
        ) from error
    except RuntimeError as error:
        # So the client tells that a large file did not get through, whatever the reason.
        if "upload" not in str(error).lower():
            raise
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(error.__cause__, doing, repo_id) from error
        raise HubError(
            f"Cannot {doing}: {str(error).rstrip('.')} ({error.__cause__ or 'no reason given'}).",
            remedy="Publish again: what has arrived is not sent twice.",
        ) from error


def _refusal(error: Any, doing: str, repo_id: str) -> HubError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code if error.response is not None else None
    words = (error.response.headers.get("X-Error-Message") or "") if error.response is not None else ""
    said = f' The Hub says: "{words}".' if words else ""
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{repo_id} is gated.", remedy="Ask for access on its page, and use a token that has it."
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{repo_id} has no such version.{said}", remedy="`kernels versions` lists those it has."
        )
    if status == 401 and "credentials" in words:
        return HubError("The Hub does not know your token.", remedy="Run `hf auth login`, or renew HF_TOKEN.")
    if status == 404 and "build does not exist" in words:
        return unfinished(repo_id)
    if isinstance(error, RepositoryNotFoundError):
        return HubError(
            f"There is no kernel repository {repo_id} that you may see.",
            remedy="Check the name; a private repository needs a token that may read it.",
        )
    if status == 401:
        return HubError(
            f"Cannot {doing}: not logged in.{said}", remedy="Run `hf auth login`, or set HF_TOKEN."
        )
    if status == 403:
        return _forbidden(doing, repo_id, said)
    if status == 412:
        return HubError(
            f"Cannot {doing}: somebody else changed {repo_id} in the meantime.", remedy="Publish again."
        )
    if status == 429:
        return HubError(
            f"Cannot {doing}: the Hub's rate limit is reached.{said}", remedy="Try again in some minutes."
        )
    if status is not None and status >= 500:
        return HubError(
            f"Cannot {doing}: the Hub has a fault (status {status}).{said}", remedy="Try again later."
        )
    return HubError(
        f"Cannot {doing} (status {status}).{said}", remedy="Check the repository's name and your rights."
    )


def unfinished(repo_id: str, version: int | None = None) -> HubError:
    """A version's branch comes to be before its builds: an upload that was interrupted leaves it without any."""
    which = f"Version {version} of {repo_id}" if version is not None else f"This version of {repo_id}"
    return HubError(
        f"{which} holds no builds: its upload was not finished.",
        remedy="Publish it again, or name another version.",
    )


def _forbidden(doing: str, repo_id: str, said: str) -> HubError:
    """Why a token may not do it: it only reads, the namespace is not its owner's, or kernels need approval."""
    namespace = repo_id.split("/")[0]
    tokens_page = f"{endpoint()}/settings/tokens"
    who = _who()
    if who is None:
        return HubError(f"Cannot {doing}: forbidden.{said}", remedy="Use a token that may write there.")
    if who["role"] == "read":
        return HubError(
            f"Cannot {doing}: your token only reads.",
            remedy=f"Make one that may write at {tokens_page}, and log in with it.",
        )
    if namespace not in who["namespaces"]:
        return HubError(
            f"Cannot {doing}: {namespace} is neither you ({who['name']}) nor an organization that you belong to.",
            remedy=f"Publish as {who['name']}/{repo_id.split('/')[1]}, or ask {namespace} for the right to write.",
        )
    if namespace in who["only_reads"]:
        return HubError(
            f"Cannot {doing}: as a member of {namespace} you only read.{said}",
            remedy=f"Ask an admin of {namespace} for the right to write.",
        )
    if who["writes"] is not None and namespace not in who["writes"]:
        return HubError(
            f"Cannot {doing}: your fine-grained token may not write in {namespace}.{said}",
            remedy=f"Give it that right (write access to contents of repositories) at {tokens_page}.",
        )
    if not doing.startswith("create the repository"):
        return HubError(
            f"Cannot {doing}: the Hub refuses it to {who['name']}.{said}",
            remedy="Ask who owns the repository for the right to write.",
        )
    return HubError(
        f"Cannot {doing}: {namespace} may not create kernel repositories yet.{said}",
        remedy="The Hub approves kernel publishers: ask for it on your account's or organization's kernels page.",
    )


def _who() -> dict[str, Any] | None:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        answer = api().whoami()
    except (HfHubHTTPError, *transport_errors()):
        return None
    organizations = answer.get("orgs", [])
    token = answer.get("auth", {}).get("accessToken", {})
    scoped = token.get("fineGrained", {}).get("scoped", [])
    return {
        "name": answer["name"],
        "namespaces": [answer["name"], *(org["name"] for org in organizations)],
        "only_reads": [org["name"] for org in organizations if org.get("roleInOrg") == "read"],
        "role": token.get("role"),
        # Where a fine-grained token may write; None for other tokens, which may wherever their owner may.
        "writes": [
            s.get("entity", {}).get("name") for s in scoped if "repo.write" in s.get("permissions", [])
        ]
        if token.get("role") == "fineGrained"
        else None,
    }


def retrying(call: Callable[[], T]) -> T:
    """Make a call that may be made twice, again after rate limits and server faults.

    The last failure is raised as it came.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(RETRIES):
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else None
            if attempt == RETRIES - 1 or status not in (429, 500, 502, 503, 504):
                raise
            delay = _asked_delay(error) or FIRST_DELAY_S * 2**attempt
            logger.info("the Hub answers %s; trying again in %.0f s", status, delay)
            time.sleep(delay)
    raise AssertionError("unreachable")


def _asked_delay(error: Any) -> float | None:
    value = error.response.headers.get("Retry-After", "")
    return min(float(value), 60.0) if value.isdigit() else None


# --- reading a kernel repository ----------------------------------------------------------------------------------


def versions(repo_id: str) -> dict[int, str]:
    """The versions of a kernel repository and their commits: branches named v1, v2, ...

    Raises:
        HubError: The Hub does not answer, or has no such repository.
    """
    with friendly("read the repository", repo_id):
        refs = retrying(lambda: api().list_repo_refs(repo_id, repo_type="kernel"))
    found = {}
    for branch in refs.branches:
        match = re.fullmatch(r"v(\d+)", branch.name)
        if match is not None:
            found[int(match[1])] = str(branch.target_commit)
    return found


def newest_version(repo_id: str) -> int:
    """The newest version of a kernel repository.

    Raises:
        HubError: It has none.
    """
    found = versions(repo_id)
    if not found:
        raise HubError(
            f"{repo_id} has no version.",
            remedy="A kernel repository keeps its builds on branches v1, v2, ...",
        )
    return max(found)


def snapshot(
    repo_id: str, version: int, *, into: Path | None = None, patterns: tuple[str, ...] | None = ("build/**",)
) -> Path:
    """Download a version; nothing of it is run.

    Args:
        into: An empty folder for the files themselves; the user's Hub cache where not given.
        patterns: Which files; all of them where None.

    Returns:
        A folder with `build` in it.

    Raises:
        HubError: There is no such repository or version, or the Hub does not answer.
    """
    found = versions(repo_id)
    if version not in found:
        known = ", ".join(map(str, sorted(found))) or "none"
        raise HubError(f"{repo_id} has no version {version}.", remedy=f"It has: {known}.")
    with friendly("download the repository", repo_id):
        path = api().snapshot_download(
            repo_id,
            repo_type="kernel",
            revision=found[version],
            allow_patterns=list(patterns) if patterns is not None else None,
            ignore_patterns=list(BYTECODE),
            local_dir=str(into) if into is not None else None,
        )
    return Path(str(path))


# --- offline ------------------------------------------------------------------------------------------------------


def offline() -> bool:
    """Whether `HF_HUB_OFFLINE` was set when this process imported the Hub's client."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)


def remember(repo_id: str, version: int, variant: str) -> None:
    """Note in the cache which commit a version is, for the next time without a network; what is there stays.

    `kernels` downloads by commit and leaves no trace of the version that was asked for. A failure is only logged: the
    kernel is loaded.
    """
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api().snapshot_download(
            repo_id,
            repo_type="kernel",
            revision=f"v{version}",
            allow_patterns=[f"build/{variant}/*"],
            ignore_patterns=list(BYTECODE),
            cache_dir=str(_cache_folder()),
        )
    except (HfHubHTTPError, OSError, *transport_errors()) as error:
        logger.warning("%s will not load offline: %s", repo_id, error)


def cached(repo_id: str, version: int) -> Path:
    """The folder of a version that was loaded here before.

    Raises:
        HubError: It was not, or what is left of it is not whole.
    """
    from huggingface_hub.file_download import repo_folder_name

    folder = _cache_folder() / str(repo_folder_name(repo_id=repo_id, repo_type="kernel"))
    note = folder / "refs" / f"v{version}"
    remedy = f"Load version {version} once with a network; see docs/loading.md."
    if not note.is_file():
        raise HubError(
            f"{repo_id} version {version} is not in the cache, and HF_HUB_OFFLINE is set.", remedy=remedy
        )
    found: Path = folder / "snapshots" / note.read_text(encoding="utf-8").strip()
    problems = altered_files(found) if (found / "build").is_dir() else ["it has no build variant"]
    if problems:
        raise HubError(f"What the cache holds of {repo_id} is not whole: {problems[0]}.", remedy=remedy)
    return found
