# SPDX-License-Identifier: Apache-2.0
"""What `make check` counts and refuses: size, shape, prose, rules silenced without a reason, missing licences."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import ci_tools
import pytest
import yaml

import kvtier_connector
import kvtier_operator

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

house = ci_tools.load("house")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_lines_and_modules_are_counted_by_folder_without_tests(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one/__init__.py": "",
            "one/a.py": "x = 1\n# why\n",
            "one/b.py": "y = 2\n",
            "one/inner/c.py": "z = 3\n",
            "one/tests/test_a.py": "assert True\n",
        },
    )
    assert house.packages(tmp_path, ["one"]) == [
        house.Package("one", "one", 3, 2, 0),
        house.Package("one", "one/inner", 1, 1, 0),
    ]


def test_a_public_class_name_in_two_modules_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "one/a.py": "class Row:\n    class Inner: ...\nclass _Own: ...\nclass Only: ...\n",
            "two/b.py": "class Row: ...\nclass _Own: ...\nclass Inner: ...\n",
        },
    )
    assert house.shared_names(tmp_path, ["one", "two"]) == {"Row": ["one/a.py", "two/b.py"]}


@pytest.mark.parametrize(("imports", "expected"), TABLES["cycles"])
def test_modules_that_import_each_other_are_found(imports: dict[str, list[str]], expected: list[list[str]]) -> None:
    assert house.cycles(imports) == expected


def test_the_command_fails_and_keeps_its_record_when_a_figure_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"one/a.py": "x = 1\n" * 3})
    record = tmp_path / "house.json"
    for name, value in {"ROOT": tmp_path, "RECORD": record, "LINES": {"one": 2}, "DISTRIBUTIONS": {}}.items():
        monkeypatch.setattr(house, name, value)
    monkeypatch.setattr(house, "product_imports", dict)
    record.write_text("{}")
    assert house.main(["--write"]) == 1
    assert "lines of one: 3, at most 2" in capsys.readouterr().err
    assert record.read_text() == "{}"
    record.write_text('{"lines of one": 4}')
    assert house.main(["--write"]) == 0
    assert json.loads(record.read_text()) == {"lines of one": 3}


def test_imports_are_read_texts_silence_nothing_and_all_is_one_release_under_one_licence() -> None:
    assert "kvtier_operator.plan" in {name.rpartition(".")[0] for name in house.product_imports()}
    assert suppressions.unexplained('value = "# noqa: S104"\n"""\n# type: ignore\n"""\n') == []
    assert [
        str(path) for path in sources() if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ] == []
    assert kvtier_operator.__version__ == kvtier_connector.__version__


suppressions = ci_tools.load("suppressions")


@pytest.mark.parametrize("comment", TABLES["without_a_reason"])
def test_what_is_silenced_without_a_reason_is_found_with_its_line(comment: str) -> None:
    assert suppressions.unexplained(f'"""Text."""\nvalue = 1  {comment}\n') == [(2, comment)]


@pytest.mark.parametrize("comment", TABLES["with_a_reason"])
def test_a_reason_in_the_same_line_is_enough(comment: str) -> None:
    assert suppressions.unexplained(f"value = 1  {comment}\n") == []


def test_the_command_names_the_place_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import os  # noqa: F401  a name for others\n")
    bad.write_text("import sys\nimport os  # noqa: F401\n")
    assert suppressions.main([str(good)]) == 0
    assert suppressions.main([str(good), str(bad)]) == 1
    assert f"{bad}:2: # noqa: F401\n" in capsys.readouterr().err


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
        *((source, [tuple(each) for each in expected]) for source, expected in TABLES["private_words"]),
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
        *TABLES["plain"],
    ],
)
def test_plain_english_is_not(source: str) -> None:
    assert found(source) == []


def test_private_words_are_refused_in_the_product_and_a_name_counts_once_in_a_module() -> None:
    source = "dashboard = board(site)\n"
    assert found(source, is_product=False) == []
    assert found(source) == [(1, "name board"), (1, "name site")]
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


ROOT = Path(__file__).resolve().parents[1]


def sources() -> list[Path]:
    # safe.directory: in CI the checkout often belongs to another user, and git would refuse to read it
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT)
    return [ROOT / name for name in listed.decode().splitlines() if (ROOT / name).exists()]


@pytest.mark.parametrize("folder", ["operator", "connector"])
def test_a_folder_named_like_a_module_of_the_standard_library_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
