# SPDX-License-Identifier: Apache-2.0
"""Makes a release with what this machine has, and installs it: ``python .ci/release_dry_run.py OUT``.

Wheel, plugin, chart, install.yaml and bundle are those of a release, but for the digests of images, which none has.
The chart goes into an embedded cluster whose pods run no process. The operator runs beside it, from the plugin's
archive alone: that has the wheel and the locked packages of the operator's image.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import helm
import plugin
import release
import yaml

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = ("docker", "podman", "buildah")
FILES = {
    "operator": "operator/Dockerfile",
    "connector": "connector/Dockerfile",
    "janitor": "connector/janitor.Dockerfile",
    "router": "operator/router.Dockerfile",
    "bundle": "bundle/Dockerfile",
}
PLATFORM = "linux-amd64" if os.uname().machine == "x86_64" else "linux-arm64"
DIGESTS = {name: f"sha256:{number:064d}" for number, name in enumerate(release.IMAGES, 1)}
SECONDS = 60.0
"""Longest wait for the cluster, and for each object."""


def wheel(out: Path) -> str:
    """Build it from a copy of what is tracked, as setuptools writes beside its sources."""
    source = out / "source"
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in listed.split("\0"):
        is_packed = name.startswith(("operator/", "connector/", "charts/", "crds/", "docs/operator.yaml"))
        if (is_packed or "/" not in name) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    )
    shutil.rmtree(source)
    (made,) = out.glob("*.whl")
    return made.name


def kubectl_plugin(out: Path) -> str:
    """Pack it for this platform and this Python, and unpack it."""
    (made,) = out.glob("*.whl")
    path = plugin.archive(made, out, PLATFORM, [f"{sys.version_info[0]}.{sys.version_info[1]}"])
    with tarfile.open(path) as archive:
        archive.extractall(out / "plugin", filter="data")
    return f"{path.name}, for the Python of this machine"


def chart(out: Path) -> str:
    """Write chart, install.yaml and bundle."""
    release.main(release.version_of_code(), str(out), *(f"{name}={digest}" for name, digest in DIGESTS.items()))
    return "chart, install.yaml and bundle, with digests of no image"


def images(_out: Path) -> str:
    """Build each image if there is a builder."""
    builder = next((each for each in BUILDERS if shutil.which(each) and _works(each)), None)
    if builder is None:
        return f"skipped: no builder ({', '.join(BUILDERS)}) that works; `make lint` checks the Dockerfiles"
    for name, file in FILES.items():
        run(builder, "build", "-f", str(ROOT / file), "-t", f"ghcr.io/kvtier/{name}:dry-run", str(ROOT))
    return f"built by {builder}: {', '.join(FILES)}"


def _works(builder: str) -> bool:
    """Tell whether a builder has the daemon or the rights that it needs."""
    return subprocess.run([builder, "info"], check=False, capture_output=True).returncode == 0


def installed(out: Path) -> str:
    """Install chart and operator in an embedded cluster, and apply a tier."""
    config, command = out / "kubeconfig", str(out / "plugin" / plugin.COMMAND)
    # Nothing of this checkout: the plugin brings all that it needs.
    environment = {"PATH": os.defpath, "HOME": str(out), "KUBECONFIG": str(config)}
    kubectl = [str(helm.binary("kubectl"))]
    cluster = [sys.executable, "-m", "kvtier_localcluster", "up", "--simulate", "--data", str(out / "cluster")]
    with process([*cluster, "--kubeconfig", str(config)], out / "cluster.log", os.environ):
        wait_until(config.exists, "the cluster")
        packed = str(out / f"kvtier-{release.version_of_code()}.tgz")
        where = ["--namespace=kvtier-system", "--create-namespace"]
        run(str(helm.binary()), "install", "kvtier", packed, *where, "--set=replicas=0", environment=environment)
        documents = [each for each in yaml.safe_load_all((out / "install.yaml").read_text()) if each]
        # The embedded cluster has no policies of admission, as Kubernetes 1.29 has none.
        known = [each for each in documents if not each["kind"].startswith("ValidatingAdmissionPolicy")]
        apply = [*kubectl, "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-"]
        run(*apply, environment=environment, given=yaml.safe_dump_all(known))
        # In place of pods of the Deployment, which run no process here.
        with process([command, "run"], out / "operator.log", environment):
            sample = run(command, "install", "samples", "minimal", environment=environment)
            run(*kubectl, "apply", "-f", "-", environment=environment, given=sample)
            for name in ("qwen-engine", "qwen-janitor"):
                wait = [*kubectl, "wait", "--for=create", f"deployment/{name}", f"--timeout={SECONDS:.0f}s"]
                run(*wait, environment=environment)
            run(command, "status", "qwen", environment=environment, codes=(0, 1))
        run(str(helm.binary()), "uninstall", "kvtier", "--namespace=kvtier-system", environment=environment)
    return "chart installed, a tier made by the operator of the wheel, chart removed"


STEPS: dict[str, Callable[[Path], str]] = {
    "wheel": wheel,
    "plugin": kubectl_plugin,
    "packages": chart,
    "images": images,
    "install": installed,
}


def run(
    *command: str, environment: Mapping[str, str] | None = None, given: str = "", codes: tuple[int, ...] = (0,)
) -> str:
    """Run a command and return what it prints; end with its errors if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, input=given)
    if done.returncode not in codes:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def process(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a process beside what happens meanwhile."""
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as started:
        try:
            yield
        finally:
            started.terminate()
            try:
                started.wait(SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()


def wait_until(is_there: Callable[[], bool], what: str) -> None:
    """Wait for a condition; end where it does not come."""
    deadline = time.monotonic() + SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            sys.exit(f"{what} is not there after {SECONDS:.0f} s")
        time.sleep(0.1)


def main(out: str) -> None:
    """Take each step and print what came of it."""
    folder = Path(out).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, step in STEPS.items():
        begun = time.monotonic()
        told = step(folder)
        print(f"{name:10}{time.monotonic() - begun:5.1f} s  {told}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
