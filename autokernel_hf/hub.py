"""Publish packages to the Kernel Hub, and use published ones."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from autokernel_hf import interface, packages, signing
from autokernel_hf.card import repo_placeholder
from autokernel_hf.check import LoadError, load_fresh, loading_backends
from autokernel_hf.errors import HubError, PackageError, UsageError
from autokernel_hf.hub_client import (
    api,
    cached,
    check_repo_id,
    endpoint,
    friendly,
    is_repo_id,
    need_kernel_uploads,
    newest_version,
    offline,
    refuse_broken_telemetry,
    remember,
    retrying,
    sends_by_xet,
    snapshot,
    token,
    unfinished,
    versions,
)
from autokernel_hf.kernels import kernel_types
from autokernel_hf.kernels.base import DTYPE_NAMES
from autokernel_hf.patch import Patch, apply_sites, restore_sites
from autokernel_hf.records import Package, Published, Site

logger = logging.getLogger(__name__)

# What a package keeps beside its builds; on the Hub it stands on the main branch with the card.
SOURCE_FOLDERS = ("torch-ext", "src", "sources", "tests", "benchmarks", "media")
SOURCE_FILES = ("README.md", "build.toml")


# --- publish ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What goes where: contents by path, for the version's branch and for main."""

    branch: Mapping[str, bytes]
    main: Mapping[str, bytes]
    variants: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({*self.branch, *self.main}))


def publish(
    package: Package | Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    message: str | None = None,
    version: int | None = None,
    sign: bool = False,
    trust_config: Path | None = None,
) -> Published:
    """Upload a package to a kernel repository, then load it back from there in a fresh process.

    All of it goes to the branch `v<version>`, each variant in place of what it held before; other variants and other
    versions stay. The card and the sources of the newest version also go to `main`. Publishing again after an
    interruption goes on where it stopped; publishing what is there already changes nothing. A version that is there
    keeps its functions and layers: what would break its callers is refused.

    Args:
        repo_id: `namespace/name`; created where it does not exist.
        private: Make a new repository private. An existing public one is refused.
        dry_run: Only list the files; nothing is sent, and no token is needed.
        message: The commit message.
        version: The version to publish as, where it is not the package's own.
        sign: Put a sigstore bundle beside the metadata of every variant.
        trust_config: A sigstore of one's own to sign with.

    Raises:
        UsageError: `repo_id` is not a valid name.
        PackageError: The package is damaged, incomplete, or holds something private; or it changes the interface of the
            version that is there; or it cannot be signed.
        HubError: The Hub refuses or cannot be reached; or what it serves is not what was uploaded.
    """
    folder = Path(package.path if isinstance(package, Package) else package)
    check_repo_id(repo_id)
    if version is not None:
        packages.check_version(version)
    own_version, wanted = _inspected(folder, version)
    plan = _plan(folder, repo_id, own_version, wanted)
    url = f"{endpoint()}/kernels/{repo_id}"
    if dry_run:
        return Published(
            repo_id=repo_id, url=url, version=wanted, revision=None, files=plan.files, loaded=False
        )
    need_kernel_uploads()
    token()
    client = api()
    branch = f"v{wanted}"
    with friendly("create the repository", repo_id):
        info = _found_or_created(client, repo_id, private)
    if private and info.private is False:
        raise HubError(
            f"{repo_id} exists and is public.",
            remedy="Choose another name, make it private on its page, or publish without --private.",
        )
    known = versions(repo_id)
    if wanted in known:
        _refuse_broken_promise(folder, repo_id, wanted, max(known) + 1)
    if sign:
        # Last of all that may fail before something is sent: a signature is in a public log for good.
        plan = _signed(plan, trust_config)
    with friendly(f"create the branch {branch}", repo_id):
        retrying(lambda: client.create_branch(repo_id, repo_type="kernel", branch=branch, exist_ok=True))
    title = message or f"Build {folder.name} with autokernel_hf"
    sources = [f"{name}/" for name in SOURCE_FOLDERS]
    builds = [f"build/{variant}/" for variant in plan.variants]
    revision = _commit(client, repo_id, branch, plan.branch, [*builds, *sources], title)
    if wanted >= max(known, default=0):
        _commit(client, repo_id, "main", plan.main, sources, title)
    loaded = _load_back(repo_id, wanted, plan)
    return Published(
        repo_id=repo_id, url=url, version=wanted, revision=revision, files=plan.files, loaded=loaded
    )


