# SPDX-License-Identifier: Apache-2.0
"""Whether the volume is in order: who may use it, what it holds, and how the janitor fares. Pure.

Judged by what the janitor and the engines reported last, so that a question nobody has answered yet is Unknown, and
never a problem of the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_connector.contract.engine import REPLACED_WEIGHTS
from kvtier_connector.contract.usage import Usage
from kvtier_operator import names, quantity
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, Look, Problem, View, as_before, checked, listed
from kvtier_operator.snapshot import LiveJanitor, Snapshot

_TOLERANCE: Final = 1.02
"""Engines stop at the limit with what they had begun to write; sizes are reported with less than a percent off."""


def janitor_reports(look: Look) -> Problem | None:
    """The janitor runs and says what it found."""
    janitor = look.snapshot.janitor
    if not look.spec.janitor.enabled:
        return Problem(
            reason=Reason.JANITOR_DISABLED,
            message="spec.janitor.enabled is false: nobody measures the volume, and nothing is ever removed from it",
            is_known=False,
        )
    if janitor.usage is None:
        return Problem(
            reason=Reason.JANITOR_STARTING, message="the janitor has not reported: see JanitorHealthy", is_known=False
        )
    if not janitor.usage.is_active:
        return Problem(
            reason=Reason.JANITOR_WAITING,
            message=f"the janitor waits for Lease/{names.janitor(look.snapshot.tier)}, which another one holds or "
            f"which it may not write: `kubectl logs deployment/{names.janitor(look.snapshot.tier)}` says why",
            is_known=False,
        )
    return None


def volume_is_counted(look: Look) -> Problem | None:
    """The janitor has seen every file once."""
    usage = look.snapshot.janitor.usage
    if usage is None or usage.is_counted:
        return None
    return Problem(
        reason=Reason.COUNTING,
        message=f"the janitor still counts what lies on the volume: {quantity.show_bytes(usage.used_bytes)} so far",
        is_known=False,
    )


def budget_holds(look: Look) -> Problem | None:
    """The blocks take no more than they may."""
    usage, limit = look.snapshot.janitor.usage, look.spec.disk.budget.max_bytes
    if usage is None or limit is None or usage.used_bytes <= limit * _TOLERANCE:
        return None
    return Problem(
        reason=Reason.OVER_BUDGET,
        message=f"blocks take {quantity.show_bytes(usage.used_bytes)} of spec.disk.budget.maxBytes "
        f"({look.spec.disk.budget.max_size}) and the janitor is evicting; if this stays, "
        f"`kubectl logs deployment/{names.janitor(look.snapshot.tier)}` says what holds it up",
    )


def engines_may_store(look: Look) -> Problem | None:
    """Engines may store."""
    usage = look.snapshot.janitor.usage
    if usage is None or not usage.store_pause:
        return None
    return Problem(
        reason=Reason.STORES_PAUSED,
        message=f"engines may not store, loads go on: {usage.store_pause}; it ends by itself when there is room again: "
        "free the volume of what is not ours, raise spec.volume.claim.size, or lower spec.disk.budget.maxBytes",
    )


def volume_has_room(look: Look) -> Problem | None:
    """As much of the volume is free as was asked for."""
    usage, budget = look.snapshot.janitor.usage, look.spec.disk.budget
    if usage is None or not usage.volume_bytes:
        return None
    wanted = max(budget.min_free_bytes, usage.volume_bytes * budget.min_free_fraction)
    if usage.volume_free_bytes * _TOLERANCE >= wanted:
        return None
    return Problem(
        reason=Reason.VOLUME_FULL,
        message=f"{quantity.show_bytes(usage.volume_free_bytes)} of {quantity.show_bytes(usage.volume_bytes)} are free "
        f"on the volume, less than spec.disk.budget.minFree ({budget.min_free}), and blocks of this "
        f"tier take {quantity.show_bytes(usage.used_bytes)}: free it of what is not ours, raise "
        "spec.volume.claim.size, or lower minFree",
    )


def engines_own_the_directory(look: Look) -> Problem | None:
    """No engine found the directory to belong to another model or layout."""
    strays = [pod for pod in look.snapshot.pods if pod.report is not None and pod.report.refused]
    if not strays:
        return None
    fields = sorted({field for pod in strays if pod.report is not None for field in pod.report.refused})
    if fields == ["generation"]:
        return Problem(
            reason=Reason.STRANGER,
            message=f"pod {listed([pod.name for pod in strays])} serves without the volume: its container was "
            "restarted after the spec had changed, and the settings are not those that it was made for; the rollout "
            "replaces it; if it stays, delete the pod",
        )
    if fields == [REPLACED_WEIGHTS]:
        return Problem(
            reason=Reason.STRANGER,
            message=f"pod {listed([pod.name for pod in strays])} serves without the volume: its weights were replaced "
            "while it ran. Delete the pod to have an engine of the model's own weights, or set "
            "spec.disk.mode: Bypass while weights are replaced again and again",
        )
    return Problem(
        reason=Reason.STRANGER,
        message=f"pod {listed([pod.name for pod in strays])} serves without the volume: tier.json of its generation "
        f"says another {', '.join(fields)}. Blocks of one model are never served to another: where the spec names a "
        "moving thing, name a fixed one (a commit in spec.model.revision, a digest in spec.engine.image), which starts "
        "a generation of its own; or remove the generation with `kvtier purge --generation`",
    )


def volume_answers(look: Look) -> Problem | None:
    """No engine serves without the volume because that did not answer it."""
    without = [pod.name for pod in look.snapshot.pods if pod.report is not None and pod.report.is_detached]
    if not without:
        return None
    return Problem(
        reason=Reason.DETACHED,
        message=f"pod {listed(without)} serves without the volume, which did not answer or did not let it in, and "
        f"goes on trying: `kubectl logs {without[0]} -c {names.ENGINE_CONTAINER}` has the system's words; see that the "
        "volume is mounted, reachable and writable for the user and group of the pods",
    )


def active_key_is_there(look: Look) -> Problem | None:
    """Every engine has the key that blocks are to be encrypted with."""
    without = [pod.name for pod in look.snapshot.pods if pod.report is not None and pod.report.is_key_missing]
    encryption = look.spec.disk.encryption
    if encryption is None or not without:
        return None
    return Problem(
        reason=Reason.KEY_MISSING,
        message=f"pod {listed(without)} stores nothing: Secret {encryption.secret_name} has no entry "
        f"{encryption.active_key} (spec.disk.encryption.activeKey), or it is no key: 32 bytes, as they are, as 64 "
        "hexadecimal digits or in base64, such as `openssl rand -base64 32` prints; the kubelet brings a change of the "
        "Secret within a minute or two",
    )


def janitor_is_not_hindered(look: Look) -> Problem | None:
    """The janitor can do its work."""
    usage = look.snapshot.janitor.usage
    if usage is None or not usage.problems:
        return None
    return Problem(
        reason=Reason.JANITOR_HINDERED,
        message=f"the janitor cannot do its work: {'; '.join(usage.problems)}; blocks must be writable for the user "
        "and group of the pods (spec.engine.podTemplate.securityContext)",
    )


def _unless_awaited(told: ConditionRule, is_awaited: Callable[[Snapshot], bool]) -> ConditionRule:
    """Keep what was told while somebody is still to answer: a new operator's not knowing is no news."""

    def judge(view: View, previous: Mapping[str, Any]) -> Problem:
        found = told.judge(view, previous)
        is_told = previous.get("observedGeneration") == view.generation and view.snapshot is not None
        if not is_told or view.snapshot is None or not is_awaited(view.snapshot):
            return found
        is_news = found.is_known and not found.is_met
        return found if is_news else as_before(told.kind, previous) or found

    return ConditionRule(told.kind, judge)


