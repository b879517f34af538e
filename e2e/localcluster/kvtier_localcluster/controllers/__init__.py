# SPDX-License-Identifier: Apache-2.0
"""Controllers: the work of kube-controller-manager, kube-scheduler and kube-proxy, one module for each kind."""
