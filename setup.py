# SPDX-License-Identifier: Apache-2.0
"""Puts CRD, chart, samples and the rendered operator into the wheel, from where `kvtier install` takes them."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CARRIED = ("charts/kvtier", "crds/kvcachetier.yaml", "crds/samples", "docs/operator.yaml")
"""What `kvtier_cli.install` finds in a checkout, and in an installed package below `carried/`."""


class BuildWithManifests(build_py):
    """Copies them beside the command; an editable installation reads them where they are."""

    def run(self) -> None:
        """Build as usual, and copy what there is: an image that is built from packages alone has none."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "kvtier_cli" / "carried"
        shutil.rmtree(target, ignore_errors=True)
        for name in CARRIED:
            source, copy = ROOT / name, target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy)
            elif source.exists():
                shutil.copy(source, copy)


setup(cmdclass={"build_py": BuildWithManifests})