def _found_or_created(client: Any, repo_id: str, private: bool) -> Any:
    """What the Hub says of a repository, which is only created where there is none: the right to create is a special one."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return retrying(lambda: client.repo_info(repo_id, repo_type="kernel"))
    except RepositoryNotFoundError:
        retrying(
            lambda: client.create_repo(repo_id, repo_type="kernel", private=private or None, exist_ok=True)
        )
    return retrying(lambda: client.repo_info(repo_id, repo_type="kernel"))


def _inspected(folder: Path, version: int | None) -> tuple[int, int]:
    """The package's own version and the one to publish, once nothing is wrong with the package."""
    problems = packages.inspect(folder)
    if problems:
        raise PackageError(
            f"{folder} cannot be published: {problems[0]}{_and_more(problems)}.",
            remedy="Export it again; `autokernel-hf check` lists all problems.",
        )
    variants = packages.read_variants(folder)
    own = {v.metadata.version for v in variants}
    if len(own) != 1 or len({v.metadata.name for v in variants}) != 1:
        raise PackageError(
            f"The variants of {folder} have different names or versions.", remedy="Export it again."
        )
    if not (folder / "README.md").is_file():
        raise PackageError(f"{folder} has no card (README.md).", remedy="Export it again, or write one.")
    private = packages.private_strings(folder)
    if private:
        raise PackageError(
            f"{folder} holds something private: {private[0]}{_and_more(private)}.",
            remedy="Remove it; a file of `build` must be built again without it.",
        )
    (package_version,) = own
    return package_version, version if version is not None else package_version


