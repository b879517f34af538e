# SPDX-License-Identifier: Apache-2.0
"""Containers of pods, run as local processes."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from pods import Bench, claim, claimed, fetch, script, server
from waiting import is_alive, until

from kvtier_localcluster import kinds
from kvtier_localcluster.node import pod


def test_a_container_gets_its_declared_environment_and_nothing_of_the_callers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/home/me/kubeconfig")
    bench.create(kinds.CONFIG_MAP, {"metadata": {"name": "settings"}, "data": {"color": "red", "SIZE": "3"}})
    secret = {"token": base64.b64encode(b"hush").decode()}
    bench.create(kinds.SECRET, {"metadata": {"name": "keys"}, "data": secret})
    env = [
        {"name": "PLAIN", "value": "a$(SET_SIZE)$$(b)"},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "color"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "x", "optional": True}}},
        {"name": "LISTEN", "value": "0.0.0.0:9"},
    ]
    container = server(
        env=env,
        envFrom=[{"configMapRef": {"name": "settings"}, "prefix": "SET_"}],
        args=["--color=$(COLOR)", "--unknown=$(NOBODY)"],
    )
    bench.pod("env", container, labels={"role": "judge"})
    until(lambda: bench.is_ready("env"))
    found = bench.environment("env")
    pod_ip = bench.status("env")["podIP"]
    expected = {
        "PLAIN": "a3$(b)",
        "POD": "env",
        "ROLE": "judge",
        "POD_IP": pod_ip,
        "COLOR": "red",
        "TOKEN": "hush",
        "LISTEN": f"{pod_ip}:9",
        "SET_color": "red",
        "HOSTNAME": "env",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not {"KUBECONFIG", "PYTHONPATH", "NONE", "HOME", "KUBERNETES_SERVICE_HOST"} & found.keys()
    assert json.loads(bench.ask("env", "/argv")) == ["--color=red", "--unknown=$(NOBODY)"]


def test_an_image_of_the_table_brings_its_environment_and_others_do_not(bench: Bench) -> None:
    bench.pod("ours", server(image="ghcr.io/kvtier/connector:1"))
    until(lambda: bench.is_ready("ours"))
    assert bench.environment("ours")["PYTHONPATH"] == "/opt/of-the-image"


def test_config_files_name_the_real_paths_and_follow_their_config_map(bench: Bench) -> None:
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("blocks"))
    text = json.dumps({"root": "/var/lib/cache/llama", "other": "/var/lib/cache2"})
    bench.create(kinds.CONFIG_MAP, {"metadata": {"name": "files"}, "data": {"config.json": text}})
    mounts = {"/var/lib/cache": claimed("blocks"), "/etc/app": {"configMap": {"name": "files"}}}
    bench.pod("reader", server(args=["--config=/etc/app/config.json"]), mounts=mounts)
    until(lambda: bench.is_ready("reader"))
    path = json.loads(bench.ask("reader", "/argv"))[0].removeprefix("--config=")
    root = bench.cluster.cluster.data.claim((bench.namespace, "blocks"))
    assert json.loads(bench.ask("reader", f"/file{path}")) == {"root": f"{root}/llama", "other": "/var/lib/cache2"}

    bench.patch(kinds.CONFIG_MAP, "files", {"data": {"config.json": "new /var/lib/cache/x", "more": "1"}})
    until(lambda: bench.ask("reader", f"/file{path}") == f"new {root}/x")
    # Names that are new follow the text of those that were there.
    until(lambda: {each.name for each in Path(path).parent.glob("[!.]*")} == {"config.json", "more"})


def test_the_files_of_a_config_map_change_together_and_an_open_one_stays_as_it_was(bench: Bench) -> None:
    bench.create(kinds.CONFIG_MAP, {"metadata": {"name": "pair"}, "data": {"one": "1", "two": "1", "old": "1"}})
    bench.pod("reader", server(args=["/etc/app/one"]), mounts={"/etc/app": {"configMap": {"name": "pair"}}})
    until(lambda: bench.is_ready("reader"))
    directory = Path(json.loads(bench.ask("reader", "/argv"))[0]).parent
    link, restarts = directory / "..data", bench.status("reader")["containerStatuses"][0]["restartCount"]
    before = link.readlink()
    assert (directory / "one").readlink() == Path("..data/one")
    with (directory / "one").open() as opened:
        bench.patch(kinds.CONFIG_MAP, "pair", {"data": {"one": "2", "two": "2", "old": None}})
        until(lambda: link.readlink() != before)
        assert opened.read() == "1"
    assert ((directory / "one").read_text(), (directory / "two").read_text()) == ("2", "2")
    until(lambda: not (directory / "old").is_symlink())
    until(lambda: not (directory / before).exists())
    assert bench.status("reader")["containerStatuses"][0]["restartCount"] == restarts


def test_two_pods_share_a_claim_and_each_has_its_own_scratch_directory(bench: Bench) -> None:
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("shared"))
    mounts: dict[str, kinds.Json] = {"/data": claimed("shared"), "/tmp": {"emptyDir": {}}}
    write = "import os, time; open('/data/note', 'x').write(os.environ['TMPDIR']); time.sleep(600)"
    bench.pod("writer", script(write), mounts=mounts)
    bench.pod("reader", server(env=[{"name": "NOTE", "value": "/data/note"}]), mounts=mounts)
    until(lambda: bench.is_ready("reader"))
    path = bench.environment("reader")["NOTE"]
    written = until(lambda: fetch(bench.url("reader", f"/file{path}")))
    directory = bench.cluster.cluster.data.claim((bench.namespace, "shared"))
    assert Path(path) == directory / "note"
    assert written != bench.environment("reader")["TMPDIR"]
    assert Path(str(written)).is_dir()


def test_a_socket_fits_into_the_temporary_directory(bench: Bench) -> None:
    bind = (
        "import socket, tempfile, uuid\nsocket.socket(socket.AF_UNIX).bind(f'{tempfile.gettempdir()}/{uuid.uuid4()}')\n"
    )
    bench.pod("socket", script(bind), mounts={"/tmp": {"emptyDir": {}}}, restartPolicy="Never")
    until(lambda: bench.status("socket").get("phase") == "Succeeded")


def test_readiness_follows_its_probe(bench: Bench) -> None:
    bench.pod("moody", server())
    until(lambda: bench.is_ready("moody"))
    bench.ask("moody", "/sick")
    until(lambda: not bench.is_ready("moody"))
    assert bench.container("moody")["restartCount"] == 0
    failed = ("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503")
    until(lambda: failed in bench.events("moody"))
    bench.ask("moody", "/well")
    until(lambda: bench.is_ready("moody"))


def test_a_startup_probe_holds_back_the_others_until_it_succeeds(bench: Bench) -> None:
    look = {"command": ["python3", "-c", "open('/flags/up')"]}
    startup = {"exec": look, "timeoutSeconds": 60, "periodSeconds": 1, "failureThreshold": 200}
    liveness = {"exec": {"command": ["python3", "-c", "raise SystemExit(1)"]}, "failureThreshold": 1}
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("flags"))
    bench.pod("slow", server(startupProbe=startup, livenessProbe=liveness), mounts={"/flags": claimed("flags")})
    until(lambda: any("Startup probe failed" in message for _, message in bench.events("slow")))
    assert not bench.container("slow")["started"]
    assert not bench.is_ready("slow")
    assert bench.container("slow")["restartCount"] == 0
    (bench.cluster.cluster.data.claim((bench.namespace, "flags")) / "up").touch()
    until(lambda: bench.container("slow")["restartCount"] > 0)
    until(lambda: any("failed liveness probe, will be restarted" in message for _, message in bench.events("slow")))


def test_a_crashing_container_is_restarted_with_back_off(bench: Bench) -> None:
    bench.pod("crash", script("print('last words', flush=True); raise SystemExit(7)"))
    until(lambda: bench.container("crash").get("restartCount", 0) >= 2)
    waiting = until(lambda: bench.waiting("crash"))
    assert waiting["reason"] == "CrashLoopBackOff"
    assert "restarting failed container=main pod=crash" in waiting["message"]
    last = bench.container("crash")["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (7, "Error")
    assert bench.status("crash")["phase"] == "Running"
    until(lambda: "last words" in bench.log("crash"))
    until(lambda: "BackOff" in bench.reasons("crash"))


def test_restart_policies_decide_what_becomes_of_a_finished_container(bench: Bench) -> None:
    bench.pod("done", script("pass"), restartPolicy="OnFailure")
    bench.pod("lost", script("raise SystemExit(2)"), restartPolicy="Never")
    until(lambda: bench.status("done").get("phase") == "Succeeded")
    until(lambda: bench.status("lost").get("phase") == "Failed")
    assert bench.container("lost")["state"]["terminated"]["exitCode"] == 2
    assert bench.container("done")["restartCount"] == 0


def test_init_containers_run_in_order_before_the_others(bench: Bench) -> None:
    mounts = [{"name": "v0", "mountPath": "/work"}]
    first = script("open('/work/list', 'x').write('first ')", "first", volumeMounts=mounts)
    second = script("open('/work/list', 'a').write('second')", "second", volumeMounts=mounts)
    main = server(env=[{"name": "LIST", "value": "/work/list"}])
    bench.pod("ordered", main, mounts={"/work": {"emptyDir": {}}}, initContainers=[first, second])
    until(lambda: bench.is_ready("ordered"))
    assert bench.ask("ordered", f"/file{bench.environment('ordered')['LIST']}") == "first second"
    states = [each["state"]["terminated"]["reason"] for each in bench.status("ordered")["initContainerStatuses"]]
    assert states == ["Completed", "Completed"]


def test_a_failing_init_container_keeps_the_others_from_starting(bench: Bench) -> None:
    bench.pod("stuck", server(), initContainers=[script("raise SystemExit(4)", "setup")])
    field = "initContainerStatuses"
    until(lambda: bench.waiting("stuck", "setup", field).get("reason") == "CrashLoopBackOff")
    assert bench.container("stuck", "setup", field)["lastState"]["terminated"]["exitCode"] == 4
    assert bench.waiting("stuck")["reason"] == "PodInitializing"
    assert bench.status("stuck")["phase"] == "Pending"


def test_a_missing_config_map_is_reported_and_its_arrival_heals(bench: Bench) -> None:
    reference = {"configMapKeyRef": {"name": "late", "key": "color"}}
    bench.pod("by-env", server(env=[{"name": "COLOR", "valueFrom": reference}]))
    bench.pod("by-file", server(), mounts={"/etc/late": {"configMap": {"name": "late"}}})
    waiting = until(lambda: (found := bench.waiting("by-env")).get("message") and found)
    assert waiting == {"reason": "CreateContainerConfigError", "message": 'configmap "late" not found'}
    until(lambda: "FailedMount" in bench.reasons("by-file"))
    assert bench.waiting("by-file")["reason"] == "ContainerCreating"
    bench.create(kinds.CONFIG_MAP, {"metadata": {"name": "late"}, "data": {"color": "blue"}})
    until(lambda: bench.is_ready("by-env") and bench.is_ready("by-file"))
    assert bench.environment("by-env")["COLOR"] == "blue"


def test_no_container_starts_before_the_volumes_of_all_are_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    early = script("print('early')", name="early")
    bench.pod("patient", server(), mounts={"/etc/late": {"secret": {"secretName": "late"}}}, initContainers=[early])
    until(lambda: "FailedMount" in bench.reasons("patient"))
    assert "waiting" in bench.container("patient", "early", "initContainerStatuses")["state"]
    assert bench.log("patient", "early") == ""
    bench.create(kinds.SECRET, {"metadata": {"name": "late"}, "data": {}})
    until(lambda: bench.is_ready("patient"))
    assert bench.log("patient", "early") == "early\n"
    monkeypatch.setattr(pod, "_MOUNT_RETRY_SECONDS", 600.0)
    bench.pod("waiting", server(), mounts={"/etc/late": {"secret": {"secretName": "never"}}})
    until(lambda: "FailedMount" in bench.reasons("waiting"))
    bench.delete(kinds.POD, "waiting")
    until(lambda: bench.get(kinds.POD, "waiting") is None)


def test_the_log_of_the_container_before_a_restart_is_kept_for_its_pod_alone(bench: Bench) -> None:
    def previous() -> str | None:
        path = f"/api/v1/namespaces/{bench.namespace}/pods/crashing/log?previous=true"
        return fetch(bench.cluster.url + path)

    once = (
        "import os, time; print(os.path.exists('/notes/again'), flush=True)\n"
        "if os.path.exists('/notes/again'): time.sleep(600)\n"
        "open('/notes/again', 'x').close(); raise SystemExit(1)"
    )
    bench.pod("crashing", script(once), mounts={"/notes": {"emptyDir": {}}})
    assert until(previous) == "False\n"
    bench.delete(kinds.POD, "crashing")
    until(lambda: bench.get(kinds.POD, "crashing") is None)
    bench.pod("crashing", server())
    until(lambda: bench.is_ready("crashing"))
    assert previous() is None


def test_a_command_that_does_not_exist_is_reported(bench: Bench) -> None:
    bench.pod("nothing", {"name": "main", "image": "example.org/x", "command": ["no-such-program"]})
    until(lambda: bench.container("nothing").get("lastState"))
    last = bench.container("nothing")["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (128, "StartError")
    assert last["message"] == 'exec: "no-such-program": executable file not found in $PATH'
    until(lambda: "Failed" in bench.reasons("nothing"))


def test_ending_a_pod_runs_its_hook_then_asks_and_then_kills_with_all_children(bench: Bench) -> None:
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open('/notes/asked', 'w').close())\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import os, signal, time; os.setsid();"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
        "open('/notes/pids.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('/notes/pids.new', '/notes/pids')\n"
        "while True: time.sleep(600)\n"
    )
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("notes"))
    hook = {"preStop": {"exec": {"command": ["python3", "-c", "open('/notes/hook', 'w').close()"]}}}
    mounts = {"/notes": claimed("notes")}
    bench.pod("stubborn", script(stubborn, lifecycle=hook), mounts=mounts, terminationGracePeriodSeconds=600)
    notes = bench.cluster.cluster.data.claim((bench.namespace, "notes"))
    until((notes / "pids").exists)
    pids = [int(pid) for pid in (notes / "pids").read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    bench.delete(kinds.POD, "stubborn")
    until((notes / "asked").exists)
    assert (notes / "hook").exists()
    bench.delete(kinds.POD, "stubborn", grace_seconds=1)
    until(lambda: bench.get(kinds.POD, "stubborn") is None)
    assert not any(is_alive(pid) for pid in pids)
    until(lambda: "Killing" in bench.reasons("stubborn"))


def test_children_that_outlive_the_main_process_end_with_the_container(bench: Bench) -> None:
    daemon = (
        "import subprocess, sys\n"
        "code = 'import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), flush=True)\n"
    )
    bench.pod("parent", script(daemon), restartPolicy="Never")
    until(lambda: bench.status("parent").get("phase") == "Succeeded")
    assert not is_alive(int(bench.log("parent")))


def test_deleting_without_grace_ends_the_processes_at_once(bench: Bench) -> None:
    ignore = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)\n"
        "while True: time.sleep(9)"
    )
    bench.pod("forced", script(ignore), terminationGracePeriodSeconds=600)
    pid = int(until(lambda: bench.log("forced").strip()))
    bench.delete(kinds.POD, "forced")
    bench.delete(kinds.POD, "forced", grace_seconds=0)
    until(lambda: not is_alive(pid))


def test_the_last_words_of_a_container_are_in_its_status(bench: Bench) -> None:
    write = "import sys; open(sys.argv[1], 'w').write('all is well')"
    bench.pod("told", script(write, args=["/dev/termination-log"]), restartPolicy="Never")
    until(lambda: bench.status("told").get("phase") == "Succeeded")
    assert bench.container("told")["state"]["terminated"]["message"] == "all is well"

    fail = script("print('no room', flush=True); raise SystemExit(3)", terminationMessagePolicy="FallbackToLogsOnError")
    bench.pod("failed", fail, restartPolicy="Never")
    until(lambda: bench.status("failed").get("phase") == "Failed")
    assert "no room" in bench.container("failed")["state"]["terminated"]["message"]
