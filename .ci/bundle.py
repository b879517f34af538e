# SPDX-License-Identifier: Apache-2.0
"""Writes or checks the bundle for the Operator Lifecycle Manager: ``python .ci/bundle.py --write | --check``.

The ClusterServiceVersion takes Deployment and rules from the rendered chart. The definition of KVCacheTier is not
stored a third time: bundle/Dockerfile and `write_into` copy it.
"""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator import __version__, names

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "bundle"
CRD = "crds/kvcachetier.yaml"
CSV = "manifests/kvtier.clusterserviceversion.yaml"
CRD_IN_BUNDLE = f"{names.PLURAL}.{names.GROUP}.crd.yaml"
NAME = "kvtier-operator"
REPOSITORY = "https://github.com/kvtier/kvtier"
SINCE = datetime.date(2026, 11, 24)
"""Day of the newest change of the bundle that a person makes: `createdAt`."""
SAMPLES = ("minimal", "shared")
Manifest = dict[str, Any]

_DESCRIPTION = f"""\
kvtier keeps the KV cache of [vLLM](https://docs.vllm.ai) alive: in host memory, and on a volume that all replicas
share. Any replica, and any later restart, reads what one replica computed.

A `KVCacheTier` names a model and the size of its tiers. The operator makes the engines, the volume, a janitor that
bounds the blocks, and a router if asked. It proves with a prompt that replicas share their cache. Conditions name what
is wrong, and the remedy.

[Install]({REPOSITORY}/blob/main/docs/install.md) · [Sizing]({REPOSITORY}/blob/main/docs/sizing.md) ·
[Operations]({REPOSITORY}/blob/main/docs/operations.md)
"""


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as they are, and everything out in place."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Blocks.add_representer(str, _text)


def rendered() -> list[Manifest]:
    """Return the objects of the chart without what Helm alone needs."""
    command = [sys.executable, str(ROOT / ".ci/helm.py"), "template", "kvtier", str(ROOT / "charts/kvtier")]
    # Named here, so that a release can put digests in their place.
    named = [f"--set={name}Image=ghcr.io/kvtier/{name}:{__version__}" for name in ("connector", "janitor")]
    options = ["--namespace=kvtier-system", f"--set=fullnameOverride={NAME}", "--set=crds.install=false", *named]
    text = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    found = [each for each in yaml.safe_load_all(text) if each]
    for each in found:
        each["metadata"].pop("namespace", None)
        labels = each["metadata"]["labels"]
        for name in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            labels.pop(name, None)
    return found


def _chart() -> Manifest:
    found: Manifest = yaml.safe_load((ROOT / "charts/kvtier/Chart.yaml").read_text(encoding="utf-8"))
    return found


def service_version(objects: list[Manifest]) -> Manifest:
    """Return the ClusterServiceVersion."""
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    bound = {each["roleRef"]["name"] for each in objects if each["kind"] in {"ClusterRoleBinding", "RoleBinding"}}
    rules = {each["kind"]: each["rules"] for each in objects if "rules" in each and each["metadata"]["name"] in bound}
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    definition = yaml.safe_load((ROOT / CRD).read_text(encoding="utf-8"))
    (version,) = definition["spec"]["versions"]
    examples = [
        next(each for each in yaml.safe_load_all(text) if each["kind"] == names.KIND)
        for text in ((ROOT / f"crds/samples/{name}.yaml").read_text(encoding="utf-8") for name in SAMPLES)
    ]
    icon = base64.b64encode((ROOT / "docs/pictures/icon.svg").read_bytes()).decode()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": f"{NAME}.v{__version__}",
            "annotations": {
                "alm-examples": json.dumps(examples, indent=2),
                "capabilities": "Deep Insights",
                "categories": "AI/Machine Learning, Storage",
                "containerImage": container["image"],
                "createdAt": f"{SINCE}T00:00:00Z",
                "description": "Keeps the KV cache of vLLM alive on a shared volume",
                "repository": REPOSITORY,
                "support": f"{REPOSITORY}/issues",
            },
        },
        "spec": {
            "displayName": "kvtier",
            "description": _DESCRIPTION,
            "version": __version__,
            "maturity": "alpha",
            "minKubeVersion": "1.29.0",
            "keywords": ["vllm", "kv-cache", "llm", "inference"],
            "provider": {"name": "kvtier", "url": REPOSITORY},
            "relatedImages": yaml.safe_load(_chart()["annotations"]["artifacthub.io/images"]),
            "links": [{"name": "Documentation", "url": f"{REPOSITORY}/tree/main/docs"}],
            "icon": [{"base64data": icon, "mediatype": "image/svg+xml"}],
            "customresourcedefinitions": {
                "owned": [
                    {
                        "name": definition["metadata"]["name"],
                        "kind": names.KIND,
                        "version": names.VERSION,
                        "displayName": "KV cache tier",
                        "description": version["schema"]["openAPIV3Schema"]["description"],
                    }
                ]
            },
            # The operator serves every namespace or those of a list; OLM's lists change under it.
            "installModes": [
                {"type": kind, "supported": kind == "AllNamespaces"}
                for kind in ("OwnNamespace", "SingleNamespace", "MultiNamespace", "AllNamespaces")
            ],
            "install": {
                "strategy": "deployment",
                "spec": {
                    "deployments": [
                        {
                            "name": deployment["metadata"]["name"],
                            "label": deployment["metadata"]["labels"],
                            "spec": deployment["spec"],
                        }
                    ],
                    "clusterPermissions": [{"serviceAccountName": account, "rules": rules["ClusterRole"]}],
                    "permissions": [{"serviceAccountName": account, "rules": rules["Role"]}],
                },
            },
        },
    }


