"""What a notebook may be given: the names and types in its cell tagged `parameters`.

papermill only warns when it is given a name that the notebook does not declare, and injects any
value under any name. A sweep over a misspelt parameter would then run to its end and measure
nothing, so labkit refuses before the kernel starts.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from labkit.errors import ParameterError

#: Names of types that an annotation in the parameters cell may use.
_TYPES: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "tuple": list,
    "dict": dict,
    "None": type(None),
}


@dataclass(frozen=True)
class Parameter:
    """One assignment of the parameters cell.

    `types` holds what a value may be; it is empty where the cell does not tell (a default of None
    without an annotation, or an expression), and then anything goes.
    """

    name: str
    default: Any
    types: frozenset[type]

    def describe(self) -> str:
        """The types in words, such as "int or None"."""
        names = sorted("None" if t is type(None) else t.__name__ for t in self.types)
        return " or ".join(sorted(names, key=lambda name: name == "None")) or "any value"


def declared_parameters(source: str, notebook: str) -> dict[str, Parameter]:
    """Parameters that the `parameters` cell with this `source` declares, by name, in its order.

    Raises `ParameterError` when the cell is not plain Python; `notebook` names it in the message.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ParameterError(
            f"{notebook}: the cell tagged `parameters` is not plain Python (line {error.lineno}: "
            f"{error.msg}). It may only hold assignments such as `cache_mib = 64`."
        ) from error
    found: dict[str, Parameter] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            types = _annotated_types(node.annotation)
            found[node.target.id] = _parameter(node.target.id, node.value, types)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = _parameter(target.id, node.value, None)
    return found


def checked(
    given: Mapping[str, Any], declared: Mapping[str, Parameter], notebook: str
) -> dict[str, Any]:
    """`given` with plain values for papermill, or `ParameterError` naming what does not fit."""
    for name in given:
        if name not in declared:
            raise ParameterError(_unknown(name, declared, notebook))
    return {name: _fitted(value, declared[name], notebook) for name, value in given.items()}


def from_text(name: str, text: str, declared: Mapping[str, Parameter], notebook: str) -> Any:
    """The value that `text` of a command line means for the parameter `name`.

    A parameter that may be a string takes the text as it is. Others take numbers, true/false,
    none, and lists and dicts as JSON. Raises `ParameterError` for an unknown name or a bad value.
    """
    if name not in declared:
        raise ParameterError(_unknown(name, declared, notebook))
    parameter = declared[name]
    if type(None) in parameter.types and text.lower() in ("none", "null"):
        return None
    if str in parameter.types:
        return text
    value = _parsed(text)
    if isinstance(value, str) and parameter.types:
        raise _misfit(repr(text), parameter, notebook)
    return value


def _parsed(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parameter(name: str, value: ast.expr, types: frozenset[type] | None) -> Parameter:
    try:
        default = ast.literal_eval(value)
    except ValueError:
        return Parameter(name, None, types or frozenset())
    if types is None:
        kind = list if isinstance(default, tuple) else type(default)
        types = frozenset() if default is None else frozenset({kind})
    return Parameter(name, default, types)


def _annotated_types(annotation: ast.expr) -> frozenset[type]:
    """Types of `int`, `float | None`, `list[int]`; empty for an annotation that says more."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _annotated_types(annotation.left), _annotated_types(annotation.right)
        return left | right if left and right else frozenset()
    if isinstance(annotation, ast.Subscript):
        return _annotated_types(annotation.value)
    name = ast.unparse(annotation)
    return frozenset({_TYPES[name]}) if name in _TYPES else frozenset()


def _fitted(value: Any, parameter: Parameter, notebook: str) -> Any:
    value = _plain(value)
    if not parameter.types or type(value) in parameter.types:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and float in parameter.types:
        return value
    raise _misfit(repr(value), parameter, notebook)


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    return value


def _misfit(value: str, parameter: Parameter, notebook: str) -> ParameterError:
    return ParameterError(
        f"{notebook}: parameter `{parameter.name}` takes {parameter.describe()} "
        f"(its default is {parameter.default!r}), not {value}. Nothing was run."
    )


def _unknown(name: str, declared: Mapping[str, Parameter], notebook: str) -> str:
    if not declared:
        return (
            f"{notebook} declares no parameters, so it cannot take `{name}`. A notebook declares "
            "them in a cell with the tag `parameters`. Nothing was run."
        )
    near = difflib.get_close_matches(name, declared, n=1, cutoff=0.0)[0]
    return (
        f"{notebook} has no parameter `{name}`. The nearest is `{near}`; it declares: "
        f"{', '.join(declared)}. Nothing was run."
    )
