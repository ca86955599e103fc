"""What a MODEL argument names: an architecture that ships with the package, a folder, a Hub id, or a user's module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from autokernel_hf.errors import ModelError, UsageError
from autokernel_hf.records import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
ALIASES = {"gpt2": "openai-community/gpt2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """An architecture whose configuration ships with the package; its weights are always random."""

    name: str

    @property
    def config_file(self) -> Path:
        return CONFIGS / f"{self.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A local folder in Hub layout, with the GGUF file in it that holds the weights, if that is what it has."""

    path: Path
    gguf: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModule:
    """A class of a user's own file."""

    path: Path
    class_name: str


Source: TypeAlias = Bundled | Folder | HubModel | UserModule


def bundled_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def source_of(spec: ModelSpec) -> Source:
    """Tell which kind of model a spec names, by looking at the file system but not at the network.

    Raises:
        ModelError: It names a file or folder that is not there or holds no model.
        UsageError: A revision is asked of something that has none.
    """
    found = _source_of(spec)
    if spec.revision is not None and not isinstance(found, HubModel):
        what = "comes with this program" if isinstance(found, Bundled) else "is read from this machine"
        raise UsageError(
            f"{spec.model} {what}: it has no revision {spec.revision!r}.",
            remedy="Leave --revision away, or name a model of the Hub.",
        )
    return found


def _source_of(spec: ModelSpec) -> Source:
    text = spec.model
    file, colon, class_name = text.rpartition(":")
    if colon and file.endswith(".py"):
        path = _path(file)
        if not path.is_file():
            raise ModelError(
                f"There is no file {file}.", remedy="Give the path of a Python file as file.py:ClassName."
            )
        if not class_name.isidentifier():
            raise ModelError(f"{class_name!r} is not a class name.", remedy="Give file.py:ClassName.")
        return UserModule(path=path.resolve(), class_name=class_name)
    if text.endswith(".py"):
        raise ModelError(f"{text} names no class.", remedy=f"Say which: {text}:ClassName.")
    path = _path(text)
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"There is no file {text}.", remedy="Give the path of a GGUF file that exists.")
        return Folder(path=path.resolve().parent, gguf=path.name)
    if path.is_dir():
        folder = _folder(path.resolve())
        if folder is not None:
            return folder
    if text.startswith((".", "/", "~")):
        what = f"The folder {text} does not exist."
        if path.is_dir():
            what = f"The folder {text} holds neither a config.json nor a GGUF file."
        elif path.exists():
            what = f"{text} is a file, and no model that is read from one."
        raise ModelError(what, remedy="Give a folder in Hub layout, or the id of a Hub model.")
    name = {hub_id: alias for alias, hub_id in ALIASES.items()}.get(text, text)
    if name in bundled_names():
        if spec.random_weights:
            return Bundled(name=name)
        if name not in ALIASES:
            raise ModelError(
                f"{name!r} is an architecture that ships without weights.",
                remedy="Add --random-weights, or name a model of the Hub.",
            )
    return HubModel(id=ALIASES.get(text, text))


def _path(text: str) -> Path:
    """A path as typed, `~` being the home of whoever it names; as it stands where there is no such account."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _folder(path: Path) -> Folder | None:
    if (path / "config.json").is_file():
        return Folder(path=path)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files.", remedy=f"Name one of them, such as {files[0]}."
        )
    return Folder(path=path, gguf=files[0].name) if files else None
