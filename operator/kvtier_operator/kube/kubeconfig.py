# SPDX-License-Identifier: Apache-2.0
"""Which cluster to talk to, and which namespace is meant: from the pod's service account, or as kubectl finds it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from kubernetes import client, config

from kvtier_operator.errors import ClusterUnavailable

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def read_settings(*, kubeconfig: str | None = None, context: str | None = None) -> client.Configuration:
    """Return how to reach the cluster of the pod's service account, or else of the kubeconfig.

    Raises:
        ClusterUnavailable: there is neither.
    """
    settings = client.Configuration()
    if not kubeconfig and not context:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(client_configuration=settings)
            return settings
    try:
        # The package looks at the variable when it is imported, which may be too early.
        file = kubeconfig or os.environ.get("KUBECONFIG")
        config.load_kube_config(config_file=file, context=context, client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise ClusterUnavailable(
            f"no cluster to talk to: {str(error).rstrip('.')}; set KUBECONFIG to a file that kubectl can use"
        ) from error
    return settings


def of_person(kubeconfig: str | None) -> str | None:
    """Return the file that a person means, as kubectl does: in a pod, too, one of theirs goes before its account."""
    named = kubeconfig or os.environ.get("KUBECONFIG")
    if named:
        return named
    with contextlib.suppress(RuntimeError):  # an account without a home
        usual = Path("~/.kube/config").expanduser()
        return str(usual) if usual.is_file() else None
    return None


def read_namespace(*, kubeconfig: str | None = None, context: str | None = None) -> str:
    """Return the namespace of the context, or else of the pod that this is, as kubectl would take it."""
    if not kubeconfig and not context and "KUBERNETES_SERVICE_HOST" in os.environ and _NAMESPACE_FILE.exists():
        return own_namespace()
    try:
        every, current = config.list_kube_config_contexts(config_file=kubeconfig or os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError):
        return "default"
    chosen = next((each for each in every if each["name"] == context), current)
    return (chosen.get("context") or {}).get("namespace") or "default"


def own_namespace() -> str:
    """Return the namespace of this pod, or ``default`` outside of one."""
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
