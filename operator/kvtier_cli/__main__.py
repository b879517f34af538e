# SPDX-License-Identifier: Apache-2.0
"""``python -m kvtier_cli`` is ``kvtier``."""

from __future__ import annotations

import sys

from kvtier_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
