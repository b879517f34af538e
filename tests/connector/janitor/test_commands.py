# SPDX-License-Identifier: Apache-2.0
"""The commands by hand: a dry run changes nothing, and what goes is what was asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig, key

from kvtier_connector import command
from kvtier_connector.janitor.commands import main
from kvtier_connector.store.index import Presence

CONNECTOR = Path(command.__file__).parents[1]


@pytest.fixture
def engine(rig: Rig) -> Engine:
    engine = rig.engine()
    engine.put_chain(*range(6))
    return engine


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_yes_nothing_is_removed(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "purge", rig.dir, "--all")
    assert (answer["dryRun"], answer["blocks"], answer["bytes"]) == (True, 6, 6 * BLOCK_BYTES)
    assert engine.there(range(6)) == list(range(6))


def test_with_yes_it_is_and_engines_learn_it(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "purge", rig.dir, "--all", "--yes")
    assert (answer["dryRun"], answer["blocks"]) == (False, 6)
    assert engine.there(range(6)) == []
    engine.store.synchronize()
    assert engine.store.state(key(0)) is not Presence.PRESENT


def test_a_prefix_goes_with_all_that_continues_it(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "purge", rig.dir, "--prefix", key(3).hash.hex(), "--yes")
    assert engine.there(range(6)) == [0, 1, 2]


def test_one_tenants_blocks_go_with_the_damaged_ones(
    engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.put(1, 2, tenant="alice")
    quarantine = engine.root / "tenants/alice/quarantine"
    quarantine.mkdir()
    (quarantine / "x").write_bytes(b"secret")
    answer = run_json(capsys, "purge", rig.dir, "--tenant", "alice", "--yes")
    assert (answer["blocks"], answer["generations"][0]["leftovers"]) == (2, 1)
    assert engine.there(range(6)) == list(range(6))
    assert list(quarantine.iterdir()) == []


def test_old_blocks_go_by_age(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    for path in engine.root.glob("blocks/00*/*/*"):
        os.utime(path, (0, 0))
    run_json(capsys, "purge", rig.dir, "--older-than", "7d", "--yes")
    assert engine.there(range(6)) == [1, 2, 3, 4, 5]


def test_one_generation_goes(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    other = rig.engine("bb")
    other.put(1)
    run_json(capsys, "purge", rig.dir, "--generation", "bb", "--yes")
    assert (other.there(range(6)), len(engine.there(range(6)))) == ([], 6)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--generation", "cc"], "holds no generation cc; kvtier inspect shows"),
        (["--prefix", "xyz"], "hash 'xyz': must be 6 to 64 hex digits"),
        (["--tenant", "alcie"], "holds no tenant alcie; kvtier inspect shows"),
        (["--tenant", "alice", "--generation", "bb"], "holds no tenant alice"),
    ],
)
def test_what_is_not_there_is_an_error(
    engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    engine.put(1, tenant="alice")
    rig.engine("bb").put(1, tenant="bob")
    assert main(["purge", str(rig.dir), *arguments]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--all", "--tenant", "alice"], ["--older-than", "0d"], ["--older-than", "x"]]
)
def test_an_unclear_purge_is_misuse(engine: Engine, rig: Rig, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["purge", str(rig.dir), *arguments])
    assert ended.value.code == 2
    assert len(engine.there(range(6))) == 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["purge", "DIR", "--tenant", "Bad!"], "'Bad!' cannot be a tenant: must be 1 to 32 of a-z, 0-9"),
        (["purge", "DIR", "--tenant", "../alice"], "'../alice' cannot be a tenant: must be"),
        (["purge", "DIR", "--all", "--threads", "0"], "'0' is no number from 1 to 64"),
        (["pin", "DIR", "--name", "system"], "HASH is missing"),
        (["pin", "DIR", "001122"], "--name is required"),
        (["gc", "DIR", "--max-bytes", "many"], "'many' is no size; write it as 100Gi"),
        (["gc", "DIR", "--low", "75"], "'75' is no share; write it as 90%"),
    ],
)
def test_a_word_that_cannot_be_meant_is_misuse_and_the_form_is_named(
    engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(rig.dir) if word == "DIR" else word for word in arguments])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["pin", "DIR", "0011", "--name", "system"], "hash '0011': must be 6 to 64 hex digits"),
        (["pin", "DIR", "00112233", "--name", "a b"], "name 'a b': must match"),
        (["unpin", "DIR", "a b"], "no such pin; there are none"),
        (["gc", "DIR", "--keep-previous", "-1"], "--keep-previous -1 must be 0 or more"),
        (["gc", "DIR", "--high", "50%", "--low", "60%"], "--low 0.6 must be below --high 0.5"),
        (["gc", "DIR", "--current", "cc", "--keep-previous", "0"], "holds no generation cc; kvtier inspect shows"),
        (["gc", "DIR", "--config", "DIR/blob"], "not text"),
        (["gc", "DIR", "--config", "DIR/none"], "No such file"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_removed(
    engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (rig.dir / "blob").write_bytes(b"\xff")
    assert main([word.replace("DIR", str(rig.dir)) for word in arguments]) == 1
    assert complaint in capsys.readouterr().err
    assert engine.there(range(6)) == list(range(6))


def test_a_generation_named_through_a_link_is_purged(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").symlink_to(engine.root)
    assert run_json(capsys, "purge", tmp_path / "short", "--all", "--yes")["blocks"] == 6
    assert engine.there(range(6)) == []


def test_a_pin_is_written_listed_and_taken_away(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = key(2).hash.hex()
    answer = run_json(capsys, "pin", engine.root, pinned, "--name", "system")
    assert answer == {"name": "system", "hash": pinned, "blocks": 1}
    assert run_json(capsys, "pin", rig.dir) == {"system": pinned}
    assert run_json(capsys, "unpin", rig.dir, "system") == {}


def test_a_name_is_not_pinned_twice(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pin", str(rig.dir), key(1).hash.hex(), "--name", "a"]) == 0
    assert main(["pin", str(rig.dir), key(2).hash.hex(), "--name", "a"]) == 1
    assert main(["unpin", str(rig.dir), "b"]) == 1
    assert "no such pin; a" in capsys.readouterr().err


def test_a_sweep_by_hand_keeps_the_limits_given(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-bytes", str(6 * BLOCK_BYTES), "--high", "80%", "--low", "50%")
    assert run_json(capsys, "gc", rig.dir, *limits, "--dry-run")["evicted"] == {"budget": 3}
    assert engine.there(range(6)) == list(range(6))
    assert run_json(capsys, "gc", rig.dir, *limits)["evicted"] == {"budget": 3}
    assert engine.there(range(6)) == [0, 1, 2]
    assert not (rig.dir / "brake.json").exists()


def test_a_sweep_without_limits_removes_no_block(engine: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.engine("bb")
    assert run_json(capsys, "gc", rig.dir)["evicted"] == {}
    assert (engine.root.exists(), len(engine.there(range(6)))) == (True, 6)


def test_several_tiers_are_not_confused(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        Engine(tmp_path / name, "aa", rig.clock)
    assert main(["gc", str(tmp_path)]) == 1
    assert "holds several tiers; name one of" in capsys.readouterr().err


def test_a_directory_without_a_tier_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(tmp_path)]) == 1
    assert "holds no tier" in capsys.readouterr().err


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {connector!r})
from kvtier_connector.command import main
sys.exit(main({words!r}))
"""


