# SPDX-License-Identifier: Apache-2.0
"""Documents that the operator writes and pods read, answers of pods, a leader's Lease, and the connector's errors."""
