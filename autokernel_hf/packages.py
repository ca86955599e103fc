"""The Kernel Hub's package format: names, variants, metadata, digests, and what must not be inside.

    <package>/README.md                          the card, and media/ with its picture
    <package>/build/<variant>/metadata.json      who this variant is
    <package>/build/<variant>/__init__.py        imported under `metadata.id`, whatever the folder is called

Nothing here imports or runs anything of a package.
"""

from __future__ import annotations

import ast
import base64
import getpass
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autokernel_hf.elf import dynamic, gpu_code
from autokernel_hf.errors import PackageError, UsageError

MAX_VERSION = 9999  # a count of interfaces that were promised, not a date or a build number
PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
BYTECODE = ("*.pyc", "**/__pycache__/**")

_NAME = re.compile(r"[a-z][a-z0-9-]*[a-z0-9]")
_ID = re.compile(r"[A-Za-z_]\w*")
_CUDA_ARCH = re.compile(r"\d+\.\d[af]?(\+PTX)?")
_NOARCH = re.compile(r"torch-(cann|cpu|cuda|metal|neuron|rocm|tpu|xpu)")
# The loader also takes cu13 (as CUDA 1.3) and torch-foo; a package with such a folder works nowhere.
_COMPILED = re.compile(
    r"(?:torch-stable-abi\d\d+|torch\d\d+(?:-cxx11|-cxx98)?|tvm-ffi\d\d+)"
    r"-(cpu|metal|neuron|tpu|cu\d{3,}|rocm\d{2,}|xpu\d{5}|cann\d{2,})"
    r"-(?:x86_64|aarch64|arm64|amd64)-(?:linux|darwin|windows)"
)


class BackendOf(BaseModel):
    model_config = ConfigDict(frozen=True)
    type: str
    archs: tuple[str, ...] | None = None


class DigestOf(BaseModel):
    model_config = ConfigDict(frozen=True)
    algorithm: str
    files: dict[str, str]


class Metadata(BaseModel):
    """`metadata.json`, as far as it matters here; other people's packages may hold more."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    name: str
    id: str
    version: int
    license: str
    python_depends: tuple[str, ...] = Field(alias="python-depends")
    backend: BackendOf
    digest: DigestOf | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One `build/<variant>` folder."""

    path: Path
    metadata: Metadata

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def libraries(self) -> tuple[Path, ...]:
        return tuple(sorted(self.path.rglob("*.so")))


# --- reading ------------------------------------------------------------------------------------------------------


def is_name(name: str) -> bool:
    """Whether the Kernel Hub takes this as a kernel's name."""
    return _NAME.fullmatch(name) is not None


def check_version(version: int) -> None:
    """Raises UsageError where this is no version: it names a branch of the repository, and callers write it by hand."""
    if not 1 <= version <= MAX_VERSION:
        raise UsageError(
            f"{version} is no version of a kernel: it counts the interfaces that were promised, from 1 to {MAX_VERSION}.",
            remedy="Use the next whole number after the last published one; 1 for a new kernel.",
        )


def is_variant(name: str) -> bool:
    return _NOARCH.fullmatch(name) is not None or _COMPILED.fullmatch(name) is not None


def is_noarch(name: str) -> bool:
    """Whether a variant's name is one without compiled code: `torch-cuda`."""
    return _NOARCH.fullmatch(name) is not None


def backend_of_variant(name: str) -> str:
    """The backend type that a variant's name stands for: `torch-stable-abi211-cu130-x86_64-linux` is `cuda`."""
    match = _NOARCH.fullmatch(name) or _COMPILED.fullmatch(name)
    if match is None:
        raise PackageError(f"{name!r} is not the name of a build variant.")
    word = re.match(r"[a-z]+", match[1])
    assert word is not None
    return {"cu": "cuda"}.get(word[0], word[0])


def build_folder(package: Path) -> Path:
    """The folder of a package that holds its variants.

    Raises:
        PackageError: There is none.
    """
    if not package.is_dir():
        raise PackageError(
            f"{package} is not a folder.", remedy="Give the folder that holds the package's `build`."
        )
    build = package / "build"
    if not build.is_dir():
        raise PackageError(
            f"{package} is not a kernel package: it has no `build` folder.",
            remedy="`autokernel-hf export` makes one.",
        )
    return build


def read_variant(path: Path) -> Variant:
    """Read a variant's metadata.

    Raises:
        PackageError: It is missing or does not say what the loader needs.
    """
    file = path / "metadata.json"
    try:
        metadata = Metadata.model_validate_json(file.read_bytes())
    except OSError as error:
        raise PackageError(f"{path.name} has no readable metadata.json ({error.strerror}).") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PackageError(f"{path.name}/metadata.json: {where}: {first['msg']}.") from error
    return Variant(path=path, metadata=metadata)


