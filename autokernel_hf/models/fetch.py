"""Bring a model's files here and check them: from the Hub at a pinned revision, or from a folder as it is.

Weights are safetensors (or one GGUF file), never pickles: a pickle runs code as it is read.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from autokernel_hf.errors import HubError, ModelError, first_line

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_SMALL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

# The format's names of the dtypes that a model's weights come in.
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files on this machine.

    Args:
        path: The folder.
        revision: The Hub commit that they are, 40 hex digits; None for a local folder.
        weights: The safetensors files, checked; empty where only the configuration was wanted or the weights are GGUF.
        gguf: Name of the GGUF file that holds the weights.
        dtype: Dtype of the first floating tensor of the weights; None where unknown.
    """

    path: Path
    revision: str | None
    weights: tuple[Path, ...] = ()
    gguf: str | None = None
    dtype: str | None = None


# --- folders ------------------------------------------------------------------------------------------------------


def check_folder(
    path: Path, *, gguf: str | None = None, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """The checkpoint in a folder, its weights' files complete and whole.

    Raises:
        ModelError: A file is missing, damaged, or of a format that is not read.
    """
    if gguf is not None:
        with (path / gguf).open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(f"{path / gguf} is no GGUF file.", remedy="Download it again.")
        return Checkpoint(path=path, revision=revision, gguf=gguf)
    if not weights:
        return Checkpoint(path=path, revision=revision)
    files = _weight_files(path)
    dtypes = [dtype for file in files if (dtype := _check_safetensors(file)) is not None]
    return Checkpoint(path=path, revision=revision, weights=tuple(files), dtype=dtypes[0] if dtypes else None)


def _weight_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(
                f"{index} is damaged: its weight_map names no files.", remedy="Pull the model again."
            )
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (path / name).is_file()]
        if missing or not shards:
            raise ModelError(
                f"{path} lacks {missing[0] if missing else 'every file'} of the weights that its index names.",
                remedy="Pull the model again.",
            )
        return [path / name for name in shards]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(p.name for p in path.iterdir())
    if any(name.endswith(_PICKLES) for name in found):
        raise _no_safetensors(str(path))
    raise ModelError(
        f"{path} holds no weights ({_SINGLE}).",
        remedy="Give the folder of a whole model, or add --random-weights.",
    )


def _no_safetensors(where: str) -> ModelError:
    return ModelError(
        f"{where} has its weights only as pickles, which run code as they are read.",
        remedy="Use a revision with safetensors (often refs/pr/N of the same model), convert the weights with "
        "save_pretrained, or add --random-weights.",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}).", remedy="Pull the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.", remedy="Pull the model again.")
    return value


def _check_safetensors(path: Path) -> str | None:
    """Hold a safetensors file's size against its header; returns the dtype of its first floating tensor.

    Format: 8 bytes little-endian header length, JSON header with each tensor's `data_offsets`, then the data.
    Source: https://huggingface.co/docs/safetensors
    """
    size = path.stat().st_size
    damaged = ModelError(
        f"{path} is damaged: its {size} bytes do not match its header.",
        remedy="Delete the file and pull the model again.",
    )
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise damaged
        try:
            header = json.loads(file.read(length))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for entry in tensors), default=0)
            whole = 8 + length + end == size
            dtypes = [
                _SAFETENSORS_DTYPES.get(entry["dtype"]) for entry in tensors if math.prod(entry["shape"])
            ]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise damaged from error
    if not whole:
        raise damaged
    return next((dtype for dtype in dtypes if dtype is not None), None)


# --- the Hub ------------------------------------------------------------------------------------------------------


def fetch(
    repo_id: str, *, revision: str | None, weights: bool, code: bool, local_files_only: bool
) -> Checkpoint:
    """Download a model at one commit, or find it in the cache.

    Args:
        weights: Whether the weights are wanted, or the configuration alone.
        code: Whether the model's own Python files are wanted (remote code is trusted).

    Raises:
        HubError: The Hub refused, could not be reached, or has no such model or revision.
        ModelError: What the Hub has is no model that can be used.
    """
    if local_files_only or constants.HF_HUB_OFFLINE:
        with _told(repo_id, revision):
            path = _cached(repo_id, revision)
        if path is None:
            raise HubError(
                f"{repo_id}{f' at {revision}' if revision else ''} is not in the cache, and downloads are off.",
                remedy="Run once without --local-files-only and HF_HUB_OFFLINE.",
            )
        return _check_snapshot(path, weights)
    with _told(repo_id, revision):
        try:
            info = HfApi().model_info(repo_id, revision=revision)
        except HfHubHTTPError:
            raise
        except HTTPError as error:
            path = _cached(repo_id, revision)
            if path is None:
                raise
            logger.warning(
                "The Hub cannot be reached (%s): %s is used from the cache, at %s", error, repo_id, path.name
            )
            return _check_snapshot(path, weights)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        wanted, gguf = _wanted(repo_id, files, weights=weights, code=code)
        # By the name that was asked for, so that the cache knows it offline; the folder is named by the commit.
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=wanted))
    return check_folder(folder, gguf=gguf, revision=folder.name, weights=weights)


