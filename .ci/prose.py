# SPDX-License-Identifier: Apache-2.0
"""Finds long sentences and private words: ``python .ci/prose.py [--write] [PATH...]``, or ``make prose``.

It reads docstrings, comments, messages and identifiers of the code, and the pages of the documentation that are written
by hand. The exit status is 1 when a file has more findings than
``.ci/prose.json`` records. With PATH it prints all findings of these files or folders. ``--write`` records today's
counts; it refuses when the sum would rise.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / ".ci" / "prose.json"
FOLDERS = ("operator", "connector", "e2e", ".ci", "README.md", "docs")
NOT_READ = {"build", "tests", "conditions.md", "operator-metrics.md"}
"""Folders and pages that are left out: the pages are written from code, which is read."""

LONGEST = 30
"""Most words of a sentence."""

PHRASES = re.compile(
    r"\b(?:somebody|nobody|whoever|of which|is told of|take[sn]? back|taking back|lets? go|letting go|at home)\b",
    re.IGNORECASE,
)
"""Phrases that prose may not have."""

OPENINGS = re.compile(r"What\b(?!.*\?$)", re.DOTALL)
"""How a sentence may not begin, unless it is a question."""

WORDS = frozenset(
    [
        *("mover", "movers", "crew", "crews", "bury", "buries", "buried", "tend", "tends", "tended", "tending"),
        *("hasten", "hastens", "hastened", "excuse", "excuses", "excused", "reliance", "keeper", "keepers"),
        *("patrol", "patrols", "ledger", "ledgers", "hottest", "brake", "brakes", "braked", "chore", "chores"),
        *("shelf", "shelves", "bell", "bells", "asker", "askers", "shed", "sheds", "walker", "walkers", "beneath"),
    ]
)
"""Words that neither prose nor identifiers may have."""

NAMES = frozenset(
    [
        *("board", "site", "sites", "narrowed", "offers", "doubt", "doubts", "settle", "settled", "news", "meet"),
        *("marks", "choices", "standing", "standings", "promises", "person", "heard", "told", "money", "turns"),
        *("carrying", "elsewhere"),
    ]
)
"""Words that the product's identifiers may not have; in prose they mean what they mean in English."""

IDENTIFIERS = ("flight", "by_hand", "at_home", "take_back", "let_go", "again_after", "recheck_after")
"""Whole identifiers that the product may not have."""

PRODUCT = ("operator", "connector")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z'\u2019-]*$")
_CODE = re.compile(r"``[^`]*``|`[^`]*`")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(`]*[A-Z`0-9])")
_ITEM = re.compile(r"\s*(?:[-*]|\d+[.)]|:?[\w.* ()]{1,40}:)\s")
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|\*\*?|<!--.*?-->")
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|ruff:|pragma|SPDX|!)")
_FEWEST = 4
_SHARE_OF_PLAIN = 0.6
Finding = tuple[int, str]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of a text, each with the number of its first line."""
    started, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""]):
        is_new = not line.strip() or _ITEM.match(line)
        if is_new and lines:
            yield started, " ".join(lines)
            lines = []
        if line.strip():
            started = started if lines else number
            lines.append(line.strip())


def judge(text: str, line: int) -> Iterator[Finding]:
    """Yield the findings in a text of prose.

    Args:
        text: A docstring, a comment or a message.
        line: The line where it begins.
    """
    for offset, paragraph in paragraphs(text):
        prose = _CODE.sub("code", paragraph)
        for sentence in _SENTENCE.split(prose):
            tokens = [each for each in sentence.split() if re.search(r"\w", each)]
            if len(tokens) > LONGEST:
                yield line + offset, f"{len(tokens)} words: {_short(sentence)}"
            if OPENINGS.match(sentence):
                yield line + offset, f'opens with "What": {_short(sentence)}'
        for phrase in PHRASES.findall(prose):
            yield line + offset, f'"{phrase.lower()}": {_short(prose)}'
        for word in re.findall(r"[A-Za-z]+", prose):
            if word.lower() in WORDS:
                yield line + offset, f'"{word.lower()}": {_short(prose)}'


def is_message(text: str) -> bool:
    """Tell whether a string is prose: a few words, most of them plain."""
    tokens = text.split()
    plain = sum(_PLAIN.match(each.strip(".,;:!?()\"'")) is not None for each in tokens)
    return len(tokens) >= _FEWEST and plain >= _SHARE_OF_PLAIN * len(tokens)


def texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments, each with its first line."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            if id(node) in docstrings:
                yield node.lineno, _dedented(node.value)
            elif is_message(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            if is_message(text):
                yield node.lineno, text
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments, each with its first line; those in lines that follow each other are one."""
    begun, last, column, lines = 0, -1, -1, list[str]()
    for number, start, text in _comment_lines(source):
        if _DIRECTIVE.match(text):
            continue
        if lines and not (number == last + 1 and start == column):
            yield begun, "\n".join(lines)
            lines = []
        begun = begun if lines else number
        last, column = number, start
        lines.append(text.lstrip("#:").strip())
    if lines:
        yield begun, "\n".join(lines)


