"""How a site of a model is replaced by a layer, and put back: the one mechanism that profile, verify and hub use.

Three kinds of site:

- `module`: the layer's forward is bound to the module instance, as `kernelize` does; the module keeps its weights.
- `function`: an attribute of a Python module (transformers' rotary embedding, say). It is often an `nn.Module` instance
  made by a `kernels` decorator; it is replaced by a plain function all the same, since model code only calls it.
- `attention`: an entry of transformers' attention functions.

The last two belong to the process, not to a model: while they are replaced, every model of that family runs the
replacement. All replacements are plain functions that torch.compile can trace.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeAlias

from torch import nn

from autokernel_hf.errors import ModelError, PackageError
from autokernel_hf.kernels import kernel_type as kernel_type_of
from autokernel_hf.kernels import kernel_types, layers_source
from autokernel_hf.records import Site

logger = logging.getLogger(__name__)

Layers: TypeAlias = Mapping[str, ModuleType] | Callable[[Site], ModuleType]
"""Where a site's layer class comes from: a module of layer classes for each kernel type, or for each site."""

_MARK = "_autokernel_replaced"  # on a module whose forward is replaced: the name of its layer
_RESTORE = "Restore the first replacement before making another."


# --- layer classes ------------------------------------------------------------------------------------------------

_numbers = itertools.count()


def load_layers(kernel_type: str, function: Callable[..., Any], *, compilable: bool = True) -> ModuleType:
    """The layer classes of a kernel type, calling `function` where a package would call its kernel.

    Args:
        function: Called as the kernel is: schema arguments, returns a tensor or a tuple.
        compilable: Whether torch.compile will see them: it looks modules up by the name in a function's globals, so
            that they stay in `sys.modules` for good.

    Raises:
        PackageError: The type has no layers.
    """
    package = f"_autokernel_layers_{kernel_type}_{next(_numbers)}"
    ops, layers = ModuleType(f"{package}._ops"), ModuleType(f"{package}.layers")
    setattr(ops, kernel_type, function)
    layers.__package__ = package
    code = _code_of_layers(kernel_type)
    # `from ._ops import ...` in the source finds these.
    entries = {package: ModuleType(package), ops.__name__: ops, layers.__name__: layers}
    sys.modules.update(entries)
    try:
        exec(code, layers.__dict__)
    finally:
        if not compilable:
            for name in entries:
                del sys.modules[name]
    return layers


@functools.cache
def _code_of_layers(kernel_type: str) -> CodeType:
    source = layers_source(kernel_type)
    if source is None:
        raise PackageError(f"The kernel type {kernel_type} replaces nothing in a model: it has no layers.")
    file = Path(__file__).parent / "kernels" / "layers" / f"{kernel_type}.py"
    return compile(source, str(file), "exec")


def rebound(layers: ModuleType, kernel_type: str, function: Callable[..., Any]) -> ModuleType:
    """The same layer classes, calling `function` where `layers` calls its kernel; `layers` itself stays as it is.

    Raises:
        PackageError: The classes do not call a function of the type's name.
    """
    if not callable(getattr(layers, kernel_type, None)):
        raise PackageError(f"The layers in {layers.__name__} do not call a function {kernel_type}.")
    copy = ModuleType(layers.__name__)
    names = vars(copy)
    names.update(vars(layers))
    for name, value in vars(layers).items():
        if isinstance(value, FunctionType):
            names[name] = _with_globals(value, vars(layers), names)
        elif isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == layers.__name__:
            methods = {n: v for n, v in vars(value).items() if isinstance(v, FunctionType)}
            changed = {n: _with_globals(v, vars(layers), names) for n, v in methods.items()}
            names[name] = type(name, (value,), changed)
    names[kernel_type] = function
    return copy