def read_variants(package: Path) -> tuple[Variant, ...]:
    """All variants of a package, by name.

    Raises:
        PackageError: There is none, or one cannot be read.
    """
    folders = sorted(p for p in build_folder(package).iterdir() if p.is_dir())
    if not folders:
        raise PackageError(f"{package} has no build variant.")
    return tuple(read_variant(folder) for folder in folders)


def digest(variant: Path) -> dict[str, str]:
    """SHA-256 of every file of a variant, base64, as metadata.json records it (which itself is left out)."""
    return {
        path: base64_sha256(file.read_bytes())
        for path, file in files_of(variant)
        if path not in ("metadata.json", "metadata.json.sigstore")
    }


def git_blob_id(content: bytes) -> str:
    """The name by which Git, and so a Hub, knows a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def base64_sha256(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file of a folder with its relative path, in order, without bytecode."""
    for file in sorted(folder.rglob("*")):
        path = file.relative_to(folder)
        if file.suffix == ".pyc" or "__pycache__" in path.parts or not (file.is_file() or file.is_symlink()):
            continue
        yield path.as_posix(), file


def exported_names(variant: Path) -> tuple[str, ...]:
    """`__all__` of a variant, read without importing it; empty where there is none."""
    tree = parse_module(variant / "__init__.py")
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            try:
                return tuple(ast.literal_eval(node.value))
            except ValueError:
                return ()
    return ()


def parts(variant: Path) -> tuple[Path, ...]:
    """The folders of a variant that hold one kernel each: the variant itself, unless it is a bundle."""
    inner = tuple(sorted(ops.parent for ops in variant.glob("*/_ops.py")))
    return inner if inner and not (variant / "_ops.py").exists() else (variant,)


def part_of(variant: Path, function: str) -> Path:
    """The folder of a variant that defines a function; the variant itself where none says so."""
    return next((part for part in parts(variant) if function in exported_names(part)), variant)


def has_gradients(part: Path) -> bool:
    """Whether a folder that holds one kernel of ours also holds that of its gradients."""
    return (part / "_ops.py").exists() and any(part.glob("*_backward_*/_ops.py"))


def layer_names(variant: Path) -> tuple[str, ...]:
    """Classes of a variant's `layers.py` (or `layers/__init__.py`) that derive from a Module, without importing it."""
    inner = parts(variant)
    if inner != (variant,):
        return tuple(name for part in inner for name in layer_names(part))
    for place in (variant / "layers.py", variant / "layers" / "__init__.py"):
        tree = parse_module(place)
        if tree is not None:
            return tuple(
                node.name
                for node in tree.body
                if isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(b) for b in node.bases)
            )
    return ()


def domain(variant: Path) -> dict[str, tuple[str, ...]]:
    """What a kernel of ours supports: dtypes, and words of narrowed arguments; empty for other people's packages.

    Args:
        variant: The folder that holds the kernel (`part_of`).
    """
    tree = parse_module(variant / "_ops.py")
    for node in tree.body if tree else ():
        if (
            isinstance(node, ast.Assign)
            and [ast.unparse(t) for t in node.targets] == ["_DOMAIN"]
            and isinstance(node.value, ast.Constant)
        ):
            parts = (part.partition(":") for part in str(node.value.value).split(";"))
            return {name.strip(): tuple(w.strip() for w in words.split(",")) for name, _, words in parts}
    return {}


def layer_words(variant: Path, function: str) -> dict[str, tuple[str, ...]]:
    """The words (constant strings) with which each layer of a variant calls a function, without importing it."""
    tree = parse_module(variant / "layers.py")
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body if tree else ():
        if not isinstance(node, ast.ClassDef):
            continue
        calls = [
            call
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == function
        ]
        values = [value for call in calls for value in (*call.args, *(k.value for k in call.keywords))]
        found[node.name] = tuple(
            v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)
        )
    return found


def usable_layers(variant: Path, function: str) -> tuple[str, ...]:
    """The layers of a function whose calls lie in its domain (the layers of a type ship whole, the domain may be less)."""
    variant = part_of(variant, function)
    words = {word for name, listed in domain(variant).items() if name != "dtype" for word in listed}
    called = layer_words(variant, function)
    return tuple(
        name
        for name in layer_names(variant)
        if not words or all(word in words for word in called.get(name, ()))
    )


def configs(variant: Path) -> list[dict[str, Any]]:
    """The entries of a variant's `configs.json`: other values of constants, by device and shape; empty without one.

    Raises:
        PackageError: It is there and cannot be read.
    """
    file = variant / "configs.json"
    if not file.exists():
        return []
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["configs"]
    except (ValueError, KeyError, TypeError) as error:
        raise PackageError(f"{variant.name}/configs.json cannot be read ({error}).") from error
    return entries


