# SPDX-License-Identifier: Apache-2.0
"""What is rendered for LMCache, read by its own classes and tried on a Redis: `make test-backends` brings both."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_backends import environment, transfer_config

from kvtier_localcluster.ports import free_port

pytest.importorskip("lmcache", reason="`make test-backends` brings LMCache along")

ROOT = Path(__file__).parents[2]
PASSWORD = "grün@/#:%"


SCRIPTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.mark.parametrize("case", ["lmcache", "lmcache-trial", "hybrid-lmcache"])
def test_lmcaches_own_class_reads_the_environment(case: str) -> None:
    given = {name: value for name, value in environment(case).items() if isinstance(value, str)}
    read, _ = run_script(SCRIPTS["ASK_LMCACHE"], "", given)
    assert str(read["chunk_size"]) == given["LMCACHE_CHUNK_SIZE"]
    assert read["max_local_cpu_size"] == float(given["LMCACHE_MAX_LOCAL_CPU_SIZE"])
    assert (read["remote_url"], read["remote_serde"]) == (given.get("LMCACHE_REMOTE_URL"), "naive")
    assert (read["local_cpu"], read["save_decode_cache"]) == (True, False)
    assert read["pre_caching_hash_algorithm"] == "sha256_cbor"
    if case == "lmcache":
        assert read["remote_storage_plugins"] == ["kvtier"]
        assert read["extra_config"] == json.loads(given["LMCACHE_EXTRA_CONFIG"])
        assert (read["local_disk"], read["max_local_disk_size"]) == ("/var/cache/kvtier/", 100.0)


def run_script(script: str, argument: str, given: dict[str, str]) -> tuple[Any, str]:
    """Run a script with an argument and these variables, and return the JSON that it prints last, and all it prints."""
    path = f"{ROOT / 'connector'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", script, argument],
        env={**given, "PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@pytest.fixture
def redis() -> Iterator[int]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server")
    port = free_port()
    words = ["--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    with subprocess.Popen([program, *words], stdout=subprocess.PIPE, text=True) as process:
        while "Ready to accept" not in (line := process.stdout.readline()):
            assert line, "the Redis has ended"
        yield port
        process.terminate()


def ask_redis(port: int, what: str) -> tuple[dict[str, Any], str]:
    """Have LMCache's own backend store and load a chunk with what is rendered, and return its answers and its log."""
    given = {name: value for name, value in environment("lmcache").items() if isinstance(value, str)}
    given["LMCACHE_EXTRA_CONFIG"] = given["LMCACHE_EXTRA_CONFIG"].replace("redis.cache:6379", f"127.0.0.1:{port}")
    given |= {"LMCACHE_MAX_LOCAL_CPU_SIZE": "0.05", "LMCACHE_RESP_PASSWORD": PASSWORD}
    del given["LMCACHE_LOCAL_DISK"]
    return run_script(SCRIPTS["ASK_REDIS"], what, given)


def test_a_chunk_goes_through_a_redis_with_a_password_that_no_log_has(redis: int) -> None:
    told, log = ask_redis(redis, "store")
    assert told == {"before": False, "after": True, "loaded": True}
    assert PASSWORD not in log
    # What it looks like in a URL.
    assert "gr%C3%BCn" not in log
    another, _ = ask_redis(redis, "load")
    assert another == {"before": True, "after": True, "loaded": True}


def test_a_redis_that_is_not_there_is_a_miss() -> None:
    told, log = ask_redis(1, "load")
    assert told == {"before": False, "after": False, "loaded": False}
    assert PASSWORD not in log


def ask_client(port: int) -> list[Any]:
    """Have the client of LMCache's cache server look, store, look and load, as it is rendered."""
    extra = transfer_config("lmcache-processes")["kv_connector_extra_config"]
    words = shlex.split(extra["lmcache.mp.autostart.server_args"])
    adapter = json.loads(words[words.index("--l2-adapter") + 1])
    assert adapter["adapter_params"] == {"host": "redis.cache", "port": 6379}
    adapter["adapter_params"] = {"host": "127.0.0.1", "port": port}
    return list(run_script(SCRIPTS["ASK_CLIENT"], json.dumps(adapter), {"LMCACHE_RESP_PASSWORD": PASSWORD})[0])


def test_the_cache_servers_client_stores_and_loads(redis: int) -> None:
    told, loaded = ask_client(redis)
    assert told == [[True, [False, False]], [True, [True]], [True, [True, False]], [True, [True, False, False]]]
    assert loaded == "12345678"
