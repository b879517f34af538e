# SPDX-License-Identifier: Apache-2.0
"""Reads the document that the operator wrote, from the file that is mounted into the pod."""

from __future__ import annotations

from pathlib import Path

from kvtier_connector import contract
from kvtier_connector.errors import ConfigInvalid


def read_config(path: str) -> contract.ConnectorConfig:
    """Return the settings.

    Raises:
        ConfigInvalid: the file cannot be read, or what it says cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"config_file {path}: cannot be read: {error}") from error
    return contract.decode(text)
