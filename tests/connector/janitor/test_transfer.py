# SPDX-License-Identifier: Apache-2.0
"""A generation goes to another volume as a stream of tar, whole or its hottest blocks, each verified on arrival."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig, key

from kvtier_cli.app import main
from kvtier_connector.contract_janitor import VLLM_FS_LAYOUT, JanitorConfig, encode
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor import piping, transfer
from kvtier_connector.store.check import check
from kvtier_connector.store.format import FORMAT_VERSION
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import block_path

CHAIN = 6


@pytest.fixture
def engine(rig: Rig) -> Engine:
    engine = rig.engine()
    engine.put_chain(*range(CHAIN))
    engine.put(1, tenant="alice")
    return engine


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main([*map(str, words), "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def export(capsys: pytest.CaptureFixture[str], rig: Rig, file: Path, *words: object) -> Any:
    return run(capsys, "export", rig.dir, file, *words)


def test_what_arrives_is_what_was_there(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "aa.tar", tmp_path / "green"
    found = export(capsys, rig, file)
    assert (found["blocks"], found["bytes"], found["leftOut"]) == (7, 7 * BLOCK_BYTES, 0)
    dry = run(capsys, "import", file, target)
    assert (dry["dryRun"], dry["blocks"]) == (True, 7)
    assert not target.exists()
    assert run(capsys, "import", file, target, "--yes")["blocks"] == 7
    assert check(target / "aa") == []
    for path in [*(block_path(key(number)) for number in range(CHAIN)), block_path(key(1, "alice"))]:
        assert (target / "aa" / path).read_bytes() == (engine.root / path).read_bytes()
        assert (target / "aa" / path).stat().st_mtime_ns == (engine.root / path).stat().st_mtime_ns
    again = run(capsys, "import", file, target, "--yes")
    assert (again["blocks"], again["present"]) == (0, 7)


def test_a_block_that_is_damaged_on_the_way_is_left_out_and_named(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "aa.tar", tmp_path / "green"
    export(capsys, rig, file)
    damaged = block_path(key(2))
    content = bytearray(file.read_bytes())
    place = content.index((engine.root / damaged).read_bytes())
    content[place + BLOCK_BYTES - 1] ^= 1
    file.write_bytes(content)
    assert run(capsys, "import", file, target, code=1)["damaged"] == [{"path": damaged, "kind": "checksum"}]
    found = run(capsys, "import", file, target, "--yes", code=1)
    assert (found["blocks"], found["damaged"]) == (6, [{"path": damaged, "kind": "checksum"}])
    assert not (target / "aa" / damaged).exists()
    assert check(target / "aa", partial_age_seconds=0) == []


@pytest.mark.parametrize("kept", [0.3, 0.7, 0.99])
def test_a_stream_that_was_cut_off_is_told_of_and_gone_on_with(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: float
) -> None:
    file, target = tmp_path / "aa.tar", tmp_path / "green"
    export(capsys, rig, file)
    whole = file.read_bytes()
    # What follows the end of an archive is padding.
    end = whole.rindex(transfer.END.encode())
    file.write_bytes(whole[: int(end * kept)])
    found = run(capsys, "import", file, target, "--yes", code=1)
    assert found["problem"]
    assert check(target / "aa", partial_age_seconds=0) == []
    file.write_bytes(whole)
    assert run(capsys, "import", file, target, "--yes")["present"] == found["blocks"]
    assert len(list((target / "aa").rglob("*.kvb"))) == 7
    assert engine.root.exists()


def test_the_hottest_blocks_are_beginnings_that_were_used_last(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = rig.engine()
    engine.put_chain(*range(4))
    rig.clock.move(1000)
    engine.put_chain(*range(10, 14))
    found = export(capsys, rig, tmp_path / "hot.tar", "--hottest", str(6 * BLOCK_BYTES))
    assert (found["blocks"], found["leftOut"]) == (6, 2)
    run(capsys, "import", tmp_path / "hot.tar", tmp_path / "green", "--yes")
    there = [n for n in (*range(4), *range(10, 14)) if (tmp_path / "green/aa" / block_path(key(n))).exists()]
    assert there == [0, 1, 10, 11, 12, 13]


def test_blocks_of_another_identity_are_not_mixed_in(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "aa.tar", tmp_path / "green"
    export(capsys, rig, file)
    (target / "aa").mkdir(parents=True)
    document = json.loads((engine.root / "tier.json").read_text())
    document["identity"]["model_name"] = "another"
    (target / "aa" / "tier.json").write_text(json.dumps(document))
    for words in ([], ["--yes"]):
        assert main(["import", str(file), str(target), *words]) == 1
    assert list(target.rglob("*.kvb")) == []


def stream(*members: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize(
    "made",
    [b"", b"no tar at all" * 100, stream(("x", b"y")), stream((transfer.HEAD, b"{")), stream((transfer.HEAD, b"{}"))],
)
def test_what_is_no_export_is_refused_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: bytes
) -> None:
    (tmp_path / "x.tar").write_bytes(made)
    assert main(["import", str(tmp_path / "x.tar"), str(tmp_path / "green"), "--yes"]) == 1
    assert capsys.readouterr().err
    assert not (tmp_path / "green").exists()


def test_an_export_that_is_refused_or_cut_off_leaves_no_file_in_the_way_of_the_next(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aa.tar"
    rig.engine("bb").put(1)
    assert main(["export", str(rig.dir), str(file)]) == 1
    assert "holds several generations; name one with --generation: aa, bb" in capsys.readouterr().err
    assert not file.exists()

    def interrupted(*_: object, to: io.BufferedWriter, **__: object) -> None:
        to.write(b"begun")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "export", interrupted)
        main(["export", str(rig.dir), str(file), "--generation", "aa"])
    assert not file.exists()
    assert export(capsys, rig, file, "--generation", "aa")["blocks"] == 7
    assert main(["export", str(rig.dir), str(file), "--generation", "aa"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert file.stat().st_size > 0


TIER = {"format": FORMAT_VERSION, "digest": "aa", "identity": {"model": "test"}}
HEAD = {"format": 1, "generation": "aa", "tier": TIER}


@pytest.mark.parametrize(
    ("head", "field"),
    [
        ({**HEAD, "generation": 123}, "generation"),
        ({**HEAD, "generation": ["aa"]}, "generation"),
        ({**HEAD, "generation": "../aa"}, "generation"),
        ({**HEAD, "generation": "bb"}, "tier.digest"),
        ({**HEAD, "tier": {**TIER, "digest": ["aa"]}}, "tier.digest"),
        ({**HEAD, "tier": {**TIER, "format": 1}}, "tier.format"),
        ({**HEAD, "tier": {**TIER, "identity": {"engine.epoch": "w1"}}}, "tier.identity.engine.epoch"),
        ("[" * 200_000, "is no JSON"),
    ],
)
def test_a_head_that_does_not_agree_with_itself_is_named_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: Any, field: str
) -> None:
    text = head if isinstance(head, str) else json.dumps(head)
    (tmp_path / "x.tar").write_bytes(stream((transfer.HEAD, text.encode())))
    assert main(["import", str(tmp_path / "x.tar"), str(tmp_path / "green"), "--yes"]) == 1
    said = capsys.readouterr().err
    assert f"{transfer.HEAD}: {field}" in said
    assert "export it again" in said
    assert not (tmp_path / "green").exists()


def stamped(engine: Engine, stamp: str) -> io.BytesIO:
    """Return a stream with one block that was written at this time."""
    made = io.BytesIO()
    path = block_path(key(1))
    block = (engine.root / path).read_bytes()
    members = ((transfer.HEAD, json.dumps(HEAD).encode()), (path, block), (transfer.END, b'{"blocks": 1}'))
    with tarfile.open(fileobj=made, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(data), {"KVTIER.mtime_ns": stamp} if name == path else {}
            archive.addfile(member, io.BytesIO(data))
    made.seek(0)
    return made


@pytest.mark.parametrize("stamp", ["9" * 40, "\N{SUPERSCRIPT TWO}", "1e9", "", " 1"])
def test_a_time_that_is_none_is_named_and_nothing_is_written_for_it(rig: Rig, tmp_path: Path, stamp: str) -> None:
    engine = rig.engine()
    engine.put(1)
    with pytest.raises(ConfigInvalid, match="mtime_ns must be nanoseconds"):
        transfer.import_(tmp_path / "green", lambda *_: None, source=stamped(engine, stamp), yes=True)
    assert not list((tmp_path / "green").rglob("*.kvb*"))


@pytest.mark.parametrize(("stamp", "written"), [("9" * 19, None), ("-5", 0), ("77000000000", 77 * 10**9)])
def test_a_block_was_written_no_later_than_now(rig: Rig, tmp_path: Path, stamp: str, written: int | None) -> None:
    engine = rig.engine()
    engine.put(1)
    outcome = transfer.import_(tmp_path / "green", lambda *_: None, source=stamped(engine, stamp), yes=True)
    assert outcome.status == 0
    found = (tmp_path / "green/aa" / block_path(key(1))).stat().st_mtime_ns
    assert found == written if written is not None else 0 < found <= time.time_ns()


def test_no_path_of_somebody_elses_choice_is_written(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = json.loads((engine.root / "tier.json").read_text())
    head = {"format": 1, "generation": "aa", "tier": tier}
    evil = ("../../evil", b"x"), ("/tmp/evil-kvtier", b"x"), ("tier.json", b"{}"), ("journal/x", b"x")
    end = json.dumps({"blocks": len(evil)}).encode()
    (tmp_path / "evil.tar").write_bytes(stream((transfer.HEAD, json.dumps(head).encode()), *evil, (transfer.END, end)))
    found = run(capsys, "import", tmp_path / "evil.tar", tmp_path / "green", "--yes", code=1)
    assert (found["blocks"], len(found["damaged"])) == (0, len(evil))
    assert {path.name for path in (tmp_path / "green").rglob("*") if path.is_file()} == {"tier.json"}
    assert json.loads((tmp_path / "green/aa/tier.json").read_text()) == tier
    assert rig.dir.exists()


def sparse(name: str, size: int) -> bytes:
    """Return a member that claims this length, and has nothing in it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("x")
        kind = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        member.pax_headers = {**kind, "GNU.sparse.name": name, "GNU.sparse.realsize": str(size)}
        member.size = 512
        archive.addfile(member, io.BytesIO(b"0\n".ljust(512, b"\0")))
    return made.getvalue()