def _with_globals(function: FunctionType, old: dict[str, Any], new: dict[str, Any]) -> FunctionType:
    """A function of the module with globals `old`, looking its names up in `new`; others stay as they are."""
    if function.__globals__ is not old:
        return function
    copy = FunctionType(
        function.__code__, new, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def layer_class(layers: ModuleType, site: Site) -> type[nn.Module]:
    """The class that replaces a site.

    Raises:
        PackageError: The layers have no such class.
    """
    known = _classes(layers)
    if site.layer not in known:
        raise PackageError(
            f"{layers.__name__} has no layer {site.layer}, which {site.name} needs.",
            remedy=f"It has {', '.join(known) or 'none'}.",
        )
    return known[site.layer]


def _classes(layers: ModuleType) -> dict[str, type[nn.Module]]:
    return {n: v for n, v in vars(layers).items() if isinstance(v, type) and issubclass(v, nn.Module)}


def all_sites(model: nn.Module, type_names: Sequence[str] | None = None) -> list[Site]:
    """All sites of a model that a layer of some kernel type can replace.

    Args:
        type_names: The kernel types to look for; all of them if None.
    """
    names = list(kernel_types()) if type_names is None else type_names
    return [site for name in names for site in kernel_type_of(name).find(model)]


# --- places -------------------------------------------------------------------------------------------------------


class _Place(Protocol):
    """Where one replacement goes."""

    @property
    def name(self) -> str: ...
    def attach(self) -> None: ...
    def detach(self) -> bool:
        """Put the original back; False where something else had been put on top meanwhile."""
        ...


class _InModule:
    def __init__(self, site: Site, model: nn.Module, layer: type[nn.Module]) -> None:
        try:
            self._module = model.get_submodule(site.path)
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__} has no module {site.path}.",
                remedy="The sites are those of another model.",
            ) from error
        self.name = site.name
        self._label = layer.__qualname__
        self._replacement = MethodType(layer.forward, self._module)
        self._original: Any = None

    def attach(self) -> None:
        members = vars(self._module)
        if _MARK in members:
            raise ModelError(f"{self.name} is already replaced, by {members[_MARK]}.", remedy=_RESTORE)
        self._original = members.get("forward")
        members["forward"] = self._replacement
        members[_MARK] = self._label

    def detach(self) -> bool:
        members = vars(self._module)
        untouched = members.get("forward") is self._replacement
        if self._original is None:
            members.pop("forward", None)
        else:
            members["forward"] = self._original
        members.pop(_MARK, None)
        return untouched


class _Holder(Protocol):
    """A place that belongs to the process."""

    def get(self) -> Any: ...
    def set(self, value: Any) -> None: ...


class _Attribute:
    def __init__(self, site: Site) -> None:
        module_name, _, attribute = site.path.partition(":")
        try:
            self._module = importlib.import_module(module_name)
            getattr(self._module, attribute)
        except (ImportError, AttributeError) as error:
            raise ModelError(
                f"There is no function {site.path}.", remedy="The sites are those of another model."
            ) from error
        self._attribute = attribute

    def get(self) -> Any:
        return getattr(self._module, self._attribute)

    def set(self, value: Any) -> None:
        setattr(self._module, self._attribute, value)


_ABSENT: Any = object()


class _AttentionEntry:
    """An entry of the mapping that all of transformers' modeling files share; `eager` is absent from it by default."""

    def __init__(self, site: Site) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._entries = ALL_ATTENTION_FUNCTIONS._global_mapping
        self._key = site.path

    def get(self) -> Any:
        return self._entries.get(self._key, _ABSENT)

    def set(self, value: Any) -> None:
        if value is _ABSENT:
            self._entries.pop(self._key, None)
        else:
            self._entries[self._key] = value


@dataclass(slots=True)
class _Shared:
    """A process-wide replacement: it can serve several models at once, if all ask for the same layer."""

    layer: type[nn.Module]
    original: Any
    replacement: Any
    users: int = 0


_shared: dict[str, _Shared] = {}