def _and_more(items: Sequence[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _refuse_broken_promise(folder: Path, repo_id: str, version: int, next_version: int) -> None:
    """Refuse to replace a version by a package that its callers could not use as they do now."""
    mine = {variant.name: variant.path for variant in packages.read_variants(folder)}
    first = next(iter(mine.values()))
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-there-") as temporary:
        there = snapshot(repo_id, version, into=Path(temporary), patterns=("build/*.py",)) / "build"
        changes = [
            change
            for variant in (sorted(there.iterdir()) if there.is_dir() else ())
            for change in interface.breaking_changes(variant, mine.get(variant.name, first))
        ]
    if changes:
        raise PackageError(
            f"Version {version} of {repo_id} promises another interface: {changes[0]}{_and_more(changes)}.",
            remedy=f"Publish this as a new version: --version {next_version}. The old one stays.",
        )


def _plan(folder: Path, repo_id: str, own_version: int, version: int) -> _Plan:
    branch: dict[str, bytes] = {}
    main: dict[str, bytes] = {}
    for path, file in packages.files_of(folder):
        content = file.read_bytes()
        top = path.partition("/")[0]
        if top == "build":
            if path.endswith(f"/{signing.BUNDLE}") and version != own_version:
                continue  # a signature of other bytes
            if path.endswith(f"/{signing.SIGNED}") and version != own_version:
                content = _with_version(content, version)
            branch[path] = content
        elif top in SOURCE_FOLDERS or path in SOURCE_FILES:
            if path == "README.md":
                content = _addressed(content.decode(), folder, repo_id, own_version, version).encode()
            main[path] = branch[path] = content
    variants = tuple(sorted({path.split("/")[1] for path in branch if path.startswith("build/")}))
    return _Plan(branch=branch, main=main, variants=variants)


def _signed(plan: _Plan, trust_config: Path | None) -> _Plan:
    """A plan with a signature of every variant's metadata."""
    documents = {path: data for path, data in plan.branch.items() if path.endswith(f"/{signing.SIGNED}")}
    bundles = signing.sign(documents, trust_config)
    found = {path.removesuffix(signing.SIGNED) + signing.BUNDLE: data for path, data in bundles.items()}
    return replace(plan, branch={**plan.branch, **found})


def _with_version(metadata: bytes, version: int) -> bytes:
    return (json.dumps({**json.loads(metadata), "version": version}, indent=2) + "\n").encode()


def _addressed(card: str, folder: Path, repo_id: str, own_version: int, version: int) -> str:
    """The card with the repository's name and version in its code, so that it runs as printed."""
    name = packages.read_variants(folder)[0].metadata.name
    text = card.replace(repo_placeholder(name), repo_id)
    return re.sub(rf"\bversion={own_version}\b", f"version={version}", text)


def _commit(
    client: Any, repo_id: str, branch: str, contents: Mapping[str, bytes], owned: Sequence[str], title: str
) -> str:
    """One commit that makes the owned folders hold exactly `contents`; the branch's head after it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with friendly(f"upload to {branch}", repo_id):
        tree = retrying(
            lambda: list(client.list_repo_tree(repo_id, repo_type="kernel", revision=branch, recursive=True))
        )
        there = {item.path: item.blob_id for item in tree if hasattr(item, "blob_id")}
        stale = [
            path
            for path in there
            if path not in contents
            and path.startswith(tuple(owned))
            and not _still_signs(path, there, contents)
        ]
        # The client sends what it is given as a stream without Xet.
        given = bytes if retrying(lambda: sends_by_xet(repo_id, branch)) else io.BytesIO
        # The operations are made anew for each try: the client marks them as used.
        commit = retrying(
            lambda: client.create_commit(
                repo_id,
                repo_type="kernel",
                revision=branch,
                commit_message=title,
                operations=[
                    *(CommitOperationAdd(path, given(data)) for path, data in sorted(contents.items())),
                    *(CommitOperationDelete(path) for path in stale),
                ],
            )
        )
    return str(commit.oid)


def _still_signs(path: str, there: Mapping[str, str], contents: Mapping[str, bytes]) -> bool:
    """Whether a file on the Hub is the signature of metadata that stays as it is."""
    if not path.endswith(f"/{signing.BUNDLE}"):
        return False
    signed = path.removesuffix(signing.BUNDLE) + signing.SIGNED
    content = contents.get(signed)
    return content is not None and there.get(signed) == packages.git_blob_id(content)


def _load_back(repo_id: str, version: int, plan: _Plan) -> bool:
    """Download what was published, hold it against what was uploaded, and load it in a fresh process.

    Returns:
        Whether it loaded here; False where no variant is for this machine, or its functions fail.

    Raises:
        HubError: The Hub serves other bytes.
    """
    with tempfile.TemporaryDirectory(prefix="autokernel_hf-published-") as temporary:
        served = snapshot(repo_id, version, into=Path(temporary) / "files")
        for path, content in plan.branch.items():
            if path.startswith("build/") and _read(served / path) != content:
                raise HubError(
                    f"{repo_id} serves another {path} than was uploaded.",
                    remedy="Publish again; if it stays so, tell the Hub's support.",
                )
        try:
            loaded = load_fresh(served, repo_id=repo_id, version=version, cache=Path(temporary) / "cache")
        except LoadError as error:
            logger.warning("%s is published, but was not loaded back: %s", repo_id, error)
            return False
        prefix = f"build/{loaded.variant}/"
        for path, content in plan.branch.items():
            if path.startswith(prefix) and loaded.digest.get(
                path.removeprefix(prefix)
            ) != packages.base64_sha256(content):
                raise HubError(
                    f"The fresh process loaded another {path} than was uploaded.", remedy="Publish again."
                )
    for problem in loaded.problems:
        logger.warning("%s: %s", repo_id, problem)
    return not loaded.problems


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


# --- load ---------------------------------------------------------------------------------------------------------


def load(
    name_or_folder: str | Path,
    *,
    version: int | None = None,
    trust_remote_code: bool = False,
    backend: str | None = None,
) -> ModuleType:
    """A kernel package's module: `kernels.get_kernel`, or `kernels.get_local_kernel` for a folder.

    What was loaded once loads again under `HF_HUB_OFFLINE=1`, which `kernels` 0.17 alone does not manage.

    Args:
        version: The version of a Hub repository; needed there, of no meaning for a folder.
        trust_remote_code: Whether code of publishers whom the Hub does not list as trusted may run.
        backend: "cpu", or what torch was built for ("cuda", "rocm"). Where not given: what torch was built for, else,
            where the package has nothing for that, "cpu".

    Raises:
        PackageError: No variant is for this machine, or the package is damaged.
        HubError: The Hub does not answer, has no such repository or version, or its publisher is not trusted.
        UsageError: Neither a folder nor a repository, or a repository without a version.
    """
    import kernels

    backends = loading_backends() if backend is None else [backend]
    folder = Path(name_or_folder)
    with contextlib.suppress(RuntimeError):  # "~" and an account that is not there
        folder = folder.expanduser()
    if folder.is_dir():
        with _loading(str(name_or_folder)):
            return _for_first(backends, lambda b: kernels.get_local_kernel(folder.resolve(), backend=b))
    repo_id = str(name_or_folder)
    if not is_repo_id(repo_id):
        raise UsageError(f"There is no folder {name_or_folder}.", remedy="Give a folder, or namespace/name.")
    refuse_broken_telemetry()
    if version is None:
        raise UsageError(
            f"Which version of {repo_id}?", remedy=f"Say version={newest_version(repo_id)}, its newest one."
        )
    redirected = f"{repo_id}=" in os.environ.get("LOCAL_KERNELS", "")
    if offline() and not redirected:
        cached_folder = cached(repo_id, version)
        if not trust_remote_code:
            raise HubError(
                f"Offline, nobody can tell whether the publisher of {repo_id} is trusted.",
                remedy="If you trust its code, say trust_remote_code=True (--trust-remote-code).",
            )
        with _loading(repo_id):
            return _for_first(backends, lambda b: kernels.get_local_kernel(cached_folder, backend=b))
    with _loading(repo_id), friendly("load the kernel", repo_id):
        loaded = _for_first(
            backends,
            lambda b: kernels.get_kernel(
                repo_id, version=version, backend=b, trust_remote_code=trust_remote_code
            ),
        )
    if not redirected:
        remember(repo_id, version, Path(str(loaded.__file__)).parent.name)
    return loaded


def _for_first(backends: Sequence[str | None], load: Callable[[str | None], ModuleType]) -> ModuleType:
    """A module for the first backend that a package has a variant for.

    Raises:
        FileNotFoundError: It has none; the loader's words on the first.
    """
    refusals = []
    for backend in backends:
        try:
            return load(backend)
        except FileNotFoundError as error:
            refusals.append(error)
    raise refusals[0]


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn what the loader raises into one sentence and a remedy."""
    try:
        yield
    except FileNotFoundError as error:
        if "torch" not in str(error).partition("\n")[2]:
            raise PackageError(
                f"{name} is no kernel package: no folder of it is a build variant.",
                remedy="Give the folder that `autokernel-hf export` wrote.",
            ) from error
        raise PackageError(
            f"{name} has no variant for this machine.\n{error}",
            remedy="It lists above what it has, and why each was refused.",
        ) from error
    except ImportError as error:
        raise PackageError(
            f"{name} does not load: {error}.", remedy="`autokernel-hf check` looks into it."
        ) from error
    except ValueError as error:
        words = str(error)
        if "trust" in words:
            raise HubError(
                f"The publisher of {name} is not on the Hub's list of trusted ones.",
                remedy="Read its code; if you trust it, say trust_remote_code=True (--trust-remote-code).",
            ) from error
        if "available versions" in words or "not available in the local cache" in words:
            raise HubError(f"{name}: {words}", remedy="Say another version.") from error
        raise PackageError(f"{name} does not load: {words}") from error


def download(repo_id: str, *, version: int | None = None, folder: Path) -> Path:
    """A version of a kernel repository in a folder: builds, sources and card. Nothing of it is run.

    Raises:
        HubError: There is no such repository or version, or the Hub does not answer.
    """
    version = version if version is not None else newest_version(repo_id)
    files = snapshot(repo_id, version, into=folder, patterns=None)
    if not (files / "build").is_dir():
        raise unfinished(repo_id, version)
    return files


# --- apply --------------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)

_applied: weakref.WeakKeyDictionary[nn.Module, list[Patch]] = weakref.WeakKeyDictionary()


def apply(
    model: M, name_or_folder: str | Path, *, version: int | None = None, trust_remote_code: bool = False
) -> M:
    """Replace every place of a model that a package's layers fit, in this process, until `restore`.

    Args:
        model: In eval mode; it is changed and returned.
        name_or_folder, version, trust_remote_code: As for `load`.

    Raises:
        PackageError: Nothing was replaced; the message says why.
        ModelError: A place is replaced already.
        UsageError: The model is in training mode, and the package has no backward.
    """
    module = load(
        name_or_folder, version=version, trust_remote_code=trust_remote_code, backend=_backend_of(model)
    )
    variant = Path(str(module.__file__)).parent
    layers = getattr(module, "layers", None)
    names = [name for name in packages.exported_names(variant) if name in kernel_types()]
    if layers is None or not names:
        raise PackageError(
            f"{name_or_folder} has no layers of a kernel type that this program knows.",
            remedy="Use its functions, or kernels.kernelize with a mapping of your own.",
        )
    if model.training and not all(
        getattr(getattr(layers, layer), "has_backward", True) for layer in packages.layer_names(variant)
    ):
        raise UsageError(
            "The model is in training mode, and this package has no backward.", remedy="Call model.eval()."
        )
    fitting: list[Site] = []
    passed_over: list[str] = []
    for name in names:
        usable = packages.usable_layers(variant, name)
        dtypes = packages.domain(packages.part_of(variant, name)).get("dtype", ())
        for site in kernel_types()[name].find(model):
            dtype = _dtype_at(model, site)
            if site.layer not in usable:
                passed_over.append(f"{site.name} needs {site.layer}")
            elif dtypes and dtype is not None and dtype not in dtypes:
                passed_over.append(f"{site.name} runs in {dtype}")
            else:
                fitting.append(site)
    if not fitting:
        told = f": {passed_over[0]}{_and_more(passed_over)}" if passed_over else ""
        raise PackageError(
            f"Nothing in this {type(model).__name__} fits {name_or_folder}{told}.",
            remedy=f"It replaces {_domains_text(variant, names)}.",
        )
    if passed_over:
        logger.warning("left as they are: %s%s", passed_over[0], _and_more(passed_over))
    _applied.setdefault(model, []).append(apply_sites(model, fitting, dict.fromkeys(names, layers)))
    logger.info("%s replaces %d places of %s", name_or_folder, len(fitting), type(model).__name__)
    return model


def restore(model: M) -> M:
    """Undo every `apply` on a model; one that was never changed stays as it is."""
    for patch in reversed(_applied.pop(model, [])):
        restore_sites(patch)
    return model


def _backend_of(model: nn.Module) -> str | None:
    """What a model needs a kernel for, by where its first parameter is; None for what torch was built for."""
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is not None and parameter.device.type == "cpu" else None


def _dtype_at(model: nn.Module, site: Site) -> str | None:
    """The dtype of a site's own weights, else of the model's; None without any."""
    places = [model.get_submodule(site.path)] if site.attach == "module" else []
    for place in (*places, model):
        for parameter in place.parameters():
            if parameter.is_floating_point():
                return DTYPE_NAMES.get(parameter.dtype)
    return None


def _domains_text(variant: Path, names: Sequence[str]) -> str:
    """What a package replaces: each function with its domain."""
    told = []
    for name in names:
        domain = packages.domain(packages.part_of(variant, name))
        words = "; ".join(f"{key}: {', '.join(values)}" for key, values in domain.items()) or "any"
        told.append(f"{name} ({words})")
    return ", ".join(told)
