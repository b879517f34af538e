# SPDX-License-Identifier: Apache-2.0
"""All that kvtier calls and reads of vLLM's private interface, and a comparison with the installed vLLM."""

from __future__ import annotations

import dis
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import yaml


@dataclass(frozen=True, slots=True)
class Use:
    """Names of one module or class. A method is written as it is called: ``lookup(key, context)``.

    A parameter or a name with a question mark is absent in some supported release.
    """

    owner: str
    """``package.module`` or ``package.module:Class``."""
    names: str
    """Functions and methods that kvtier calls, with the arguments, ``__init__`` for a constructor; then attributes."""

    @property
    def called(self) -> list[str]:
        return re.findall(r"\w+\([^)]*\)", self.names)

    @property
    def read(self) -> list[str]:
        return re.sub(r"\w+\([^)]*\)", "", self.names).split()

    def differences(self) -> Iterator[str]:
        module_name, _, class_name = self.owner.partition(":")
        owner: Any = importlib.import_module(module_name)
        if class_name and (owner := getattr(owner, class_name, None)) is None:
            yield f"{module_name} has no {class_name}"
            return
        shown = self.owner.rpartition(".")[2].replace(":", ".")
        for written in self.called:
            yield from _mismatch(shown, owner, _Call.parse(written))
        known = names_of(owner) if self.read else set()
        yield from (f"{shown} has no {name}" for name in self.read if name not in known and name[-1] != "?")


class _Call(NamedTuple):
    name: str
    parameters: tuple[str, ...]
    optional: frozenset[str]

    @classmethod
    def parse(cls, written: str) -> _Call:
        name, inside = re.fullmatch(r"(\w+)\((.*)\)", written).groups()  # type: ignore[union-attr]  # ours
        words = [word.strip() for word in inside.split(",") if word.strip()]
        return cls(name, tuple(w.rstrip("?") for w in words), frozenset(w[:-1] for w in words if w.endswith("?")))


def _mismatch(shown: str, owner: Any, call: _Call) -> Iterator[str]:
    function = getattr(owner, call.name, None)
    if not callable(function):
        yield f"{shown} has no {call.name}"
        return
    parameters = list(inspect.signature(function).parameters.values())
    # A function taken from the class has `self` as its first parameter; a class method is bound already.
    if isinstance(owner, type) and not inspect.ismethod(function):
        is_static = isinstance(inspect.getattr_static(owner, call.name), staticmethod)
        parameters = parameters if is_static else parameters[1:]
    named = [each for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    theirs = [each.name for each in named]
    lacking = [name for name in call.parameters if name not in theirs and name not in call.optional]
    surplus = [each.name for each in named if each.default is each.empty and each.name not in call.parameters]
    in_order = [name for name in call.parameters if name in theirs]
    if lacking or surplus or in_order != [name for name in theirs if name in call.parameters]:
        yield f"{shown}.{call.name} takes ({', '.join(theirs)}), and we know ({', '.join(call.parameters)})"


def names_of(owner: Any) -> set[str]:
    """Return the attributes of a module or class, and of what a class sets on its instances."""
    names = set(dir(owner))
    if is_dataclass(owner):
        names.update(field.name for field in fields(owner))
    if isinstance(owner, type):
        for base in owner.__mro__:
            names.update(getattr(base, "__annotations__", ()))
            for method in ("__init__", "__post_init__"):
                names.update(_set_by(vars(base).get(method)))
    return names


def _set_by(method: Any) -> Iterator[str]:
    if isinstance(method := inspect.unwrap(method) if callable(method) else method, FunctionType):
        yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


_SURFACE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def _use(owner: str, names: str) -> Use:
    package, _, rest = owner.partition(".")
    return Use(f"{_SURFACE['packages'].get(package, package)}.{rest}", names)


USES = tuple(_use(owner, names) for owner, names in _SURFACE["uses"].items())
