# SPDX-License-Identifier: Apache-2.0
"""What one process has compiled is used by others only as it was, and never keeps an engine from starting."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kvtier_connector.compile_cache import digest_of, main, restore
from kvtier_localcluster.ports import free_port

ENGINE = """
import http.server, os, pathlib, sys
for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
    place = pathlib.Path(os.environ[name]) / "torch_compile_cache" / "ab"
    place.mkdir(parents=True)
    (place / "graph.py").write_text(name)
if {is_serving}:
    http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def write(tmp_path: Path, *, is_serving: bool = True) -> tuple[int, dict[str, object]]:
    port = free_port()
    script = ENGINE.format(is_serving=is_serving, port=port)
    words = ["--caches", str(tmp_path / "caches"), "--scratch", str(tmp_path / "scratch")]
    words += ["--url", f"http://127.0.0.1:{port}/", "--result", str(tmp_path / "result"), "--seconds", "90"]
    code = main(["write", *words, "--", sys.executable, "-c", script])
    found: dict[str, object] = json.loads((tmp_path / "result").read_text())
    return code, found


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    code, found = write(tmp_path)
    assert code == 0
    assert found["files"] == 2
    return tmp_path / "caches" / str(found["digest"])


def restored(cache: Path, target: Path) -> str:
    target.mkdir()
    return restore(cache.parent, cache.name, target)


def test_what_one_engine_compiled_lies_where_the_next_one_looks(cache: Path, tmp_path: Path) -> None:
    assert restored(cache, tmp_path / "next").endswith(": restored")
    found = {str(path.relative_to(tmp_path / "next")) for path in (tmp_path / "next").rglob("*") if path.is_file()}
    assert found == {"vllm/torch_compile_cache/ab/graph.py", "torchinductor/torch_compile_cache/ab/graph.py"}
    assert digest_of(cache) == cache.name


def test_a_second_job_with_the_same_result_changes_nothing(cache: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "scratch")
    assert write(tmp_path)[0] == 0
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("fault", ["changed", "added", "removed", "renamed"])
def test_a_cache_that_was_tampered_with_is_not_used(cache: Path, tmp_path: Path, fault: str) -> None:
    graph = cache / "vllm/torch_compile_cache/ab/graph.py"
    match fault:
        case "changed":
            graph.write_text("import os")
        case "added":
            (cache / "vllm/more.py").write_text("import os")
        case "removed":
            graph.unlink()
        case _:
            graph.rename(graph.with_name("other.py"))
    said = restored(cache, tmp_path / "next")
    assert "is not used; the engine compiles anew" in said
    assert list((tmp_path / "next").iterdir()) == []


def test_a_link_is_never_followed(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("import os")
    (cache / "vllm/link.py").symlink_to(tmp_path / "secret")
    (cache / "triton").symlink_to(tmp_path)
    assert restored(cache, tmp_path / "next").endswith(": restored")
    assert not (tmp_path / "next/vllm/link.py").exists()
    assert not (tmp_path / "next/triton").exists()


def test_an_engine_starts_without_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--caches", str(tmp_path), "--digest", "0" * 64, "--target", str(tmp_path / "next")]
    assert main(["restore", *words]) == 0
    assert "there is no such cache; the engine compiles anew" in capsys.readouterr().out


def test_an_engine_that_ends_writes_nothing_and_says_so(tmp_path: Path) -> None:
    code, found = write(tmp_path, is_serving=False)
    assert (code, found) == (1, {"problem": "the engine ended with 0 before it served"})
    assert not (tmp_path / "caches").exists()
