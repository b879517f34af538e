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
        raise SpecInvalid(_called(file), f"is not text in UTF-8: {error}") from error
    try:
        return [item for document in yaml.safe_load_all(text) if document is not None for item in _items(document)]
    except yaml.YAMLError as error:
        raise SpecInvalid(_called(file), f"is not YAML: {error}") from error


def read_tiers(file: str) -> list[Manifest]:
    """Return the KVCacheTier resources of a file, of which there is at least one.

    What else people keep in one file with a tier, such as its Secret or its claim, is passed over.

    Raises:
        SpecInvalid: it holds none, or something that was to be one.
        OSError: it cannot be read.
    """
    documents = read_documents(file)
    bodies = [body for body in documents if _is_tier(body, file)]
    if not bodies:
        others = f"something else than {names.KIND} resources of {names.API_VERSION}"
        raise SpecInvalid(_called(file), f"holds {others}" if documents else f"holds no {names.KIND}")
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


def _is_tier(body: Any, file: str) -> bool:
    version, kind = (body.get("apiVersion"), body.get("kind")) if isinstance(body, Mapping) else (None, None)
    if not isinstance(version, str) or not isinstance(kind, str):
        raise SpecInvalid(
            _called(file), "holds something that is no object of Kubernetes: apiVersion or kind is missing"
        )
    if (version, kind) != (names.API_VERSION, names.KIND):
        group = names.API_VERSION.partition("/")[0]
        if version.partition("/")[0] == group or kind.lower() == names.KIND.lower():
            meant = f"write apiVersion: {names.API_VERSION} and kind: {names.KIND}"
            raise SpecInvalid(_called(file), f"holds a {kind} of {version}, which there is not: {meant}")
        return False
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise SpecInvalid("metadata.name", "is required")
    return True


def _called(file: str) -> str:
    return "standard input" if file == "-" else file
