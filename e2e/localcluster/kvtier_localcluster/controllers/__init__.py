# SPDX-License-Identifier: Apache-2.0
"""The controllers: what kube-controller-manager, kube-scheduler and kube-proxy do, each in one module."""