def annotations() -> Manifest:
    """Return the metadata of the bundle, which are the labels of its image as well."""
    prefix = "operators.operatorframework.io"
    given = {
        "mediatype.v1": "registry+v1",
        "manifests.v1": "manifests/",
        "metadata.v1": "metadata/",
        "package.v1": NAME,
        "channels.v1": "stable",
        "channel.default.v1": "stable",
    }
    scorecard = {"test.mediatype.v1": "scorecard+v1", "test.config.v1": "tests/scorecard/"}
    return {
        "annotations": {
            **{f"{prefix}.bundle.{name}": value for name, value in given.items()},
            **{f"{prefix}.{name}": value for name, value in scorecard.items()},
        }
    }


def scorecard() -> Manifest:
    """Return the tests that `operator-sdk scorecard` runs of a bundle."""
    image = "quay.io/operator-framework/scorecard-test:v1.42.3"
    suites = {"basic": ["check-spec"], "olm": ["bundle-validation", "crds-have-validation"]}
    tests = [
        {
            "entrypoint": ["scorecard-test", f"{suite}-{test}"],
            "image": image,
            "labels": {"suite": suite, "test": f"{suite}-{test}-test"},
        }
        for suite, listed in suites.items()
        for test in listed
    ]
    return {
        "apiVersion": "scorecard.operatorframework.io/v1alpha3",
        "kind": "Configuration",
        "metadata": {"name": "config"},
        "stages": [{"parallel": True, "tests": tests}],
    }


def dockerfile() -> str:
    """Return the Dockerfile of the bundle's image."""
    labels = "".join(f"LABEL {name}={value}\n" for name, value in annotations()["annotations"].items())
    return (
        "# Written by `make generate`. Build from the root of the repository:\n"
        "#   docker build -f bundle/Dockerfile -t ghcr.io/kvtier/bundle:0.1.0 .\n"
        f"FROM scratch\n{labels}COPY bundle/manifests /manifests/\nCOPY {CRD} /manifests/{CRD_IN_BUNDLE}\n"
        "COPY bundle/metadata /metadata/\nCOPY bundle/tests/scorecard /tests/scorecard/\n"
    )


def files() -> dict[str, str]:
    """Return every generated file of the bundle."""
    objects = rendered()
    made = {CSV: service_version(objects)}
    # OLM makes account, roles and Deployment itself; it takes these beside them.
    made |= {
        f"manifests/{each['metadata']['name']}.{each['kind'].lower()}.yaml": each
        for each in objects
        if each["kind"] == "Service" or (each["kind"] == "ClusterRole" and each["metadata"]["name"] != NAME)
    }
    made |= {"metadata/annotations.yaml": annotations(), "tests/scorecard/config.yaml": scorecard()}
    texts = {
        name: "# Written by `make generate`.\n"
        + yaml.dump(each, Dumper=_Blocks, sort_keys=False, width=118, allow_unicode=True)
        for name, each in made.items()
    }
    return {**texts, "Dockerfile": dockerfile()}


def write_into(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the whole bundle into a folder, as its image holds it, with images of ours named by digest."""
    shutil.copytree(BUNDLE, folder, ignore=shutil.ignore_patterns("Dockerfile"))
    shutil.copyfile(ROOT / CRD, folder / "manifests" / CRD_IN_BUNDLE)
    path = folder / CSV
    text = path.read_text(encoding="utf-8")
    for name, digest in digests.items():
        text = text.replace(f"ghcr.io/kvtier/{name}:{__version__}", f"ghcr.io/kvtier/{name}@{digest}")
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the files, or say which of them are stale."""
    made = {BUNDLE / name: text for name, text in files().items()}
    if arguments == ["--write"]:
        shutil.rmtree(BUNDLE, ignore_errors=True)
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in BUNDLE.rglob("*") if path.is_file() and path not in made]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale; run make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