def _wanted(repo_id: str, files: Sequence[str], *, weights: bool, code: bool) -> tuple[list[str], str | None]:
    """The files to download, and the GGUF file among them if it holds the weights."""
    root = [name for name in files if "/" not in name]
    small = [name for name in root if name.endswith(_SMALL_FILES) or (code and name.endswith(".py"))]
    ggufs = [name for name in root if name.endswith(".gguf")]
    if "config.json" not in root and not ggufs:
        raise ModelError(
            f"{repo_id} has no config.json: it is no transformers model.",
            remedy="Name a model of the transformers library, or wrap it as file.py:ClassName.",
        )
    if not weights and "config.json" in root:
        return small, None
    shards = [name for name in root if name.startswith("model-") and name.endswith(".safetensors")]
    if _INDEX in root:
        return [*small, *shards], None
    if _SINGLE in root:
        return [*small, _SINGLE], None
    if len(ggufs) == 1:
        return [*small, *ggufs], ggufs[0]
    if ggufs:
        raise ModelError(
            f"{repo_id} has {len(ggufs)} GGUF files and no safetensors.",
            remedy=f"Download one (`hf download {repo_id} {ggufs[0]}`) and give its path.",
        )
    if any(name.endswith(_PICKLES) for name in root):
        raise _no_safetensors(repo_id)
    raise ModelError(f"{repo_id} has no weights.", remedy="Name another model, or add --random-weights.")


def _cached(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot folder in the cache, named by its commit; a finished `config.json` or GGUF file tells that it is there."""
    found = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    if isinstance(found, str):
        return Path(found).parent
    # A repository of GGUF files need have no config.json: the files hold it, under names that only the folder tells.
    repo = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")
    name = revision or constants.DEFAULT_REVISION
    ref = repo / "refs" / name
    snapshot = repo / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else name)
    return snapshot if any(file.exists() for file in snapshot.glob("*.gguf")) else None


def _check_snapshot(path: Path, weights: bool) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    has_safetensors = (path / _SINGLE).exists() or (path / _INDEX).exists()
    wanted = weights or not (path / "config.json").exists()
    gguf = ggufs[0].name if wanted and len(ggufs) == 1 and not has_safetensors else None
    return check_folder(path, gguf=gguf, revision=path.name, weights=weights)


@contextmanager
def _told(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what the Hub's client raises into an error with a remedy."""
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{repo_id} is gated, and the Hub does not let this account read it.",
            remedy=f"Accept its terms at {constants.ENDPOINT}/{repo_id}, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(
            f"{repo_id} has no revision {revision!r}.",
            remedy="Give a branch, a tag or a full commit of that model.",
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"The Hub has no model {repo_id!r}, or it is private.",
            remedy="Check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except HFValidationError as error:
        raise ModelError(
            f"{repo_id!r} is no folder here and cannot be the id of a Hub model.",
            remedy="Give a Hub id (owner/name), a folder in Hub layout, or file.py:ClassName.",
        ) from error
    except (EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise HubError(
            f"{repo_id} could not be downloaded ({error}).", remedy="Check the network and try again."
        ) from error
    except HfHubHTTPError as error:
        raise HubError(
            f"The Hub refused {repo_id}: {first_line(error)}",
            remedy="Try again later, or with another token.",
        ) from error
    except HTTPError as error:
        raise HubError(
            f"The Hub at {constants.ENDPOINT} cannot be reached ({error}).",
            remedy="Check the network, or use a local folder, a cached model with --local-files-only, or --random-weights.",
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise HubError(
            f"{repo_id} could not be written to the cache ({error.strerror or error}).",
            remedy=f"{'Free some space' if full else 'Check the permissions'} in {constants.HF_HUB_CACHE}, "
            "or set HF_HOME to another disk.",
        ) from error
