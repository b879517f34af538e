# SPDX-License-Identifier: Apache-2.0
"""The command as a person types it, in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier_cli.app import main


class Command:
    """Called with words, it runs ``kvtier`` and returns what that prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""
        """Of the last run."""

    def __call__(self, *words: object, code: int | None = 0) -> str:
        self._capsys.readouterr()
        found = main([*map(str, words)])
        printed, self.err = self._capsys.readouterr()
        assert code in {found, None}, (words, printed, self.err)
        return printed

    def fails(self, *words: object, code: int = 1) -> str:
        self(*words, code=code)
        return self.err

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "-o", "json", code=code))