class _InProcess:
    def __init__(self, site: Site, holder: _Holder, layer: type[nn.Module]) -> None:
        self.name = site.name
        self._key = f"{site.attach}:{site.path}"
        self._holder = holder
        self._layer = layer
        self._replacement = _as_function(layer, holder.get())

    def attach(self) -> None:
        entry = _shared.get(self._key)
        if entry is None:
            entry = _Shared(self._layer, self._holder.get(), self._replacement)
            _shared[self._key] = entry
            self._holder.set(entry.replacement)
        elif entry.layer is not self._layer:
            raise ModelError(
                f"{self.name} is already replaced, by {entry.layer.__qualname__}.", remedy=_RESTORE
            )
        entry.users += 1

    def detach(self) -> bool:
        entry = _shared[self._key]
        entry.users -= 1
        if entry.users:
            return True
        del _shared[self._key]
        untouched = self._holder.get() is entry.replacement
        self._holder.set(entry.original)
        return untouched


def _as_function(layer: type[nn.Module], original: Any) -> Callable[..., Any]:
    """A plain function that runs a stateless layer; torch.compile traces through it."""
    forward, instance = layer.forward, layer()

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return forward(instance, *args, **kwargs)

    replacement.__name__ = getattr(original, "__name__", layer.__name__)
    return replacement


def _place(site: Site, model: nn.Module, layer: type[nn.Module]) -> _Place:
    if site.attach == "module":
        return _InModule(site, model, layer)
    holder: _Holder = _Attribute(site) if site.attach == "function" else _AttentionEntry(site)
    return _InProcess(site, holder, layer)


# --- patches ------------------------------------------------------------------------------------------------------


class Patch:
    """Replacements of some sites of a model, made once, and put in place and taken out any number of times.

    The replacing functions stay the same objects throughout, so that what torch.compile made of a patched model stays
    valid from one application to the next.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], layers: Layers) -> None:
        """Resolve everything; nothing is replaced yet.

        Raises:
            ModelError: A site is not in the model.
            PackageError: A layer class is missing.
        """
        self.sites = tuple(sites)
        self._places: list[_Place] = []
        for site in self.sites:
            source = layers(site) if callable(layers) else layers.get(site.kernel_type)
            if source is None:
                raise PackageError(
                    f"There are no layers of type {site.kernel_type}, which {site.name} needs."
                )
            self._places.append(_place(site, model, layer_class(source, site)))
        self.applied = False

    def apply(self) -> Patch:
        """Put all replacements in place, or none.

        Raises:
            ModelError: A site is replaced already.
        """
        if self.applied:
            raise ModelError("This patch is applied already.", remedy=_RESTORE)
        done: list[_Place] = []
        try:
            for place in self._places:
                place.attach()
                done.append(place)
        except BaseException:
            for place in reversed(done):
                place.detach()
            raise
        self.applied = True
        return self

    def restore(self) -> None:
        """Put all originals back; a patch that is not applied stays so.

        Raises:
            ModelError: A site had been changed again while it was replaced. The originals are back all the same.
        """
        if not self.applied:
            return
        self.applied = False
        changed = [place.name for place in reversed(self._places) if not place.detach()]
        if changed:
            raise ModelError(
                f"{', '.join(changed)} was changed while a kernel was in its place; what was there before is back.",
                remedy="Let nothing else replace the same functions meanwhile.",
            )

    def __enter__(self) -> Patch:
        return self.apply()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.restore()
        except ModelError as conflict:
            if error is None:
                raise
            logger.warning("%s", conflict)  # the error that ended the block matters more


def apply_sites(model: nn.Module, sites: Sequence[Site], layers: Layers) -> Patch:
    """Replace sites of a model by layers until `restore_sites`.

    Raises:
        ModelError: A site is not in the model, or is replaced already.
        PackageError: A layer class is missing.
    """
    return Patch(model, sites, layers).apply()


def restore_sites(patch: Patch) -> None:
    """Undo `apply_sites`: every site has the very object it had before."""
    patch.restore()


@contextmanager
def patched(model: nn.Module, sites: Sequence[Site], layers: Layers) -> Iterator[Patch]:
    """Replace sites of a model by layers inside the block; see `apply_sites`."""
    with Patch(model, sites, layers) as patch:
        yield patch
