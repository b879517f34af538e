# SPDX-License-Identifier: Apache-2.0
"""The claim that holds the blocks. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan

DELETE: Final = "Delete"


def claim(plan: TierPlan) -> Manifest | None:
    """Return the claim, or None where the user brings one: that is never applied, labelled or deleted."""
    wanted = plan.spec.volume.claim
    if wanted is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": names.metadata(
            plan.tier,
            names.claim(plan.tier),
            component=names.COMPONENT_VOLUME,
            # The garbage collector deletes what the tier owns: a claim to be retained must not be owned.
            is_owned=plan.spec.volume.deletion_policy == DELETE,
        ),
        "spec": {
            "accessModes": list(wanted.access_modes),
            "resources": {"requests": {"storage": wanted.size}},
            **({"storageClassName": wanted.storage_class_name} if wanted.storage_class_name is not None else {}),
            "volumeMode": "Filesystem",
        },
    }
