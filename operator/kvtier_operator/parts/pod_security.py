# SPDX-License-Identifier: Apache-2.0
"""What in a pod template the `restricted` Pod Security Standard does not allow. Pure.

Pods satisfy it by default. A namespace that enforces it creates no pod that does not, so whoever adds such a thing is
told at once, and need not find out from pods that never come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvtier_operator.api import pod_template
from kvtier_operator.api.pod_template import PodTemplate
from kvtier_operator.parts import pod_settings
from kvtier_operator.parts.overlay import lay_over

_VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_PROFILES: Final = frozenset({"RuntimeDefault", "Localhost"})


def warning(template: PodTemplate) -> str:
    """Say what breaks the standard, and what to do; empty where nothing does."""
    found = list(objections(template))
    if not found:
        return ""
    return (
        f"the engine pods leave the restricted Pod Security Standard ({', '.join(found)}): a namespace that enforces "
        "it creates none of them; label it pod-security.kubernetes.io/enforce=privileged, or take this out of "
        "spec.engine.podTemplate"
    )


def objections(template: PodTemplate) -> Iterator[str]:
    """Yield each thing that breaks the standard, by its field."""
    if template.host_network:
        yield "hostNetwork"
    for volume in template.volumes:
        if strange := sorted(volume.keys() - _VOLUMES - {"name"}):
            yield f"{strange[0]} of the volume {volume['name']}"
    pod = pod_settings.security_context(template)
    added = pod_template.of_engine(template.containers)
    engine = lay_over({"name": pod_template.ENGINE, "securityContext": pod_settings.hardened(added)}, added)
    beside = [each for each in template.containers if each["name"] != pod_template.ENGINE]
    for container in (engine, *map(pod_settings.of_user, (*beside, *template.init_containers))):
        for objection in _of_container(container, pod):
            yield f"{objection} of the container {container['name']}"
    if not pod["runAsNonRoot"]:
        yield "runAsNonRoot of the pods"


def _of_container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation", True):
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities.drop"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if context.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser"
    if (context.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in _PROFILES:
        yield "seccompProfile"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
