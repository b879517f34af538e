# SPDX-License-Identifier: Apache-2.0
"""Finds linter rules and type errors that are silenced without a reason: ``python .ci/suppressions.py [FILE...]``.

The reason stands in the same line: ``# noqa: S104  the kubelet is outside``. Without FILE, every source of the checkout
is read.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CODE = r"[A-Z]{1,4}[0-9]{2,4}"
_SILENCED = re.compile(
    rf"(?:(?:ruff|flake8):\s*)?noqa\b(?:\s*:\s*{_CODE}(?:[,\s]+{_CODE})*\b)?|type:\s*ignore\b(?:\[[^\]]*\])?",
    re.IGNORECASE,
)


def unexplained(source: str) -> list[tuple[int, str]]:
    """Return the comments that silence something and say no more, each with its line."""
    comments = (
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    return [
        (line, comment)
        for line, comment in comments
        if _SILENCED.search(comment) and not re.search(r"[^\W_]", _SILENCED.sub("", comment))
    ]


def sources() -> list[Path]:
    """Return the Python files that git knows or would take."""
    # safe.directory: in CI the checkout often belongs to another user, and git would refuse to read it
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def main(arguments: Sequence[str]) -> int:
    """Print what has no reason; return 1 if there is any."""
    found = [
        f"{path}:{line}: {comment}"
        for path in ([Path(each) for each in arguments] or sources())
        for line, comment in unexplained(path.read_text(encoding="utf-8"))
    ]
    if found:
        print("\n".join(found), "give the reason behind it, in the same line", sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