def parse_module(file: Path) -> ast.Module | None:
    """A Python file's syntax tree; None where there is no such file, or it is not Python."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


# --- judging without running --------------------------------------------------------------------------------------


def inspect(package: Path) -> list[str]:
    """What is wrong with a package, as far as one can tell without running it; empty where nothing is.

    Raises:
        PackageError: It is no package at all.
    """
    problems: list[str] = []
    for folder in sorted(p for p in build_folder(package).iterdir() if p.is_dir()):
        try:
            variant = read_variant(folder)
        except PackageError as error:
            problems.append(error.message)
            continue
        problems += [f"{folder.name}: {problem}" for problem in inspect_variant(variant)]
    problems += [f"{path} leads out of the package" for path in escaping_links(package)]
    if not any(build_folder(package).iterdir()):
        problems.append("there is no build variant")
    return problems


def inspect_variant(variant: Variant) -> list[str]:
    """What is wrong with one variant."""
    metadata = variant.metadata
    problems = []
    if not is_variant(variant.name):
        problems.append("not the name of a build variant: it would load nowhere")
    elif backend_of_variant(variant.name) != metadata.backend.type:
        problems.append(f"metadata says backend {metadata.backend.type}, the folder's name says otherwise")
    if not is_name(metadata.name):
        problems.append(f"{metadata.name!r} is not a valid kernel name")
    if _ID.fullmatch(metadata.id) is None:
        problems.append(f"id {metadata.id!r} is not an identifier")
    if metadata.backend.type == "cuda":
        bad = [arch for arch in metadata.backend.archs or () if _CUDA_ARCH.fullmatch(arch) is None]
        problems += [f"arch {arch!r} is not a compute capability such as 9.0 or 9.0a" for arch in bad]
        problems += [
            f"{library.name}: {problem}"
            for library in variant.libraries
            for problem in _missing_code(library, [a for a in metadata.backend.archs or () if a not in bad])
        ]
    python_name = metadata.name.replace("-", "_")
    if not any((variant.path / p / "__init__.py").is_file() for p in ("", python_name)):
        problems.append("there is no __init__.py to import")
    if metadata.digest is not None:
        problems += _digest_problems(metadata.digest, variant.path)
    bytecode = [file for file in sorted(variant.path.rglob("*.pyc")) if not _left_by_loading(file)]
    if bytecode:
        problems.append(f"holds bytecode ({bytecode[0].name})")
    for library in variant.libraries:
        problems += [f"{library.name}: {problem}" for problem in abi_problems(library)]
    return problems


def _left_by_loading(bytecode: Path) -> bool:
    """Whether Python wrote this beside its source when the package was loaded from this folder.

    Nothing here takes such files along: neither `check`, which runs a copy without them, nor `publish`.
    """
    source = bytecode.parent.parent / f"{bytecode.name.partition('.')[0]}.py"
    return bytecode.parent.name == "__pycache__" and source.is_file()


def _missing_code(library: Path, archs: Sequence[str]) -> list[str]:
    """Architectures that metadata promises and a library with GPU code has no code for."""
    code = gpu_code(library)
    if not (code.machine or code.ptx):
        return []  # no fat binary: its kernels are of another kind, such as Triton's
    there = ", ".join([*code.machine, *(f"{c} as PTX" for c in code.ptx)])
    return [
        f"metadata promises {arch}, but there is no code for it (there is {there})"
        for arch in archs
        if not code.runs(arch)
    ]


def altered_files(package: Path) -> list[str]:
    """Files of a package that are not what its digests say, or are missing; of variants without a digest, nothing."""
    return [
        f"{variant.name}: {problem}"
        for variant in read_variants(package)
        if variant.metadata.digest is not None
        for problem in _digest_problems(variant.metadata.digest, variant.path)
    ]


def _digest_problems(recorded: DigestOf, variant: Path) -> list[str]:
    if recorded.algorithm != "sha256":
        return [f"digest algorithm {recorded.algorithm} is not known"]
    actual = digest(variant)
    problems = [f"{path} is missing" for path in recorded.files if path not in actual]
    problems += [f"{path} is not in the digest" for path in actual if path not in recorded.files]
    problems += [
        f"{path} is not what was built (digest differs)"
        for path, value in actual.items()
        if recorded.files.get(path, value) != value
    ]
    return problems


def escaping_links(package: Path) -> list[str]:
    """Links of a package that lead out of it (a Hub cache's own links, into its blobs, do not count)."""
    root = package.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    found = []
    for path in sorted(package.rglob("*")):
        if path.is_symlink() and not any(path.resolve().is_relative_to(allowed) for allowed in roots):
            found.append(path.relative_to(package).as_posix())
    return found


def abi_problems(library: Path) -> list[str]:
    """Why a shared object would not load on systems that the Kernel Hub promises: Python 3.9, manylinux_2_28."""
    import kernel_abi_check

    try:
        checked = kernel_abi_check.ObjectFile(library)
        symbols = [*checked.check_python_abi(PYTHON_ABI), *checked.check_manylinux(MANYLINUX)]
        paths = dynamic(library).search_paths
    except (OSError, ValueError, PackageError) as error:
        return [f"cannot be read as a shared object ({error})"]
    problems = [f"needs {symbol}, newer than Python {PYTHON_ABI} or {MANYLINUX}" for symbol in symbols]
    problems += [
        f"searches libraries in {path!r}, a folder of the machine that built it" for path in paths if path
    ]
    return problems


# --- nothing private ----------------------------------------------------------------------------------------------

_TOKENS = {
    "a Hugging Face token": re.compile(rb"\bhf_[A-Za-z0-9]{20,}"),
    "an API key": re.compile(rb"\b(?:sk|rk)-[A-Za-z0-9_-]{20,}"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})"),
    "an AWS key": re.compile(rb"\bAKIA[0-9A-Z]{16}\b"),
    "a private key": re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
}
_HOMES = re.compile(rb"(?<![\w.-])(?:/home/|/Users/|/root/|[A-Z]:\\Users\\)[\w.-]+")
# Account names that say nothing about a person, and words that occur in any source.
_COMMON_NAMES = frozenset(
    {
        "root",
        "user",
        "users",
        "admin",
        "ubuntu",
        "debian",
        "test",
        "tester",
        "runner",
        "build",
        "builder",
        "kernel",
        "kernels",
        "python",
        "torch",
        "local",
        "localhost",
        "home",
        "work",
        "data",
        "docker",
        "main",
        "cuda",
        "triton",
        "agent",
    }
)


