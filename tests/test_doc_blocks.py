# SPDX-License-Identifier: Apache-2.0
"""Every block of code in the documentation is tried as what it is; what pages name and link to exists.

Commands are read by the program that they are for, and what is applied goes through the API server, dry, with the
definition of KVCacheTier. A block of a kind that nobody knows fails, so that a new one is either tried or named here.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ci_tools
import click
import kubernetes_schemas
import pytest
import yaml
from definition import tier_definition

from kvtier_cli.app import app
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.registry.patches import merge_patch
from kvtier_operator.api import crd

ROOT = Path(__file__).resolve().parents[1]
HELM, SITE = ci_tools.load("helm"), ci_tools.load("site")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
TOOLS = r"bash|export|cd|rsync|kvtier|kubectl|helm|make|docker|kind|python|pip|git|curl|cat|mkdir|eval|for"
PROGRAM = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:{TOOLS})(?:\s|$)")
SEPARATORS = {"&&", "||", "|", ";", "|&"}
METRIC = re.compile(r"(?:sum|max|min|rate|increase|kvtier_|vllm:)")
OUTPUT = (
    *("CONDITIONS", "ENGINES", "SIZES AND USE", "HITS", "NEXT", "MODEL ", "TIER ", "PASS  ", "POD", "- nodes: "),
    *("serving/llm: ", "/var/lib/kvtier/", "status:", "SERVED BY ", "Volume of ", "Found request="),
)
"""How blocks begin that show what a command prints, below a line that is empty, or what lies on a volume."""
SPEC = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
MINIMAL: dict[str, Any] = yaml.safe_load((ROOT / "crds" / "samples" / "minimal.yaml").read_text())

ROOMY = {"volume": {"claim": {"size": "4Ti"}}}
"""What a part of a spec is added to has room for its budget."""


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        return lines[0].removeprefix("$ ") if lines else ""

    @property
    def id(self) -> str:
        return f"{self.page}: {self.first[:50]}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for _, language, content in FENCE.findall(text):
            yield Block(page.name, language, textwrap.dedent(content))
        for content in INDENTED.findall(FENCE.sub("", text)):
            yield Block(page.name, "", textwrap.dedent(content))


@functools.cache
def kind_of(block: Block) -> str:
    """Return what a block is; empty for what nobody knows."""
    if not block.language and re.search(r"[─│►]|-{8}", block.text):
        return "picture"
    if PROGRAM.match(block.first):
        return "commands"
    if block.first.startswith(OUTPUT):
        return "output"
    if block.first.startswith(('{"', '"kv_transfer_params"')):
        return "request"
    if METRIC.match(block.first):
        return "query"
    return "yaml" if block.language == "yaml" or fragment_of(block) is not None else ""


def fragment_of(block: Block) -> dict[str, Any] | None:
    """Return the part of a spec that a block shows, None if it shows none."""
    try:
        found = yaml.safe_load(block.text)
    except yaml.YAMLError:
        return None
    if not isinstance(found, dict):
        return None
    spec = found.get("spec", found)
    return spec if isinstance(spec, dict) and spec and spec.keys() <= SPEC.keys() else None


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, as a shell would, without what is set before it."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words
        words = []


def commands(*program: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of each command that begins like this."""
    for block in BLOCKS:
        if kind_of(block) != "commands":
            continue
        joined = re.sub(r"\\\n\s*", " ", block.text)
        # What is quoted may go on in the next line.
        joined = re.sub(r"'[^']*'", lambda quoted: re.sub(r"\n\s*", " ", quoted[0]), joined)
        for line in joined.splitlines():
            text = line.strip().removeprefix("$ ")
            if not PROGRAM.match(text):
                continue  # what the command before it prints
            for words in simple_commands(text):
                if tuple(words[: len(program)]) == program:
                    yield block.page, words


