# SPDX-License-Identifier: Apache-2.0
"""`make prose`: a file with more long sentences or private words than recorded fails `make check`."""

from __future__ import annotations

import json
from pathlib import Path

import ci_tools
import pytest

prose = ci_tools.load("prose")
LONG = " ".join(["Word", *["word"] * 30])


def found(source: str, *, is_product: bool = True) -> list[tuple[int, str]]:
    return [(line, text.partition(":")[0]) for line, text in prose.findings(source, is_product=is_product)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'"""{LONG}."""\n', [(1, "31 words")]),
        (f'x = 1\n"""{LONG}."""\n', [(2, "31 words")]),
        (f'def f():\n    """Read.\n\n    Short. {LONG}.\n    """\n', [(4, "31 words")]),
        (f"# {LONG[:80]}\n# {LONG[80:]}\n", [(1, "31 words")]),
        (f'error("{LONG[:80]}"\n      "{LONG[80:]}")\n', [(1, "31 words")]),
        (f'error(f"{{name}} {LONG}")\n', [(1, "32 words")]),
        ('"""What is kept of an object."""\n', [(1, 'opens with "What"')]),
        ("# Nobody waits for whoever writes.\n", [(1, '"nobody"'), (1, '"whoever"')]),
        ('error("the crew is told of a lost worker")\n', [(1, '"crew"'), (1, '"is told of"')]),
        ("# one of which is open\n", [(1, '"of which"')]),
        ("def bury(row: int) -> None: ...\n", [(1, "name bury")]),
        ("x = 1\ny = self._mover_count\n", [(2, "name _mover_count")]),
        ("class TaskBoard: ...\n", [(1, "name TaskBoard")]),
        ("from tier import site as where\n", [(1, "name site")]),
        ("import a\nimport tier.keeper\n", [(2, "name keeper")]),
        ("run(by_hand=True)\n", [(1, "name by_hand")]),
    ],
)
def test_a_long_sentence_or_a_private_word_is_found_with_its_line(source: str, expected: list[tuple[int, str]]) -> None:
    assert found(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        f'"""{LONG[:60]}. {LONG[:90]}."""\n',
        f'"""Read.\n\nArgs:\n    one: {LONG[:70]}\n    two: {LONG[:70]}\n"""\n',
        f'"""Kinds:\n\n- {LONG[:90]}\n- {LONG[:90]}\n"""\n',
        "# What is open?\n",
        "# `nobody` owns the file\n# ``mover``\n",
        "# noqa: E501  nobody\n",
        'run("nobody")\n',
        'pattern = "sum(rate(a[5m])) by (b) / sum(rate(c[5m])) by (d) > 0"\n',
        "in_flight = whole = attend = 1\n",
        "# requests in flight settle on a site in standing order\n",
    ],
)
def test_plain_english_is_not(source: str) -> None:
    assert found(source) == []


def test_words_that_are_names_of_things_elsewhere_are_refused_in_the_product_only() -> None:
    source = "dashboard = board(site)\n"
    assert found(source, is_product=False) == []
    assert found(source) == [(1, "name board"), (1, "name site")]


def test_a_name_counts_once_in_a_module() -> None:
    assert found("mover = 1\nprint(mover)\nmover.start()\n") == [(1, "name mover")]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.py").write_text("# nobody\n# reads\n\n# whoever\n")
    for name, value in {"ROOT": tmp_path, "RECORD": tmp_path / "prose.json", "FOLDERS": ("one",)}.items():
        monkeypatch.setattr(prose, name, value)
    return tmp_path


@pytest.mark.parametrize(("recorded", "status"), [(1, 1), (2, 0), (3, 0)])
def test_a_file_with_more_than_its_record_fails(
    checkout: Path, capsys: pytest.CaptureFixture[str], recorded: int, status: int
) -> None:
    (checkout / "prose.json").write_text(json.dumps({"one/a.py": recorded}))
    assert prose.main([]) == status
    assert ('one/a.py:4: "whoever": whoever\n' in capsys.readouterr().out) == bool(status)


def test_a_record_moves_with_the_files_and_its_sum_does_not_rise(checkout: Path) -> None:
    record = checkout / "prose.json"
    record.write_text('{"one/b.py": 2}')
    assert prose.main(["--write"]) == 0
    assert json.loads(record.read_text()) == {"one/a.py": 2}
    (checkout / "one/b.py").write_text("# somebody\n")
    assert prose.main(["--write"]) == 1
    assert json.loads(record.read_text()) == {"one/a.py": 2}


def test_all_findings_of_a_folder_are_printed_on_request(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "prose.json").write_text('{"one/a.py": 2}')
    assert prose.main(["one"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == 'one/a.py:1: "nobody": nobody reads'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"# Title\n\n{LONG[:90]}\n{LONG[90:]}.\n", [(3, "31 words")]),
        (f"- {LONG[:60]}.\n- **{LONG}**\n", [(2, "31 words")]),
        (f"| a | {LONG} |\n", [(1, "31 words")]),
        ("A [link to what nobody reads](page.md).\n", [(1, '"nobody"')]),
        (f"    {LONG}\n\n```\n{LONG}\n```\n\nShort: `nobody`.\n", []),
        (f"{LONG[:100]}\n\n## {LONG[:60]}\n{LONG[:100]}\n", []),
    ],
)
def test_pages_are_read_without_their_code(text: str, expected: list[tuple[int, str]]) -> None:
    assert [(line, found.partition(":")[0]) for line, found in prose.page_findings(text)] == expected