def private_strings(package: Path) -> list[str]:
    """Local paths, user and host names, and tokens inside a package's files, libraries included."""
    needles = _local_needles()
    found = []
    for path, file in files_of(package):
        data = file.read_bytes()
        for what, pattern in _TOKENS.items():
            if pattern.search(data):
                found.append(f"{path} holds {what}")
        home = _HOMES.search(data)
        if home is not None:
            found.append(f"{path} holds the local path {home[0].decode(errors='replace')}")
        for what, pattern in needles:
            if pattern.search(data):
                found.append(f"{path} holds {what}")
    return found


def _local_needles() -> list[tuple[str, re.Pattern[bytes]]]:
    """This machine's own paths and names, as patterns."""
    import huggingface_hub

    folders = {str(Path.home()), str(Path.cwd()), sys.prefix}
    folders |= {
        os.environ[v] for v in ("HF_HOME", "AUTOKERNEL_HF_CACHE", "XDG_CACHE_HOME") if os.environ.get(v)
    }
    needles = [
        (
            f"the local path {folder}",
            re.compile(rb"(?<![\w.-])" + re.escape(folder.encode()) + rb"(?=[/\\\"'\s:\0]|$)"),
        )
        for folder in sorted(folders)
        # A shared system folder tells nothing about its owner.
        if len(Path(folder).parts) > 1 and folder not in ("/usr", "/usr/local", "/opt", "/tmp")
    ]
    temporary = re.escape(tempfile.gettempdir().encode())
    needles.append(("the path of a temporary file here", re.compile(temporary + rb"/[\w.-]+/")))
    for what, name in (("the user name", _user_name()), ("the host name", socket.gethostname())):
        if len(name) >= 4 and name.lower() not in _COMMON_NAMES:
            needles.append((f"{what} {name}", re.compile(rb"\b" + re.escape(name.encode()) + rb"\b")))
    token = huggingface_hub.get_token()
    if token:
        needles.append(("your Hub token", re.compile(re.escape(token.encode()))))
    return needles


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without an entry in the password file
        return ""


# --- writing ------------------------------------------------------------------------------------------------------


def write_metadata(
    variant: Path,
    *,
    name: str,
    id: str,
    version: int,
    license: str,
    backend: str,
    archs: tuple[str, ...] | None,
) -> Metadata:
    """Write a variant's metadata.json, with the digest of the files that are there."""
    described: dict[str, object] = {"type": backend}
    if archs:
        described["archs"] = list(archs)
    content = {
        "name": name,
        "id": id,
        "version": version,
        "license": license,
        "python-depends": [],
        "backend": described,
        "digest": {"algorithm": "sha256", "files": digest(variant)},
    }
    (variant / "metadata.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return read_variant(variant).metadata
