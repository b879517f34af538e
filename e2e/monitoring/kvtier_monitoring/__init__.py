# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboards of the chart."""
