# SPDX-License-Identifier: Apache-2.0
"""Turn a container of a pod into a process to start: command, environment, directories."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvtier_localcluster.kinds import Json
from kvtier_localcluster.node.environment import PathMap, declared, expand, profile_for, with_address
from kvtier_localcluster.node.processes import Launch
from kvtier_localcluster.node.services import PodServices
from kvtier_localcluster.node.volumes import Mounts

LAST_WORDS = "/dev/termination-log"
_FROM_THE_MACHINE = ("LD_LIBRARY_PATH",)


def make_launch(container: Json, services: PodServices, command: list[str] | None = None) -> Launch:
    """Prepare the directories of a container and return how to start it, or another command inside it.

    Raises:
        ConfigMissing: a variable refers to something that does not exist.
        VolumeMissing: a volume cannot be set up.
    """
    profile = profile_for(container.get("image", ""), services.node.settings.images)
    variables = declared(container, services.sources)
    mounts = services.volumes.prepare(container)

    last_words = PathMap(
        {container.get("terminationMessagePath") or LAST_WORDS: str(last_words_file(container, services))}
    )

    def real(text: str) -> str:
        return with_address(last_words.rewrite(mounts.paths.rewrite(text)), services.sources.pod_ip)

    environment = _base_environment(services, mounts)
    environment.update(profile.environment)
    environment.update({name: real(value) for name, value in variables.items()})
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    if command is None:
        command = [*(container.get("command") or profile.entrypoint), *(container.get("args") or [])]
    return Launch(
        command=[real(expand(word, {**profile.environment, **variables})) for word in command],
        environment=environment,
        directory=services.volumes.working_directory(container),
    )


def last_words_file(container: Json, services: PodServices) -> Path:
    """Return the file that stands for a container's terminationMessagePath."""
    pod = services.node.data.pod(services.sources.pod["metadata"]["uid"])
    return pod / f"last-words-{container['name']}"


def _base_environment(services: PodServices, mounts: Mounts) -> dict[str, str]:
    """Return what every container has; nothing else of the caller's environment gets through."""
    machine = {name: os.environ[name] for name in _FROM_THE_MACHINE if name in os.environ}
    # There is no authentication, so a kubeconfig stands for the account's token.
    spec = services.sources.pod["spec"]
    is_client = spec.get("automountServiceAccountToken", spec.get("serviceAccountName", "default") != "default")
    account = {"KUBECONFIG": str(services.node.kubeconfig)} if is_client else {}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOSTNAME": services.sources.pod["metadata"]["name"],
        "TMPDIR": str(mounts.temporary),
        **account,
        **machine,
    }