def inline() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of kvtier that stand in a sentence."""
    for page in PAGES:
        for line in re.findall(r"`(?:kubectl )?kvtier ([a-z][^`]*)`", FENCE.sub("", page.read_text())):
            if "…" not in line:
                yield page.name, ["kvtier", *shlex.split(line)]


BLOCKS = list(blocks())


def as_params(found: Iterable[tuple[str, list[str]]]) -> list[Any]:
    return [pytest.param(words, id=f"{page}: {' '.join(words)[:60]}") for page, words in found]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.id)
def test_a_block_is_of_a_kind_that_is_tried_or_named(block: Block) -> None:
    assert kind_of(block), "a block of code that nobody tries: let this module know what it is"


def parse(words: list[str]) -> None:
    """Have the command read its arguments, and do nothing.

    Raises:
        UsageError: it does not take them.
    """
    command: click.Command = app
    context = click.Context(app, info_name="kvtier")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    try:
        command.make_context(command.name, list(words), parent=context.parent)
    except click.exceptions.Exit:
        return  # --help
    except click.MissingParameter:
        raise
    except click.BadParameter as refusal:
        # A file of the reader's, not of ours; options, values and the number of words are right.
        if "does not exist" not in refusal.message:
            raise


@pytest.mark.parametrize(
    "words", as_params([*commands("kvtier"), *((page, words[1:]) for page, words in commands("kubectl", "kvtier"))])
)
def test_a_command_line_is_taken_by_the_command(words: list[str]) -> None:
    parse(words[1:])


@pytest.mark.parametrize("words", as_params(inline()))
def test_a_command_that_a_sentence_names_is_taken_as_far_as_it_goes(words: list[str]) -> None:
    try:
        parse(words[1:])
    except click.MissingParameter:
        pass
    except click.BadOptionUsage as refusal:
        assert "requires an argument" in refusal.message, refusal.message  # noqa: PT017 - it may say something else


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """kubectl, for an API server that knows KVCacheTiers."""
    place = tmp_path_factory.mktemp("docs")
    with ApiServerThread() as api:
        api.create(tier_definition())
        yield (str(HELM.binary("kubectl")), f"--server={api.url}", f"--cache-dir={place}")


def apply(kubectl: tuple[str, ...], *words: str, document: Mapping[str, Any] | None = None) -> None:
    done = subprocess.run(
        [*kubectl, "apply", "--dry-run=server", *words],
        input=None if document is None else json.dumps(document),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [block for block in BLOCKS if kind_of(block) == "yaml"], ids=lambda block: block.id)
def test_yaml_is_taken_by_the_api_server(block: Block, kubectl: tuple[str, ...]) -> None:
    for found in yaml.safe_load_all(block.text):
        if "apiVersion" in found:
            apply(kubectl, "-f", "-", document=found)
            for version in ("1.29", "1.37") if found["kind"] != "KVCacheTier" else ():
                kubernetes_schemas.validate(found, version)
        else:
            spec = fragment_of(block) or {}
            if not spec.keys() >= {"model", "cpu", "volume"}:
                spec = merge_patch(merge_patch(MINIMAL["spec"], ROOMY), spec)
            apply(kubectl, "-f", "-", document={**MINIMAL, "spec": spec})


@pytest.mark.parametrize("words", as_params(commands("kubectl", "apply")))
def test_a_file_that_is_applied_is_taken_by_the_api_server(words: list[str], kubectl: tuple[str, ...]) -> None:
    file = words[words.index("-f") + 1]
    if file == "docs/operator.yaml":
        return  # it makes a namespace and fills it, which no dry run can: tests/kind/test_pages.py applies it
    if (ROOT / file).exists():
        apply(kubectl, *words[2:])
    else:
        assert "/" not in file or "://" in file, "a file of this repository that is not there"


@pytest.mark.parametrize("page", sorted({page for page, _ in commands("kubectl", "patch", "kvt")}))
def test_patches_leave_a_tier_that_the_api_server_takes(page: str, kubectl: tuple[str, ...]) -> None:
    document = copy.deepcopy(MINIMAL)
    for where, words in commands("kubectl", "patch", "kvt"):
        if where == page:
            assert "--type=merge" in words
            document = merge_patch(document, json.loads(words[words.index("-p") + 1]))
            apply(kubectl, "-f", "-", document=document)


@pytest.mark.parametrize("words", as_params(commands("make")))
def test_a_target_of_make_is_there(words: list[str]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("words", as_params([*commands("helm", "install"), *commands("helm", "upgrade")]))
def test_helm_takes_the_values_that_are_set(words: list[str]) -> None:
    sets = [word for word in words if word.startswith("--set=")]
    sets += [f"--set={value}" for name, value in pairwise(words) if name == "--set"]
    place = ["template", "kvtier", str(ROOT / "charts" / "kvtier"), "--namespace=kvtier-system"]
    done = subprocess.run([HELM.binary(), *place, *sets], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_promise_is_of_the_served_version_and_patch_files_and_flux_name_what_is_there() -> None:
    named = [after for _, words in commands("kubectl") for word, after in pairwise(words) if word == "--patch-file"]
    assert named
    assert [file for file in named if not (ROOT / file).exists()] == []
    found = yaml.safe_load_all((ROOT / "crds" / "samples" / "others" / "flux.yaml").read_text())
    (release,) = (each for each in found if each["kind"] == "HelmRelease")
    assert release["spec"]["releaseName"] == "kvtier"
    assert (VERSION["served"], VERSION["storage"]) == (True, True)
    assert f"`{VERSION['name']}` is served until" in TABLE
    assert len(EXPERIMENTAL) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_verb_after_a_sample_was_applied_names_the_tier_of_the_sample(page: Path) -> None:
    applied = ""
    for words in (words for where, words in commands() if where == page.name):
        line = " ".join(words)
        if found := re.match(r"kubectl apply -f (crds/samples/\S+\.yaml)|bash e2e/kind/quickstart\.sh", line):
            body = next(yaml.safe_load_all((ROOT / (found[1] or "e2e/kind/tier.yaml")).read_text()))
            applied = body["metadata"]["name"] if body["kind"] == "KVCacheTier" else ""
        elif applied and (found := re.match(r"(?:kubectl )?kvtier (?:status|mode|restart|pause) ([a-z]\S*)", line)):
            assert found[1] == applied, line


EVERY_PAGE = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", ".kvtier", "node_modules"} & set(path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_operator_installs_on_the_oldest_and_the_newest_kubernetes(version: str) -> None:
    since = {"ValidatingAdmissionPolicy": "1.30", "ValidatingAdmissionPolicyBinding": "1.30"}
    for manifest in yaml.safe_load_all((ROOT / "docs/operator.yaml").read_text()):
        if since.get(manifest["kind"], version) <= version:
            kubernetes_schemas.validate(manifest, version)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_readme_and_the_menu_and_every_target_of_make_is_explained() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    written = {
        str(page.relative_to(ROOT)) for folder in ("docs", "connector", "crds") for page in (ROOT / folder).glob("*.md")
    }
    assert written - linked == set()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert targets - set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE)) == set()
    menu = (ROOT / "mkdocs.yml").read_text()
    own = [page for page in SITE.pages() if "results" not in page.parts]
    assert [str(page) for page in own if not re.search(rf"(: |- ){re.escape(str(page))}$", menu, re.MULTILINE)] == []


def test_what_is_linked_from_the_site_and_is_no_page_of_it_is_a_link_to_the_repository(tmp_path: Path) -> None:
    SITE.gather(tmp_path / "pages")
    for page in SITE.pages():
        targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", (tmp_path / "pages" / page).read_text())
        assert [each for each in targets if not (tmp_path / "pages" / page.parent / each).exists()] == []


def test_a_picture_of_the_site_leads_to_itself_in_full_size(tmp_path: Path) -> None:
    SITE.gather(tmp_path / "pages")
    shown = [
        (page, alone, file)
        for page in SITE.pages()
        for alone, file in re.findall(r"(\[?)!\[[^\]]*\]\(([^)]+)\)", (tmp_path / "pages" / page).read_text())
    ]
    assert {Path("README.md"), Path("docs/operations.md")} <= {page for page, _, _ in shown}
    assert [(str(page), file) for page, alone, file in shown if not alone] == []
    assert (tmp_path / "pages" / "site.css").read_text().startswith("/*")


PAGE = (Path(__file__).resolve().parents[1] / "docs/support.md").read_text()
TABLE = PAGE.split("## Stability by field")[1].split("\n## ")[0]
EXPERIMENTAL = re.findall(r"`((?:spec|status)\.[A-Za-z.]+)`", TABLE)
(VERSION,) = tier_definition()["spec"]["versions"]


@pytest.mark.parametrize("path", EXPERIMENTAL)
def test_an_experimental_field_is_a_field(path: str) -> None:
    node: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        node = node["properties"][name]
    assert node["description"]


FAULTS = (ROOT / "docs/troubleshooting.md").read_text()
PROOFS = (ROOT / "tests/connector/faults/README.md").read_text()


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_fault_of_the_page_is_proved_by_tests_that_exist() -> None:
    faults = rows(FAULTS.split("## Faults")[1].split("\n## ")[0])
    assert [cells[0] for cells in faults] == [cells[0] for cells in rows(PROOFS)]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[1]) for cells in rows(PROOFS)]
    assert all(named)
    assert [f"{path}::{name}" for each in named for path, name in each if name not in functions_in(ROOT / path)] == []


def test_metrics_causes_and_conditions_of_the_page_of_faults_are_those_of_the_code() -> None:
    served = (ROOT / "connector/METRICS.md").read_text()
    named = set(re.findall(r"vllm:kvtier_\w+", FAULTS))
    assert [name for name in named if f"`{name}`" not in served] == []
    sources = "".join(path.read_text() for path in (ROOT / "connector/kvtier_connector").rglob("*.py"))
    causes = set(re.findall(r'cause="(\w+)"', FAULTS))
    assert len(causes) > 8
    assert [cause for cause in causes if f'"{cause}"' not in sources] == []
    reported = (ROOT / "docs/conditions.md").read_text()
    named = set(re.findall(r"condition `(\w+)`", FAULTS))
    assert named
    assert [name for name in named if f"## {name}\n" not in reported] == []


def test_the_readme_of_the_embedded_cluster_promises_what_is_tested() -> None:
    files = sorted((ROOT / "tests/conformance").glob("test_*.py"))
    wanted = [f"| {path.stem} | {ast.get_docstring(ast.parse(path.read_text()))} |" for path in files]
    readme = (ROOT / "e2e/localcluster/README.md").read_text()
    assert [line for line in readme.splitlines() if line.startswith("| test_")] == wanted
