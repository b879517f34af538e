# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes cluster inside one process tree: an in-memory API server, and pods that run as local processes."""
