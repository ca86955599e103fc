"""Load a kernel package with torch and `kernels` alone, and call its functions.

Run by path in a process of its own (`python -I check_child.py request.json`), never imported: the package must work
where this program is not installed, so its name is barred here.

The request names a folder or a Hub repository, a file of calls (`torch.save`) and where to answer. Each call names a
function, the operator schemas that it is meant for, and its arguments; a function with another schema is left alone.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.abc
import inspect
import json
import sys
import traceback
from pathlib import Path
from typing import Any

BARRED = "autokernel_hf"


class Bar(importlib.abc.MetaPathFinder):
    """Makes one package as good as not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == BARRED:
            raise ModuleNotFoundError(f"{name} is barred in this process", name=name)


def load(request: dict[str, Any]) -> Any:
    """The package's module."""
    from kernels import get_kernel, get_local_kernel

    refusals = []
    for backend in request["backends"]:
        try:
            if request["folder"] is not None:
                return get_local_kernel(Path(request["folder"]), backend=backend)
            repo_id, version = request["repo_id"], request["version"]
            return get_kernel(repo_id, version=version, backend=backend, trust_remote_code=True)
        except FileNotFoundError as error:
            refusals.append(error)
    # No variant is for this machine. One that needs no compiled code can still be run in Triton's interpreter.
    if request["fallback"] is None:
        raise refusals[0]
    return get_local_kernel(Path(request["fallback"]))


def variant_of(folder: Path) -> Path:
    """The variant that a module was imported from; older packages have it in a folder of their Python name in there."""
    return folder if (folder / "metadata.json").exists() else folder.parent


def where_to_run(folder: Path, gpu: bool) -> str | None:
    """The device on which a variant runs here; None where it is for GPUs, compiled, and there is none."""
    backend = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["backend"]["type"]
    if backend == "cpu":
        return "cpu"
    compiled = any(folder.rglob("*.so"))
    return "cuda" if gpu else None if compiled else "cpu"


def functions_of(module: Any) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    found = {name: getattr(module, name, None) for name in names}
    return {
        name: value
        for name, value in found.items()
        if callable(value)
        and not inspect.isclass(value)
        and not inspect.ismodule(value)
        and (home(value, module) is not None or getattr(value, "__module__", "").startswith("torch"))
    }


def home(value: Any, module: Any) -> str | None:
    """The name under which the part of a package that defines something was imported; None where it is not of it.

    A package may hold several kernels, each imported under a name of its own.
    """
    owner = getattr(value, "__module__", None) or module.__name__
    top = owner.partition(".")[0]
    file = getattr(sys.modules.get(owner), "__file__", None)
    folder = Path(module.__file__).parent
    return top if top == module.__name__ or (file and Path(file).is_relative_to(folder)) else None


def schema_of(module: Any, name: str) -> str | None:
    """The operator schema behind a function, without its namespace; `SymInt` and `int` are one here."""
    import torch

    namespace = home(getattr(module, name, None), module) or module.__name__
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return None
    return str(packet.default._schema).removeprefix(f"{namespace}::").replace("SymInt", "int")


def layers_of(module: Any) -> list[dict[str, Any]]:
    import torch

    layers = getattr(module, "layers", None)
    found = []
    for name, value in sorted(vars(layers).items()) if layers is not None else ():
        if not (inspect.isclass(value) and issubclass(value, torch.nn.Module)):
            continue
        if home(value, module) is None:
            continue
        extra = {n for n, _ in inspect.getmembers(value)} - {
            n for n, _ in inspect.getmembers(torch.nn.Module)
        }
        extra -= {"can_torch_compile", "has_backward"}
        problems = [f"has a member of its own, {n}: kernelize refuses it" for n in sorted(extra)]
        if value.__init__ is not torch.nn.Module.__init__:
            problems.append("has a constructor of its own: kernelize refuses it")
        found.append({"name": name, "problems": problems})
    return found


def run(module: Any, calls: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Call functions until each has succeeded `limit` times; what came out, on the CPU."""
    import torch

    functions = functions_of(module)
    done: dict[str, int] = {}
    outcomes = []
    for index, call in enumerate(calls):
        name = call["function"]
        if name not in functions or done.get(name, 0) >= limit:
            continue
        if schema_of(module, name) not in call["schemas"]:
            continue
        outcome: dict[str, Any] = {"call": index, "outputs": None, "refused": None, "error": None}
        try:
            with torch.no_grad():
                result = functions[name](**call["args"])
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            outcome["outputs"] = [t.detach().cpu() for t in outputs]
            done[name] = done.get(name, 0) + 1
        except NotImplementedError as error:
            outcome["refused"] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a package raises is a finding
            outcome["error"] = f"{type(error).__name__}: {error}"
        outcomes.append(outcome)
    return outcomes


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, Bar())
    sys.dont_write_bytecode = True
    report: dict[str, Any] = {"loaded": False, "error": None}
    answer = Path(request["report"])
    try:
        module = load(request)
    except Exception as error:  # noqa: BLE001 - whatever a package raises is a finding
        report["error"] = f"{type(error).__name__}: {error}"
        report["traceback"] = traceback.format_exc()
        answer.write_text(json.dumps(report), encoding="utf-8")
        return
    import torch

    folder = variant_of(Path(module.__file__).parent)
    device = where_to_run(folder, request["gpu"])
    report |= {
        "loaded": True,
        "device": device,
        "variant": folder.name,
        "id": module.__name__,
        "functions": [{"name": n, "schema": schema_of(module, n)} for n in sorted(functions_of(module))],
        "layers": layers_of(module),
        "digest": {
            file.relative_to(folder).as_posix(): base64.b64encode(
                hashlib.sha256(file.read_bytes()).digest()
            ).decode()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"
        },
    }
    # What is known by now is kept, should a call end the process.
    answer.write_text(json.dumps(report), encoding="utf-8")
    calls = torch.load(request["calls"], weights_only=True, map_location=device) if device else []
    torch.save(run(module, calls, request["limit"]), request["outcomes"])
    report["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == BARRED)
    answer.write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
