# SPDX-License-Identifier: Apache-2.0
"""Janitors on a live API server: one of them leads, and another one when it gives way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tier_dir import Rig
from waiting import until

from kvtier_connector.contract.errors import LeaseUnavailable
from kvtier_connector.janitor.loop import make_elector
from kvtier_localcluster.apiserver import ApiServerThread

DEADLINE_SECONDS = 120.0


def test_without_a_lease_it_is_alone(rig: Rig) -> None:
    assert make_elector(rig.config) is None


def test_one_of_two_leads_and_the_other_when_it_gives_way(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ApiServerThread() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        config = replace(rig.config, lease_name="llama-janitor", lease_namespace="default")
        first, second = make_elector(config), make_elector(config)
        assert first is not None
        assert second is not None
        try:
            first.start()
            until(first.is_leader, seconds=DEADLINE_SECONDS)
            second.start()
            assert not second.is_leader()
            first.close()
            assert not first.is_leader()
            until(second.is_leader, seconds=DEADLINE_SECONDS)
        finally:
            first.close()
            second.close()


def test_a_lease_without_a_cluster_is_an_error_with_its_field(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(LeaseUnavailable, match="lease_name='x': no cluster is configured"):
        make_elector(replace(rig.config, lease_name="x", lease_namespace="default"))