MANY_BYTES = 1 << 30


def without_end(made: bytes) -> bytes:
    return made.rstrip(b"\0").ljust(-(-len(made.rstrip(b"\0")) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, b"\0")


@pytest.mark.parametrize("yes", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "longer than its header says", "no block"])
def test_what_cannot_be_the_block_is_refused_by_its_first_page(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, yes: bool
) -> None:
    engine = rig.engine()
    engine.put(2)
    path = block_path(key(2))
    block = (engine.root / path).read_bytes()
    members = {"longer than its header says": block + bytes(1 << 20), "no block": bytes(1 << 20)}
    head = {"format": 1, "generation": "aa", "tier": json.loads((engine.root / "tier.json").read_text())}
    made = without_end(stream((transfer.HEAD, json.dumps(head).encode())))
    made += sparse(path, MANY_BYTES) if kind == "sparse" else stream((path, members[kind]))
    written = []
    write = transfer.write_all

    def noting(fs: FileSystem, fd: int, data: memoryview, offset: int = 0) -> int:
        written.append(data.nbytes)
        assert sum(written) < 2 * BLOCK_BYTES, "more is written than a block has"
        return write(fs, fd, data, offset)

    monkeypatch.setattr(transfer, "write_all", noting)
    outcome = transfer.import_(tmp_path / "green", lambda *_: None, source=io.BytesIO(made), yes=yes)
    assert [each["path"] for each in outcome.document["damaged"]] == [path]
    assert not list((tmp_path / "green").rglob("*.kvb*"))


