# SPDX-License-Identifier: Apache-2.0
"""The volumes of one pod as directories of the machine.

Files of a ConfigMap or a Secret are written once for each container, since the paths inside are those
that this container sees. They change together, by the swap of one link, as with a kubelet.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.errors import ConfigMissing, VolumeMissing
from kvtier_localcluster.kinds import Json
from kvtier_localcluster.node.environment import PathMap, Sources, texts_of

_CURRENT = "..data"
"""The link that the kubelet swaps when the object behind a volume changes."""

_FROM_OBJECTS = ("configMap", "secret")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the machine's


@dataclass(frozen=True)
class Mounts:
    """The directories of one container."""

    paths: PathMap
    temporary: Path
    """Where TMPDIR points: the container's /tmp, or a directory of the pod."""


class PodVolumes:
    """The directories of one pod."""

    def __init__(self, sources: Sources, data: DataDirectory, *, claim: Callable[[str], Json | None]) -> None:
        """Store; nothing is made before `prepare`.

        Args:
            sources: the pod, and where its files come from.
            data: where directories go.
            claim: returns a PersistentVolumeClaim of the pod's namespace.
        """
        pod = sources.pod
        self._sources = sources
        self._data = data
        self._claim = claim
        self._uid = pod["metadata"]["uid"]
        self._namespace = pod["metadata"]["namespace"]
        self._root = data.pod(self._uid)
        self._volumes: Mapping[str, Json] = {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}

    def working_directory(self, container: Json) -> Path:
        """Return an empty directory for a container that names none."""
        return self._made(self._root / "containers" / container["name"] / "root")

    def prepare(self, container: Json) -> Mounts:
        """Make and fill the directories of one container; do it again to refresh them.

        Raises:
            VolumeMissing: something that a volume needs does not exist (yet).
        """
        directories: dict[str, Path] = {}
        mounts = [(mount["mountPath"], self._volumes[mount["name"]]) for mount in container.get("volumeMounts") or []]
        for path, volume in mounts:
            directories[path.rstrip("/")] = self._directory(container, volume)
        directories.pop(_SHARED_MEMORY, None)  # libraries name it without asking, so it stays the machine's
        paths = PathMap({path: str(directory) for path, directory in directories.items()})
        temporary = directories.get("/tmp") or self._made_shared(self._root / "tmp")  # noqa: S108 - the container's
        for _, volume in mounts:
            if any(kind in volume for kind in _FROM_OBJECTS):
                _write_files(self._directory(container, volume), self._read(volume), paths)
        return Mounts(paths=paths, temporary=temporary)

    def check(self) -> None:
        """Look whether each volume of the pod can be set up, as a kubelet does before it starts any container.

        Raises:
            VolumeMissing: something that a volume needs does not exist (yet).
        """
        for volume in self._volumes.values():
            if "persistentVolumeClaim" in volume:
                self._claimed(volume["persistentVolumeClaim"]["claimName"])
            else:
                self._read(volume)

    def remove(self) -> None:
        """Remove everything but claims."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _directory(self, container: Json, volume: Json) -> Path:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            return self._claimed(volume["persistentVolumeClaim"]["claimName"])
        if any(kind in volume for kind in _FROM_OBJECTS):
            return self._made(self._root / "containers" / container["name"] / "volumes" / name)
        if "emptyDir" in volume:
            return self._made_shared(self._root / "volumes" / name)
        raise VolumeMissing(f'volume "{name}" is of a type that the local cluster does not emulate')

    def _claimed(self, name: str) -> Path:
        claim = self._claim(name)
        if claim is None:
            raise VolumeMissing(f'persistentvolumeclaim "{name}" not found')
        if (claim.get("status") or {}).get("phase") != "Bound":
            raise VolumeMissing(f'persistentvolumeclaim "{name}" is not bound')
        return self._made(self._data.claim((self._namespace, name)))

    def _read(self, volume: Json) -> dict[str, bytes]:
        """Return the files that come from a ConfigMap or a Secret."""
        kind = next((kind for kind in _FROM_OBJECTS if kind in volume), None)
        if kind is None:
            return {}
        try:
            manifest = self._sources.referred(kind, {"name": volume[kind].get("secretName"), **volume[kind]})
        except ConfigMissing as problem:
            raise VolumeMissing(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {problem}') from problem
        return {} if manifest is None else texts_of(manifest)

    def _made(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _made_shared(self, directory: Path) -> Path:
        """Make a directory that any user of the container may write to."""
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(0o1777)
        return directory


def _write_files(directory: Path, files: Mapping[str, bytes], paths: PathMap) -> None:
    """Publish the files as the kubelet does: each name is a link through ``..data``, whose swap changes all at once.

    A program that opened a file keeps what it read; one that opens it again sees the new text, and never a mixture.
    """
    wanted = {name: _rewritten(content, paths) for name, content in files.items()}
    current = directory / _CURRENT
    if not current.is_symlink() or _read_files(current.resolve()) != wanted:
        version = directory / f"..{uuid.uuid4().hex}"
        for name, content in wanted.items():
            target = version / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        version.mkdir(exist_ok=True)
        before = current.resolve() if current.is_symlink() else None
        _point(current, version.name)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
    tops = {Path(name).parts[0] for name in files}
    for top in tops:
        if not (directory / top).is_symlink():
            _point(directory / top, f"{_CURRENT}/{top}")
    for entry in directory.iterdir():
        if not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()


def _point(link: Path, target: str) -> None:
    """Make a link, or let it point elsewhere, in one step."""
    partial = link.with_name(f"..{uuid.uuid4().hex}.partial")
    partial.symlink_to(target)
    partial.replace(link)


def _read_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _rewritten(content: bytes, paths: PathMap) -> bytes:
    try:
        return paths.rewrite(content.decode()).encode()
    except UnicodeDecodeError:
        return content  # not text: there are no paths to find in it
