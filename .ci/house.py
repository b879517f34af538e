# SPDX-License-Identifier: Apache-2.0
"""Measures the size and shape of the code: ``python .ci/house.py [--write]``, or ``make house``.

It prints lines and modules of each package, public classes that share a name, and import cycles. The exit status is 1
when a figure is over its limit and over what ``.ci/house.json`` records. ``--write`` lowers the record to today's
figures; it refuses to raise one.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci" / "house.json"
LINES = {"connector": 18_500, "operator": 20_000, "e2e": 16_000}
"""Most lines of each part, comments included. The operator's part has its command."""

ADDED = frozenset(
    {
        "connector/kvtier_connector/cascade/comparison.py",
        "connector/kvtier_connector/cascade/rates.py",
        "connector/kvtier_connector/cascade/releases.py",
        "connector/kvtier_connector/cascade/reuse_sample.py",
        "connector/kvtier_connector/cascade/split.py",
        "connector/kvtier_connector/vllm_adapter/request_log.py",
        "connector/kvtier_connector/vllm_adapter/split_scheduler.py",
        "e2e/bench/blocks/burst.py",
        "e2e/bench/cells.py",
        "e2e/engines/paced.py",
        "e2e/bench/throttle.py",
        "operator/kvtier_cli/engines/__init__.py",
        "operator/kvtier_cli/engines/attach.py",
        "operator/kvtier_cli/engines/look.py",
        "operator/kvtier_cli/trace.py",
        "operator/kvtier_operator/api/external_spec.py",
        "operator/kvtier_operator/api/generations_spec.py",
        "operator/kvtier_operator/kube/idle.py",
        "operator/kvtier_operator/observe/engine_view.py",
        "operator/kvtier_operator/parts/external/__init__.py",
        "operator/kvtier_operator/parts/external/attach.py",
        "operator/kvtier_operator/parts/external/checks.py",
        "operator/kvtier_operator/parts/external/pods.py",
        "operator/kvtier_operator/parts/external/templates.py",
        "operator/kvtier_operator/parts/releases.py",
        "operator/kvtier_operator/parts/network_policies.py",
        "operator/kvtier_operator/plan/model_families.py",
        "operator/kvtier_operator/plan/reported.py",
    }
)
"""Modules of features that those limits do not count, because they came after the limits were set."""

ADDED_LINES = 6_000
"""Most lines of these modules together."""

TEST_LINES = 38_000
"""Most lines of the tests' Python."""

DISTRIBUTIONS = {"kvtier": ("connector", "operator"), "kvtier-e2e": ("e2e",)}
"""The parts of each distribution."""

MODULES = 14
"""Most modules of a package, without its ``__init__.py``."""

NOT_COUNTED = {"build", "tests"}
"""Folders that are left out."""

IMPORTED = ("kvtier_cli", "kvtier_operator", "kvtier_connector")
"""Packages whose imports are searched for cycles."""


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: int
    limit: int
    """The value that is right in the end."""
    detail: str = ""
    """Printed behind a figure that is over its limit."""


@dataclass(frozen=True)
class Package:
    """A folder with modules."""

    part: str
    name: str
    lines: int
    modules: int
    added: int
    """Lines of modules in `ADDED`; `lines` holds them, too."""


def modules(root: Path, part: str) -> list[Path]:
    """Return the Python files of a part, sorted, without its tests."""
    found = (path for path in (root / part).rglob("*.py"))
    return sorted(path for path in found if NOT_COUNTED.isdisjoint(path.relative_to(root).parts))


def packages(root: Path, parts: Iterable[str]) -> list[Package]:
    """Return the folders of these parts that hold modules, in the order of their names."""
    found = []
    for part in parts:
        folders: dict[Path, list[Path]] = defaultdict(list)
        for path in modules(root, part):
            folders[path.parent].append(path)
        for folder, files in sorted(folders.items()):
            lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
            added = sum(count for path, count in lines.items() if str(path.relative_to(root)) in ADDED)
            count = sum(path.name != "__init__.py" for path in files)
            found.append(Package(part, str(folder.relative_to(root)), sum(lines.values()), count, added))
    return found


def shared_names(root: Path, parts: Iterable[str]) -> dict[str, list[str]]:
    """Return the public classes that several modules define, each with these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for part in parts for path in modules(root, part)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(root)))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def cycles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    Args:
        imports: Of each module, the modules that it imports.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in imports.get(module, ()):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return sorted(found)


def product_imports() -> dict[str, set[str]]:
    """Return the imports of the product's modules, as grimp reads them."""
    sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "connector")]
    import grimp

    graph = grimp.build_graph(*IMPORTED, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def figures(
    found: Sequence[Package], shared: Mapping[str, Mapping[str, list[str]]], circles: list[list[str]]
) -> list[Figure]:
    """Return each figure that has a limit."""
    lines = Counter[str]()
    for package in found:
        lines[package.part] += package.lines - package.added
    measured = [Figure(f"lines of {part}", lines[part], limit) for part, limit in LINES.items()]
    measured.append(Figure("lines added by features", sum(package.added for package in found), ADDED_LINES))
    measured += [Figure(f"modules of {package.name}", package.modules, MODULES) for package in found]
    for distribution, names in shared.items():
        detail = ", ".join(f"{name} ({len(where)})" for name, where in names.items())
        measured.append(Figure(f"class names defined twice in {distribution}", len(names), 0, detail))
    detail = "; ".join(" <-> ".join(group) for group in circles)
    return [*measured, Figure("import cycles", len(circles), 0, detail)]


def judge(measured: Iterable[Figure], record: Mapping[str, int]) -> list[str]:
    """Return a line for each figure that is over its limit and over its record."""
    return [
        f"{figure.name}: {figure.value:,}, at most {max(figure.limit, record.get(figure.name, 0)):,}"
        for figure in measured
        if figure.value > max(figure.limit, record.get(figure.name, 0))
    ]


def lowered(measured: Iterable[Figure]) -> dict[str, int]:
    """Return the record of today's figures: those that are over their limits."""
    return {figure.name: figure.value for figure in measured if figure.value > figure.limit}


def table(found: Iterable[Package]) -> str:
    """Return lines and modules of each package as text."""
    rows = [f"{'package':<52}{'lines':>8}{'modules':>9}"]
    rows += [f"{each.name:<52}{each.lines:>8,}{each.modules:>9}{' *' * (each.modules > MODULES)}" for each in found]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 when one is over its limit and its record."""
    parser = argparse.ArgumentParser(description="Measure the size and shape of the code.")
    parser.add_argument("--write", action="store_true", help="lower .ci/house.json to today's figures")
    write = parser.parse_args(arguments).write
    found = packages(ROOT, LINES)
    shared = {name: shared_names(ROOT, parts) for name, parts in DISTRIBUTIONS.items()}
    measured = figures(found, shared, cycles(product_imports()))
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    measured.append(Figure("lines of tests", tests, TEST_LINES))
    record = json.loads(RECORD.read_text())
    print(table(found), "", sep="\n")
    for figure in measured:
        if figure.name.startswith("modules of ") and figure.value <= figure.limit:
            continue
        state = f", over by {figure.value - figure.limit:,}" if figure.value > figure.limit else ""
        print(f"{figure.name}: {figure.value:,} of {figure.limit:,}{state}{': ' * bool(figure.detail)}{figure.detail}")
    if worse := judge(measured, record):
        print("\nworse than .ci/house.json records:", *worse, sep="\n  ", file=sys.stderr)
        return 1
    if write:
        RECORD.write_text(json.dumps(lowered(measured), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
