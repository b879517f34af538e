# SPDX-License-Identifier: Apache-2.0
"""Gathers the pages of the documentation's site: ``python .ci/site.py`` builds it, with any dead link an error.

Pages lie where they are read on a code host too: README.md, docs, and references beside the code. They are copied as a
tree, so that the links between them stay as they are. Linked pictures are copied as well; any other link becomes
a link to the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/kvtier/kvtier"
SOURCE, SITE = ROOT / ".kvtier" / "site-pages", ROOT / ".kvtier" / "site"
STYLE = ".ci/site.css"
_LINK = re.compile(r"(\]\()((?!https?://|#|mailto:)[^)#\s]+)(#[^)\s]*)?(\))")
_PICTURE = re.compile(r"^(!\[[^\]]*\]\(([^)\s]+\.(?:png|svg))\))$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages, relative to the root of the repository."""
    named = ["README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "GOVERNANCE.md", "CODE_OF_CONDUCT.md"]
    named += ["ROADMAP.md", "crds/API.md", "charts/kvtier/README.md", "e2e/bench/README.md"]
    found = [*named, "e2e/localcluster/README.md", "connector/FORMAT.md", "connector/METRICS.md"]
    found += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    found += ["e2e/backends/results/README.md", "e2e/matrix/results/README.md"]
    for folder in ("bench", "backends"):
        found += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "e2e" / folder / "results").glob("*/*.md"))]
    return [Path(each) for each in found]


def gather(target: Path) -> None:
    """Write the pages and what they show into an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    known = set(pages())
    shown: set[Path] = set()
    for page in sorted(known):

        def moved(link: re.Match[str], page: Path = page) -> str:
            path = Path(os.path.normpath(page.parent / link[2]))
            if path in known:
                return link[0]
            if path.suffix in {".png", ".svg"}:
                shown.add(path)
                return link[0]
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{link[1]}{REPOSITORY}/{kind}/main/{path}{link[3] or ''}{link[4]}"

        file = target / page
        file.parent.mkdir(parents=True, exist_ok=True)
        # A picture is as wide as the text; its link shows it in full.
        file.write_text(_PICTURE.sub(r"[\1](\2)", _LINK.sub(moved, (ROOT / page).read_text())))
    for path in shown:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target / path)
    shutil.copy(ROOT / STYLE, target / "site.css")


def main() -> int:
    """Gather the pages and build the site; a warning is an error."""
    gather(SOURCE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={SITE}"]
    done = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if done.returncode == 0:
        print(f"{SITE / 'index.html'}: {len(pages())} pages")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
