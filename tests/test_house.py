# SPDX-License-Identifier: Apache-2.0
"""`make house`: a figure over its limit and over its record fails `make check`."""

from __future__ import annotations

import json
from pathlib import Path

import ci_tools
import pytest

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


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}, [["a", "b", "c"]]),
        ({"a": ["b", "c"], "b": ["a"], "c": ["d"], "d": ["c"]}, [["a", "b"], ["c", "d"]]),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, []),
    ],
)
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


def test_the_imports_of_the_product_are_read() -> None:
    assert "kvtier_operator.plan" in {name.rpartition(".")[0] for name in house.product_imports()}
