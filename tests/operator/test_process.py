# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from kvtier_operator import handlers
from kvtier_operator.errors import SettingsInvalid
from kvtier_operator.settings import Settings


def test_a_port_in_use_is_named_with_its_setting_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        remedy = rf"cannot listen on port {port} \(Address already in use\): choose a free port"
        with pytest.raises(SettingsInvalid, match=f"^KVTIER_METRICS_PORT: {remedy}"):
            handlers.run(replace(Settings(), metrics_port=port), log_format="plain", is_verbose=False)
        endpoint = f"http://127.0.0.1:{port}/healthz"
        with pytest.raises(SettingsInvalid, match=f"^--liveness: {remedy}"):
            handlers.run(replace(Settings(), liveness_endpoint=endpoint), log_format="plain", is_verbose=False)
