# SPDX-License-Identifier: Apache-2.0
"""The operator's side of Kubernetes: the client, the watches, the queue, the lead, and the servers that are asked."""