WITHIN_BUDGET: Final = _unless_awaited(
    checked(
        "DiskWithinBudget",
        (janitor_reports, volume_is_counted, budget_holds, engines_may_store, volume_has_room),
        ok=Reason.WITHIN_BUDGET,
        text="the blocks take no more than they may",
    ),
    lambda snapshot: snapshot.janitor.is_awaited,
)
HEALTHY: Final = _unless_awaited(
    checked(
        "DiskHealthy",
        (
            engines_own_the_directory,
            volume_answers,
            active_key_is_there,
            janitor_reports,
            janitor_is_not_hindered,
        ),
        ok=Reason.HEALTHY,
        text="engines and janitor work on the volume",
    ),
    lambda snapshot: snapshot.janitor.is_awaited or any(pod.is_awaited for pod in snapshot.pods),
)


def tiers(look: Look) -> list[dict[str, Any]]:
    """Return ``status.tiers``: how much each tier can hold and, as far as somebody counted, what it does hold."""
    usage, limit = _counted(look.snapshot.janitor), look.spec.disk.budget.max_bytes
    memory: dict[str, Any] = {"name": "cpu", "capacityBytes": look.sizing.cpu_bytes}
    if not look.spec.connector.uses_volume:
        return [memory]
    capacity = limit or (usage.volume_bytes if usage is not None else 0)
    disk: dict[str, Any] = {"name": "disk", **({"capacityBytes": capacity} if capacity else {})}
    if usage is not None:
        disk |= {"usedBytes": usage.used_bytes, "blocks": usage.blocks}
        if capacity:
            disk["used"] = f"{round(100 * usage.used_bytes / capacity)}%"
    return [memory, disk]


def generations(look: Look, *, current: str) -> list[dict[str, Any]] | None:
    """Return ``status.generations``, the current one first and the others as they were last used; None if unknown."""
    usage = _counted(look.snapshot.janitor)
    if usage is None:
        return None
    ordered = sorted(usage.generations, key=lambda each: (each.digest != current, -each.last_used, each.digest))
    return [
        {
            "digest": each.digest,
            "role": _role(each.digest, current),
            "usedBytes": each.used_bytes,
            "blocks": each.blocks,
            **_time("created", each.created),
            **_time("lastUsed", each.last_used),
        }
        for each in ordered[:MOST_GENERATIONS]
    ]


def with_roles(counted: Iterable[Mapping[str, Any]], *, current: str) -> list[dict[str, Any]]:
    """Return generations as somebody counted them before another one became the current one."""
    told = [{**each, "role": _role(each["digest"], current)} for each in counted]
    return sorted(told, key=lambda each: each["digest"] != current)


def _role(digest: str, current: str) -> str:
    return "Current" if digest == current else "Unshared" if "." in digest else "Previous"


MOST_GENERATIONS: Final = 64
"""Entries of ``status.generations``; more than anybody keeps."""


def _counted(janitor: LiveJanitor) -> Usage | None:
    """Return the report of a janitor that has counted."""
    usage = janitor.usage
    return usage if usage is not None and usage.is_active and usage.is_counted else None


def _time(field: str, seconds: float) -> Mapping[str, str]:
    if not 0 < seconds < datetime(9999, 1, 1, tzinfo=UTC).timestamp():
        return {}
    return {field: datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