def test_what_a_stream_had_is_not_kept_in_memory(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.engine().put(*range(40))
    archives: list[tarfile.TarFile] = []
    most = [0]
    opened = tarfile.open

    def noting(*args: Any, **kwargs: Any) -> tarfile.TarFile:
        archives.append(opened(*args, **kwargs))
        return archives[-1]

    def look(amount: int) -> None:
        most[0] = max(most[0], len(archives[-1].members))

    monkeypatch.setattr(tarfile, "open", noting)
    progress = transfer.Progress
    monkeypatch.setattr(progress, "add", lambda _, size: look(size))
    found = export(capsys, rig, tmp_path / "aa.tar")
    assert run(capsys, "import", tmp_path / "aa.tar", tmp_path / "green", "--yes")["blocks"] == found["blocks"] == 40
    assert len(archives) == 2
    assert most[0] <= 2


def test_of_very_many_damaged_blocks_some_are_named_and_all_counted(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = rig.engine().root
    head = {"format": 1, "generation": "aa", "tier": json.loads((root / "tier.json").read_text())}
    count = transfer.MOST_NAMED + 5
    evil = [(f"evil-{number}", b"") for number in range(count)]
    end = json.dumps({"blocks": count}).encode()
    (tmp_path / "x.tar").write_bytes(stream((transfer.HEAD, json.dumps(head).encode()), *evil, (transfer.END, end)))
    found = run(capsys, "import", tmp_path / "x.tar", tmp_path / "green", code=1)
    assert (len(found["damaged"]), found["damagedBlocks"]) == (transfer.MOST_NAMED, count)
    assert main(["import", str(tmp_path / "x.tar"), str(tmp_path / "green")]) == 1
    assert "more damaged blocks left out" in capsys.readouterr().out


def test_one_command_can_be_the_next_ones_input(engine: Engine, rig: Rig, tmp_path: Path) -> None:
    cli = [sys.executable, "-m", "kvtier_cli"]
    with subprocess.Popen([*cli, "export", str(rig.dir), "-"], stdout=subprocess.PIPE) as source:
        done = subprocess.run(
            [*cli, "import", "-", str(tmp_path / "green"), "--yes"], stdin=source.stdout, check=False, timeout=60
        )
    assert (source.returncode, done.returncode) == (0, 0)
    assert check(tmp_path / "green/aa") == []
    assert len(list((tmp_path / "green").rglob("*.kvb"))) == len(list(engine.root.rglob("*.kvb")))


@pytest.mark.parametrize("has_ours", [True, False])
def test_a_janitor_of_vllms_files_gives_what_kvtiers_connector_has_left(
    rig: Rig, tmp_path: Path, has_ours: bool, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    if has_ours:
        rig.engine().put(1, 2)
    config = JanitorConfig(tier="ns/x", tier_dir=str(rig.dir), current="1111111111111111", layout=VLLM_FS_LAYOUT)
    (tmp_path / "janitor.json").write_text(encode(config))
    assert piping.main(["export", "--config", str(tmp_path / "janitor.json")]) == (0 if has_ours else 1)
    said = json.loads(capfdbinary.readouterr().err.splitlines()[-1])
    if has_ours:
        assert (said["document"]["generation"], said["document"]["blocks"]) == ("aa", 2)
    else:
        assert "no blocks of kvtier's own connector" in said["error"]


def test_pods_of_two_janitors_hand_it_over_through_a_pipe(engine: Engine, rig: Rig, tmp_path: Path) -> None:
    def document(name: str, tier_dir: Path) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(encode(JanitorConfig(tier=f"ns/{name}", tier_dir=str(tier_dir), current="aa")))
        return str(path)

    module = [sys.executable, "-m", "kvtier_connector.janitor.piping"]
    blue = [
        *module,
        "export",
        "--config",
        document("blue", rig.dir),
        "--generation",
        "aa",
        "--hottest",
        str(4 * BLOCK_BYTES),
    ]
    green = [*module, "import", "--yes", "--config", document("green", tmp_path / "green")]
    with subprocess.Popen(blue, stdout=subprocess.PIPE) as source:
        done = subprocess.run(green, stdin=source.stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (source.returncode, done.returncode) == (0, 0)
    assert json.loads(done.stderr.splitlines()[-1])["document"]["blocks"] == 4 < len(list(engine.root.rglob("*.kvb")))
    assert check(tmp_path / "green/aa") == []
