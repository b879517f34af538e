# SPDX-License-Identifier: Apache-2.0
"""Holds what is relied on of modules and classes of somebody else against what they are: names and parameters.

Nothing is imported before the question is asked, and an answer never raises.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Reliance:
    """What is needed of one module or class. Methods are written as they are called: ``lookup(key, context)``.

    A parameter or a name with a question mark may be there or not.
    """

    owner: str
    """``package.module`` or ``package.module:Class``."""
    overridden: tuple[str, ...] = ()
    """Methods that a derived class replaces, with every parameter that may be passed, in order."""
    called: tuple[str, ...] = ()
    """Functions and methods that are called, with what is passed; ``__init__`` for what is constructed."""
    read: tuple[str, ...] = ()
    """Names of the module or class, and of what it sets on its instances."""

    def differences(self) -> Iterator[str]:
        """Yield, in words, what is not there."""
        module_name, _, class_name = self.owner.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except Exception as error:  # noqa: BLE001 - importing what is not known may fail in any way
            yield f"{module_name} cannot be imported ({error})"
            return
        if class_name and (owner := getattr(owner, class_name, None)) is None:
            yield f"{module_name} has no {class_name}"
            return
        shown = self.owner.rpartition(".")[2].replace(":", ".")
        for written in self.overridden:
            yield from _mismatch(shown, owner, _Call.parse(written), is_overridden=True)
        for written in self.called:
            yield from _mismatch(shown, owner, _Call.parse(written), is_overridden=False)
        known = names_of(owner) if self.read else set()
        yield from (f"{shown} has no {name}" for name in self.read if name not in known and not name.endswith("?"))


class _Call(NamedTuple):
    name: str
    parameters: tuple[str, ...]
    optional: frozenset[str]
    """Those that may be there or not."""

    @classmethod
    def parse(cls, written: str) -> _Call:
        name, inside = re.fullmatch(r"(\w+)\((.*)\)", written).groups()  # type: ignore[union-attr]  # ours; tested
        words = [word.strip() for word in inside.split(",") if word.strip()]
        return cls(name, tuple(w.rstrip("?") for w in words), frozenset(w[:-1] for w in words if w.endswith("?")))


def _mismatch(shown: str, owner: Any, call: _Call, *, is_overridden: bool) -> Iterator[str]:
    function = getattr(owner, call.name, None)
    if not callable(function):
        yield f"{shown} has no {call.name}"
        return
    parameters = list(inspect.signature(function).parameters.values())
    # What is read off the class is not bound yet, except class methods.
    if isinstance(owner, type) and not inspect.ismethod(function):
        is_static = isinstance(inspect.getattr_static(owner, call.name), staticmethod)
        parameters = parameters if is_static else parameters[1:]
    named = [each for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    theirs = [each.name for each in named]
    lacking = [name for name in call.parameters if name not in theirs and name not in call.optional]
    if is_overridden:
        surplus = [name for name in theirs if name not in call.parameters]
    else:
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
    """Yield the attributes that the method sets."""
    if isinstance(method := inspect.unwrap(method) if callable(method) else method, FunctionType):
        yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


def differences(table: Sequence[Reliance]) -> list[str]:
    """Return, in words, what is relied on and is not there."""
    return [each for reliance in table for each in reliance.differences()]