def identifiers(tree: ast.Module) -> dict[str, int]:
    """Return each name that the module has, with the line where it has it first."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in _names(node):
            found[name] = min(found.get(name, line), line)
    return found


def private_names(names: Mapping[str, int], *, is_product: bool) -> Iterator[Finding]:
    """Yield the identifiers that have a word they may not have."""
    banned = WORDS | NAMES if is_product else WORDS
    for name, line in names.items():
        words = [word.lower() for word in _PART.findall(name)]
        whole = is_product and name.strip("_").lower() in IDENTIFIERS
        if whole or not banned.isdisjoint(words):
            yield line, f"name {name}"


def findings(source: str, *, is_product: bool) -> list[Finding]:
    """Return all findings of a module, by line.

    Raises:
        SyntaxError: the source is not Python.
    """
    tree = ast.parse(source)
    found = list(private_names(identifiers(tree), is_product=is_product))
    for line, text in texts(source, tree):
        found += judge(text, line)
    return sorted(found)


def page_findings(text: str) -> list[Finding]:
    """Return all findings of a page of Markdown, by line: without code blocks, each cell of a table by itself."""
    is_code, is_fenced, lines, found = False, False, list[str](), list[Finding]()
    for number, line in enumerate(text.splitlines(), start=1):
        plain = _MARKUP.sub(r"\1", line)
        is_code = line.startswith("    ") and (is_code or not lines or not lines[-1])
        if line.lstrip().startswith("```"):
            is_fenced, plain = not is_fenced, ""
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", plain):
                found += judge(cell.strip(), number)
            plain = ""
        # A heading ends what is before it.
        lines.append("" if is_fenced or is_code or line.startswith("#") else plain)
    return sorted([*found, *judge("\n".join(lines), 1)])


def files(root: Path, chosen: Sequence[str]) -> list[Path]:
    """Return the Python files of these files and folders and the pages of docs, sorted, relative to the root."""
    paths = [root / each for each in chosen]
    found = [
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*.md" if path.name == "docs" else "*.py"))
    ]
    return sorted(path.relative_to(root) for path in found if NOT_READ.isdisjoint(path.relative_to(root).parts))


def worse(counts: Mapping[str, int], record: Mapping[str, int]) -> list[str]:
    """Return the files that have more findings than recorded."""
    return [path for path, count in counts.items() if count > record.get(path, 0)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print new findings, or all those of PATH; return 1 when a file has more than its record."""
    parser = argparse.ArgumentParser(description="Find long sentences and private words in code and pages.")
    parser.add_argument("--write", action="store_true", help="record today's counts, if their sum is no higher")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="print all findings of these files or folders")
    given = parser.parse_args(arguments)
    found = {
        str(path): page_findings(text) if path.suffix == ".md" else findings(text, is_product=path.parts[0] in PRODUCT)
        for path in files(ROOT, given.paths or FOLDERS)
        for text in [(ROOT / path).read_text(encoding="utf-8")]
    }
    counts = {path: len(each) for path, each in found.items() if each}
    record = json.loads(RECORD.read_text())
    if given.paths:
        shown = list(counts)
    elif given.write:
        if sum(counts.values()) > sum(record.values()):
            print(f"{sum(counts.values()):,} findings, {sum(record.values()):,} recorded", file=sys.stderr)
            return 1
        RECORD.write_text(json.dumps(counts, indent=1) + "\n")
        shown = []
    else:
        shown = worse(counts, record)
    for path in shown:
        print(*(f"{path}:{line}: {text}" for line, text in found[path]), sep="\n")
        print(f"{path}: {counts[path]} findings, {record.get(path, 0)} recorded")
    print(f"{sum(counts.values()):,} findings in {len(counts)} files, {sum(record.values()):,} recorded")
    return 1 if worse(counts, record) and not given.write else 0


def _short(text: str, length: int = 90) -> str:
    return text if len(text) <= length else text[:length].rsplit(" ", 1)[0] + " ..."


def _dedented(text: str) -> str:
    """Return a docstring with section bodies kept as items: each line of `Args` begins one."""
    return "\n".join(line.strip() for line in text.splitlines())


def _comment_lines(source: str) -> Iterator[tuple[int, int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.start[1], token.string


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name
        case ast.alias(name=name, asname=other):
            yield from name.split(".")
            yield from [other] if other else []
        case ast.ImportFrom(module=str(name)):
            yield from name.split(".")
        case _:
            pass


if __name__ == "__main__":
    sys.exit(main())
