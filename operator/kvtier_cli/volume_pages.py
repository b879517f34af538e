# SPDX-License-Identifier: Apache-2.0
"""The pages of the verbs about blocks: each takes the document of a chore and returns what people read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtier_cli.answers import columns, duration
from kvtier_connector.store.inspect import OLDER
from kvtier_connector.store.progress import counted, readable_size

Document = Mapping[str, Any]
MOST_TENANTS: Final = 20
"""The largest, for people; JSON has all."""
_MOST_PROBLEMS: Final = 1000


def inspect(document: Document) -> str:
    """Return the counts first, then each generation."""
    volume = document["volume"]
    generations = document["generations"]
    head = (
        f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}, in "
        f"{counted(len(generations), 'generation')}\n"
        f"volume: {readable_size(volume['free'])} free of {readable_size(volume['bytes'])}\n"
    )
    return head + "".join(_generation(each) for each in generations)


def _generation(document: Document) -> str:
    rows = [("blocks", _heap(document["blocks"]))]
    if document["problem"]:
        rows.insert(0, ("problem", document["problem"]))
    if document["oldestSeconds"] is not None:
        written = f"{duration(document['newestSeconds'])} to {duration(document['oldestSeconds'])} ago"
        rows.append(("written", written))
        rows += [
            ("  over 30 d" if name == OLDER else f"  up to {name}", _heap(heap))
            for name, heap in document["ages"].items()
            if heap["files"]
        ]
    tenants = sorted(document["tenants"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    if tenants:
        rows.append(("tenants", str(len(tenants))))
        rows += [(f"  {name}", _heap(heap)) for name, heap in tenants[:MOST_TENANTS]]
    rows += [(name, _heap(heap, "file")) for name, heap in document["leftovers"].items() if heap["files"]]
    rows.append(("journals", _heap(document["journals"], "file")))
    rows += [(name, str(value)) for name, value in sorted(document["identity"].items())]
    return f"\n{document['path']}\n{columns(rows, indent=2)}"


def _heap(heap: Document, noun: str = "block") -> str:
    return f"{counted(heap['files'], noun)}, {readable_size(heap['bytes'])}"


def check(document: Document) -> str:
    """Return each problem, and the counts last, where they stay on the screen."""
    problems = document["problems"]
    lines = [f"{each['path'] or '.'}: {each['kind']}: {each['message']}" for each in problems]
    count = sum(document["problemsByKind"].values())
    if count > len(problems):
        lines.append(f"and {count - len(problems)} more")
    if document["unverified"]:
        lines.append(_sealed(document["unverified"]))
    if document["compressed"]:
        saved = readable_size(document["savedBytes"])
        lines.append(f"{counted(document['compressed'], 'block')} compressed, which saves {saved}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(document["problemsByKind"].items()))
    lines.append(
        f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}, "
        f"{counted(count, 'problem')}" + (f": {kinds}" if kinds else "")
    )
    return "\n".join(lines) + "\n"


def _sealed(blocks: int) -> str:
    return f"{counted(blocks, 'block')} encrypted with a key that was not given: see --keys-dir"


def purge(document: Document) -> str:
    """Return what went, or would."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = []
    for each in document["generations"]:
        rest = f", and {each['leftovers']} quarantined or partial files" if each["leftovers"] else ""
        lines.append(f"{each['path']}: {verb} {counted(each['blocks'], 'block')}, {readable_size(each['bytes'])}{rest}")
        if each["problem"]:
            lines.append(f"{each['path']}: not all of it: {each['problem']}")
    lines.append(f"{verb} {counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}")
    return "\n".join([*lines, *_dry(document)]) + "\n"


def gc(document: Document) -> str:
    """Return what went, or would, and why."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = [f"{verb} {counted(count, 'block')}: {reason}" for reason, count in document["evicted"].items()]
    lines += [f"removed {counted(count, 'leftover')}: {kind}" for kind, count in document["removedLeftovers"].items()]
    if not document["evicted"]:
        lines.append("nothing is above its limits")
    lines += [f"problem: {each}" for each in document["problems"]]
    lines.append(f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])} on the volume")
    return "\n".join([*lines, *(_dry(document) if document["evicted"] else [])]) + "\n"


def _dry(document: Document) -> list[str]:
    return ["nothing was removed; add --yes to do it"] if document["dryRun"] else []


def pin(document: Document) -> str:
    """Return what is kept now."""
    blocks = document["blocks"]
    there = (
        f"{counted(blocks, 'block')} with this hash" if blocks else "no block has this hash now; it holds once one has"
    )
    return f"pinned {document['hash']} as {document['name']}: {there}\n"


def pins(document: Document) -> str:
    """Return all pins."""
    return columns([("NAME", "HASH"), *sorted(document.items())]) if document else "nothing is pinned\n"


def unpin(document: Document) -> str:
    """Return what may go again."""
    return f"unpinned {document['name']}: {document['hash']}\n"


def clone(document: Document) -> str:
    """Return what was copied, or would be."""
    verb = "would copy" if document["dryRun"] else "copied and verified"
    lines = [f"{each['path']}: {each['kind']}: left behind" for each in document["damaged"][:_MOST_PROBLEMS]]
    lines.append(
        f"{document['generation']}: {verb} {counted(document['blocks'], 'block')}, "
        f"{readable_size(document['bytes'])}, to {document['to']}"
    )
    if document["shared"]:
        lines.append(f"{counted(document['shared'], 'block')} of these share their bytes with the source")
    if document["unverified"]:
        lines.append(_sealed(document["unverified"]))
    if document["present"]:
        lines.append(f"{counted(document['present'], 'block')} there already")
    if document["dryRun"]:
        lines.append("nothing was copied; add --yes to do it")
    return "\n".join(lines) + "\n"


PAGES: Final[Mapping[str, Callable[[Document], str]]] = {
    "inspect": inspect,
    "check": check,
    "purge": purge,
    "gc": gc,
    "pin": pin,
    "pins": pins,
    "unpin": unpin,
    "clone": clone,
}
