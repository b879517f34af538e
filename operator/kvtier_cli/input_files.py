# SPDX-License-Identifier: Apache-2.0
"""Read what the command line is given instead of a cluster: tiers, a model's config.json, nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator import names
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import Manifest


def read_documents(file: str) -> list[Any]:
    """Return the YAML documents of a file, or of standard input for ``-``; the items of lists one by one.

    Raises:
        SpecInvalid: it is not YAML.
        OSError: it cannot be read.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecInvalid(file, f"is not text in UTF-8: {error}") from error
    try:
        return [item for document in yaml.safe_load_all(text) if document is not None for item in _items(document)]
    except yaml.YAMLError as error:
        raise SpecInvalid(file, f"is not YAML: {error}") from error


def read_tiers(file: str) -> list[Manifest]:
    """Return the KVCacheTier resources of a file, of which there is at least one.

    Raises:
        SpecInvalid: it holds something else, or nothing.
        OSError: it cannot be read.
    """
    bodies = read_documents(file)
    for body in bodies:
        _expect_tier(body, file)
    if not bodies:
        raise SpecInvalid(file, f"holds no {names.KIND}")
    return bodies


def read_config(file: str) -> Mapping[str, Any]:
    """Return a model's config.json.

    Raises:
        SpecInvalid: it is not one.
        OSError: it cannot be read.
    """
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecInvalid(file, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecInvalid(file, "is not a model's config.json: that is one JSON object")
    return config


def _items(document: Any) -> Iterator[Any]:
    if isinstance(document, Mapping) and str(document.get("kind")).endswith("List") and "items" in document:
        yield from document["items"] or ()
    else:
        yield document


def _expect_tier(body: Any, file: str) -> None:
    is_tier = isinstance(body, Mapping) and (body.get("apiVersion"), body.get("kind")) == (
        names.API_VERSION,
        names.KIND,
    )
    if not is_tier:
        raise SpecInvalid(file, f"holds something else than {names.KIND} resources of {names.API_VERSION}")
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise SpecInvalid("metadata.name", "is required")
