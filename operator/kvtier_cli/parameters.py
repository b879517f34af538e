# SPDX-License-Identifier: Apache-2.0
"""Words of the command line that need reading: sizes, times and shares, as the API takes them, hashes and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor import units
from kvtier_connector.janitor.pins import check_name, parse_hash


class _Reading(click.ParamType[Any]):
    """Reads a word with a function that raises for what it cannot read."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except (ValueError, ConfigInvalid) as error:
            self.fail(str(error), param, ctx)


SECONDS = _Reading("time", units.parse_seconds)
BYTES = _Reading("size", units.parse_size)
SHARE = _Reading("share", units.parse_share)
HASH = _Reading("hash", lambda word: parse_hash(word).hex())
PIN = _Reading("name", check_name)
