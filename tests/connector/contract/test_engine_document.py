# SPDX-License-Identifier: Apache-2.0
"""The settings of the store in the operator's document: all have defaults, and what cannot be used is named."""

from __future__ import annotations

import pytest

from kvtier_connector.contract.engine import ConnectorConfig, decode, encode
from kvtier_connector.contract.errors import ConfigInvalid

REQUIRED = {"tier": "ns/name", "root": "/kv/abc", "digest": "abc", "identity": {}}


def test_a_document_without_the_stores_settings_is_read_and_written_back() -> None:
    config = ConnectorConfig(**REQUIRED)
    assert decode(encode(config)) == config
    assert (config.refresh_seconds, config.direct_io, config.live_file) == (1.0, None, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("refresh_seconds", 0),
        ("refresh_seconds", -1.0),
        ("min_tokens", -1),
        ("min_reuse", 0),
        ("min_reuse", 101),
        ("live_file", "live.json"),
        ("state_dir", "kvtier"),
        ("attach_grace_seconds", 0),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigInvalid, match=field):
        ConnectorConfig(**REQUIRED, **{field: value})
