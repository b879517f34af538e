# SPDX-License-Identifier: Apache-2.0
"""The chores that look at blocks, remove them or pin them, each as a function that returns a document.

None of them removes a thing unless ``yes`` says so. Engines and the janitor may be at work meanwhile.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor.chores import Outcome
from kvtier_connector.janitor.pins import check_name, parse_hash, read_pins, write_pins
from kvtier_connector.janitor.purge import Criteria
from kvtier_connector.janitor.purge import purge as purge_blocks
from kvtier_connector.store import check as checks
from kvtier_connector.store import inspect as inspection
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import TIER_FILE, is_tenant
from kvtier_connector.store.progress import Progress, Tell
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS

MOST_PROBLEMS = 1000
"""In the document of a check, which may have to lie in memory and in a log; it counts them all."""
_TENANT_FORM = "1 to 32 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit"


def find_tier(directory: Path) -> Path:
    """Return the directory of the one tier that is meant: this one, that of this generation, or the only one below.

    Raises:
        ConfigInvalid: there is none, or several.
    """
    if (directory / TIER_FILE).is_file():
        return directory.resolve().parent
    tiers = sorted({root.parent for root in find_generations(directory)})
    if len(tiers) > 1:
        raise ConfigInvalid(f"{directory}: holds several tiers; name one of {', '.join(map(str, tiers))}")
    if not tiers:
        raise ConfigInvalid(f"{directory}: holds no tier: no directory at or below it has a {TIER_FILE}")
    return tiers[0].resolve()


def check(
    directory: Path,
    tell: Tell,
    *,
    keys_dir: str = "",
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 4,
) -> Outcome:
    """Verify every byte below the directory."""
    report = checks.inspect_all(
        directory,
        keyring=Keyring(keys_dir) if keys_dir else None,
        partial_age_seconds=partial_age_seconds,
        threads=threads,
        progress=Progress(tell),
    )
    document = {
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unverified": report.unverified,
        "compressed": report.compressed,
        "savedBytes": report.saved_bytes,
        "problemsByKind": dict(Counter(problem.kind for problem in report.problems)),
        "problems": [problem._asdict() for problem in report.problems[:MOST_PROBLEMS]],
    }
    return Outcome(1 if report.problems else 0, document)


def inspect(directory: Path, tell: Tell, *, threads: int = 4) -> Outcome:
    """Count what lies below the directory."""
    roots = find_generations(directory)
    volume = os.statvfs(directory)
    progress, now_ns = Progress(tell), time.time_ns()
    progress.begin(len(roots))
    generations = [
        inspection.look_at(directory, root, now_ns=now_ns, threads=threads, progress=progress) for root in roots
    ]
    total, free = volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize
    document = {
        "blocks": sum(each.blocks.files for each in generations),
        "bytes": sum(each.blocks.bytes for each in generations),
        "volume": {"bytes": total, "free": free},
        "generations": [_counted(each) for each in generations],
    }
    return Outcome(1 if any(each.problem for each in generations) else 0, document)


def _counted(generation: inspection.Generation) -> dict[str, Any]:
    document = asdict(generation)
    document["oldestSeconds"], document["newestSeconds"] = (
        document.pop("oldest_seconds"),
        document.pop("newest_seconds"),
    )
    return document


def purge(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    tell: Tell,
    *,
    older_than_seconds: float | None = None,
    generation: str | None = None,
    tenant: str | None = None,
    prefix: str | None = None,
    lora: str | None = None,
    yes: bool = False,
    threads: int = 8,
) -> Outcome:
    """Remove what the options choose, or all where they choose nothing; without `yes` only count it."""
    if tenant and not is_tenant(tenant):
        raise ConfigInvalid(f"{tenant!r} cannot be a tenant: must be {_TENANT_FORM}")
    criteria = Criteria(
        older_than_seconds=older_than_seconds,
        generation=generation,
        tenant=tenant,
        prefix=None if prefix is None else parse_hash(prefix),
        lora=lora,
    )
    # Nothing is removed through a link, but the one that a person names is meant.
    results = purge_blocks(directory.resolve(), criteria, is_dry=not yes, threads=threads, progress=Progress(tell))
    document = {
        "dryRun": not yes,
        "blocks": sum(each.blocks for each in results),
        "bytes": sum(each.bytes for each in results),
        "generations": [asdict(each) for each in results],
    }
    return Outcome(1 if any(each.problem for each in results) else 0, document)


def pin(directory: Path, _: Tell, *, name: str, hash: str) -> Outcome:  # noqa: A002 - the field's word
    """Keep a block, and all before it."""
    tier = find_tier(directory)
    pins = read_pins(tier)
    name, pinned = check_name(name), parse_hash(hash)
    if pins.get(name, pinned) != pinned:
        raise ConfigInvalid(f"name {name!r}: pins {pins[name].hex()} already; unpin it, or take another name")
    write_pins(tier, {**pins, name: pinned})
    return Outcome(0, {"name": name, "hash": pinned.hex(), "blocks": _copies(tier, pinned)})


def pins(directory: Path, _: Tell) -> Outcome:
    """List what is pinned."""
    return Outcome(0, {name: pinned.hex() for name, pinned in sorted(read_pins(find_tier(directory)).items())})


def unpin(directory: Path, _: Tell, *, name: str) -> Outcome:
    """Let a pinned block go again."""
    tier = find_tier(directory)
    found = read_pins(tier)
    if name not in found:
        known = ", ".join(sorted(found)) or "there are none"
        raise ConfigInvalid(f"name {name!r}: no such pin; {known}")
    write_pins(tier, {each: pinned for each, pinned in found.items() if each != name})
    return Outcome(0, {"name": name, "hash": found[name].hex()})


def _copies(tier: Path, pinned: bytes) -> int:
    """Count the blocks with the hash, over all generations, groups and tenants."""
    text = pinned.hex()
    pattern = f"blocks/{text[:3]}/{text}_g*.kvb"
    return sum(
        1 for root in find_generations(tier) for trees in (pattern, f"tenants/*/{pattern}") for _ in root.glob(trees)
    )
