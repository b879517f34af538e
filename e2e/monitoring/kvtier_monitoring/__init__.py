# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboards of the chart, and what tries and draws them with a real Prometheus."""
