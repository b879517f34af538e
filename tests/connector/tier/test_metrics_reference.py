# SPDX-License-Identifier: Apache-2.0
"""The list of metrics that users read is the one that the tier declares."""

from __future__ import annotations

from kvtier_connector.vllm_adapter import metrics_reference
from kvtier_connector.vllm_adapter.metrics import METRICS


def test_the_reference_is_up_to_date() -> None:
    assert metrics_reference.main(["--check"]) == 0, (
        "run python -m kvtier_connector.vllm_adapter.metrics_reference --write"
    )


def test_every_metric_is_in_the_reference_with_its_meaning() -> None:
    text = metrics_reference.render()
    for metric in METRICS:
        assert metric.name in text
        assert metric.documentation in text