def kvtier(*words: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.format(blocked=set(blocked), connector=str(CONNECTOR), words=list(words))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_blocks_are_looked_after_without_the_operators_libraries(engine: Engine, rig: Rig) -> None:
    blocked = ("kopf", "yaml", "pydantic", "kubernetes", "vllm", "torch", "aiohttp")
    for words in (["inspect", str(rig.dir)], ["check", str(rig.dir)], ["purge", str(rig.dir), "--all"]):
        done = kvtier(*words, blocked=blocked)
        assert (done.returncode, done.stderr) == (0, "")
    refused = kvtier("render", "x.yaml", blocked=blocked)
    assert (refused.returncode, "pip install 'kvtier[operator]'" in refused.stderr) == (1, True)


def test_the_operators_commands_work_without_those_of_the_janitor() -> None:
    done = kvtier("version", blocked=("numpy", "blake3", "vllm", "torch", "cryptography"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("blocked", [("numpy", "blake3", "vllm", "torch"), ("kvtier_operator", "yaml", "pydantic")])
def test_every_command_is_listed_whatever_is_installed(blocked: tuple[str, ...]) -> None:
    listed = kvtier("--help", blocked=blocked)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert all(f"  {name} " in listed.stdout for name in (*command.STORAGE, *command.CLUSTER))


def test_the_operators_commands_that_are_listed_are_those_it_has() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_operator", "--help"], capture_output=True, text=True, check=True
    )
    assert set(re.findall(r"^    ([a-z]+)  ", done.stdout, re.MULTILINE)) == {*command.CLUSTER, "check"}


@pytest.mark.parametrize(("words", "said"), [([], "a command is missing"), (["prune"], "prune is unknown")])
def test_a_word_that_is_no_command_is_refused_with_those_there_are(words: list[str], said: str) -> None:
    done = kvtier(*words, blocked=())
    assert (done.returncode, said in done.stderr, "purge" in done.stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("check", "blake3", "connector"), ("gc", "numpy", "janitor"), ("plan", "yaml", "operator")],
)
def test_what_is_missing_is_named_with_the_extra_that_brings_it(name: str, missing: str, extra: str) -> None:
    done = kvtier(name, "--help", blocked=(missing,))
    assert (done.returncode, done.stderr) == (
        1,
        f"kvtier {name}: {missing} is not installed; pip install 'kvtier[{extra}]'\n",
    )


def test_an_image_without_the_operator_says_so() -> None:
    done = kvtier("render", "x.yaml", blocked=("kvtier_operator",))
    assert (done.returncode, "kvtier_operator is not installed" in done.stderr) == (1, True)


def test_without_the_package_of_a_checksum_a_check_says_what_is_missing(engine: Engine, rig: Rig) -> None:
    done = kvtier("check", str(rig.dir), blocked=("cryptography",))
    assert (done.returncode, "pip install cryptography" in done.stdout) == (1, True)
