# SPDX-License-Identifier: Apache-2.0
"""Holds objects against the schemas of a release of Kubernetes."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

# It reads all definitions of a release anew for each object, a megabyte of JSON, and changes none of them.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def validate(manifest: dict[str, Any], version: str, *, strict: bool = True) -> None:
    """Raise ValidationError unless an object is valid in a release, such as "1.37".

    Where it is strict, no field may be unknown to that release.
    """
    kubernetes_validate.validate(manifest, version, strict=strict)
