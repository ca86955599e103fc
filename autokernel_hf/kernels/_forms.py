"""What a module's forward computes, read from its source: so that `find` need not trust a class's name.

Model families define the same norm or MLP anew in each modeling file, and others define something else under the same
name. A forward that is one expression has one canonical spelling here, whatever its local variables are called; a
site is taken only where that spelling is a known one.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


class _NotAnExpressionError(Exception):
    """The source is more than assignments and a return."""


def forward_form(cls: type[nn.Module]) -> str | None:
    """The canonical spelling of what `cls.forward` returns, or None where it is not one expression of its arguments.

    Arguments are called x0, x1, ...; local names are replaced by what they stand for, also where an `if` without an
    `else` gives them another value (a conditional expression then); own methods are inlined; modules are spelled in full (`torch.nn.functional`); the factors of a product are in alphabetical order, which
    changes no bit of it.
    """
    if cls not in _FORMS:
        try:
            _FORMS[cls] = ast.unparse(_method(cls, cls.forward))
        except _NotAnExpressionError:
            _FORMS[cls] = None
    return _FORMS[cls]


_FORMS: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()


def form(source: str) -> str:
    """The canonical spelling of a forward given as text, with `torch` as its only global.

    Raises:
        ValueError: It is not one expression of its arguments.
    """
    try:
        return ast.unparse(_expression(_parse(source), {"torch": torch}, None))
    except _NotAnExpressionError as error:
        raise ValueError(f"not one expression ({error}): {source}") from error


def _method(cls: type[nn.Module], function: Any) -> ast.expr:
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        raise _NotAnExpressionError("not a Python function")
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError) as error:
        raise _NotAnExpressionError("no source") from error
    return _expression(_parse(source), plain.__globals__, cls)


def _parse(source: str) -> ast.FunctionDef:
    try:
        statement = ast.parse(textwrap.dedent(source)).body[0]
    except SyntaxError as error:
        raise _NotAnExpressionError("not a statement of its own") from error
    if not isinstance(statement, ast.FunctionDef):
        raise _NotAnExpressionError("not a function definition")
    return statement


def _expression(function: ast.FunctionDef, names: Mapping[str, Any], cls: type[nn.Module] | None) -> ast.expr:
    arguments = function.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise _NotAnExpressionError("arguments with defaults or of unknown number")
    own, *others = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    known: dict[str, ast.expr] = {own: ast.Name("self", ast.Load())}
    known.update({name: ast.Name(f"x{i}", ast.Load()) for i, name in enumerate(others)})
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            if statement is not function.body[-1]:
                raise _NotAnExpressionError("code after a return")
            result: ast.expr = _Substitute(known, names, cls).visit(statement.value)
            return result
        if isinstance(statement, ast.If):
            known |= _conditional(statement, known, names, cls)
        else:
            known |= _assigned(statement, known, names, cls)
    raise _NotAnExpressionError("no return")


def _assigned(
    statement: ast.stmt,
    known: Mapping[str, ast.expr],
    names: Mapping[str, Any],
    cls: type[nn.Module] | None,
) -> dict[str, ast.expr]:
    """What an assignment gives its names to stand for."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise _NotAnExpressionError(f"a statement {type(statement).__name__}")
    value: ast.expr = _Substitute(known, names, cls).visit(statement.value)
    target = statement.targets[0]
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple) and all(isinstance(part, ast.Name) for part in target.elts):
        return {
            part.id: ast.Subscript(value, ast.Constant(i), ast.Load())
            for i, part in enumerate(target.elts)
            if isinstance(part, ast.Name)
        }
    raise _NotAnExpressionError("an assignment to something else than names")


def _conditional(
    statement: ast.If, known: Mapping[str, ast.expr], names: Mapping[str, Any], cls: type[nn.Module] | None
) -> dict[str, ast.expr]:
    """What names stand for after an `if` that gives some of them another value."""
    if statement.orelse:
        raise _NotAnExpressionError("an else")
    test: ast.expr = _Substitute(known, names, cls).visit(statement.test)
    inside: dict[str, ast.expr] = {}
    for step in statement.body:
        inside |= _assigned(step, {**known, **inside}, names, cls)
    if any(name not in known for name in inside):
        raise _NotAnExpressionError("a name that only an if gives a value")
    return {name: ast.IfExp(copy.deepcopy(test), value, known[name]) for name, value in inside.items()}


# These bind names of their own, or do not compute once.
_BINDERS = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
)


class _Substitute(ast.NodeTransformer):
    """Replaces names by what they stand for and calls of own methods by their bodies."""

    def __init__(
        self, known: Mapping[str, ast.expr], names: Mapping[str, Any], cls: type[nn.Module] | None
    ) -> None:
        self._known, self._names, self._class = known, names, cls

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _BINDERS):
            raise _NotAnExpressionError(f"a {type(node).__name__}")
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._known:
            return copy.deepcopy(self._known[node.id])
        value = self._names.get(node.id)
        if isinstance(value, ModuleType):
            return ast.parse(value.__name__, mode="eval").body
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "self"
            and isinstance(method := getattr(self._class, function.attr, None), FunctionType)
        ):
            assert self._class is not None
            return self._inlined(_method(self._class, method), node)
        return node

    def _inlined(self, body: ast.expr, call: ast.Call) -> ast.expr:
        if call.keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
            raise _NotAnExpressionError("a method called with keywords")
        arguments = {f"x{i}": argument for i, argument in enumerate(call.args)}
        inlined: ast.expr = _Substitute(arguments, {}, None).visit(body)
        return inlined

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult):
            node.left, node.right = sorted((node.left, node.right), key=ast.unparse)
        return node
