# SPDX-License-Identifier: Apache-2.0
"""Makes a pod of another owner an engine of a tier: decides for a pod what it needs, and puts that in. Pure.

Everything is taken from the pod that `parts.engine` renders for the tier, so attached engines and those of the operator
agree. Volumes get the prefix ``kvtier-``, since the pod has volumes of its own. The owner's settings are kept where an
engine of the tier can live with them, and are refused otherwise.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from kvtier_connector.contract.engine import SUPPORTED_VLLM
from kvtier_operator import names, quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import CLAIMED, NO_ACCELERATOR, abbreviations
from kvtier_operator.api.pod_template import PodTemplate
from kvtier_operator.names import Manifest
from kvtier_operator.parts.engine import release_of, template_of
from kvtier_operator.plan import TierPlan, digest, engine_args
from kvtier_operator.plan.decisions import checkpoints_of
from kvtier_operator.plan.engine_args import EngineArgs
from kvtier_operator.plan.sizing import make_sizing

Step = str | tuple[str, str]
"""One step into an object: a field, or an item of a list by the value of its key."""
Path = tuple[Step, ...]

VARIABLE: Final = "VLLM_ADDITIONAL_ARGS"
"""Variable that presets of KServe's LLMInferenceService append to the command line of vLLM, by the shell's ``eval``."""

MODULES: Final = "kvtier_connector."
"""Begins the names of the connector's modules, which only our own flags have."""

_PREFIX: Final = "kvtier-"
_VOLUMES: Final = frozenset({"blocks", "config", "connector", "shm", "kvtier-keys"})
_GROUP: Final = ("fsGroup", "fsGroupChangePolicy")
_VARIABLES: Final = ("PYTHONHASHSEED", "PYTHONPATH", names.CONFIG_VARIABLE)
_TRANSFER, _SCHEDULER, _ALGORITHM = "kv-transfer-config", "scheduler-cls", "prefix-caching-hash-algo"
_CACHING: Final = "enable-prefix-caching"
_NAMED: Final = re.compile(r'"(kv_connector|generation)": *"([^"]*)"')
"""Fields of the connector's flag without which an engine is none of the tier."""
_READ: Final = frozenset(
    {_TRANSFER, _SCHEDULER, _ALGORITHM, _CACHING, "config", "model", "revision", "tensor-parallel-size"}
)
"""Flags that are read one by one, and are no part of the other flags of the identity."""
_LIKELY: Final = frozenset({names.ENGINE_CONTAINER, "vllm", "main", "kserve-container"})
_OPERATORS: Final = frozenset(";&|()<>")
_MOUNTED: Final = "/mnt/models"
"""Where KServe puts the model that the object names by its address."""
_PRESET_SECONDS: Final = 600
"""Time to start that the startup probe of KServe's presets allows."""
_UNREAD: Final = (
    f"envFrom is not read: write {', '.join(engine_args.ENVIRONMENT)} and PYTHONPATH in env, if they are among it"
)


class AttachRefused(Exception):
    """The pod cannot become an engine of the tier; has the fields at fault, each with what to do."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        """Note the problems: field and text."""
        super().__init__("; ".join(f"{field_}: {text}" for field_, text in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A pod of another owner, as far as its object says."""

    pod: Manifest
    container: Path
    """Where in the pod the container is that runs vLLM."""
    prefix: str = ""
    """Path of the pod in its object, for messages."""
    model: str | None = None
    """Model that the object names outside of the container."""
    tensor_parallel: int | None = None
    """The same of the ranks."""
    variable: str = ""
    """Variable that takes flags, where the container's command line is another owner's."""
    is_partial: bool = False
    """Whether the container is laid over one of a template, which has more of the command line and the probes."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Names by which the owner knows fields of the pod, where the object is none of Kubernetes."""

    @property
    def engine(self) -> Manifest:
        """Return the container."""
        found: Manifest = step_into(self.pod, self.container)
        return found

    def field(self, *path: str) -> str:
        """Return the name of a field of the container, for messages."""
        return self.at(*self.container, *path)

    def at(self, *path: Step) -> str:
        """Return the name of a field of the pod, for messages."""
        name = write_path(path)
        ours = next((each for each in self.words if name.startswith(each)), "")
        name = self.words.get(ours, "") + name.removeprefix(ours)
        # Fields of all models stand beside the models.
        return name[1:] if name.startswith("/") else ".".join(filter(None, (self.prefix, name)))


class Put(NamedTuple):
    """One thing that is put into a pod."""

    at: Path
    value: Any
    """The value of a field, or a whole item of a list."""


@dataclass(frozen=True, kw_only=True)
class EngineAdditions:
    """Everything that makes a pod an engine of the tier."""

    puts: tuple[Put, ...]
    flags: tuple[str, ...]
    port: int
    """Port on which the pod serves, and has its metrics."""
    notes: tuple[str, ...]
    """Sentences about what was taken from the owner's settings."""

    def put_into(self, target: Target) -> Manifest:
        """Return the pod with it."""
        pod: Manifest = copy_of(target.pod)
        for each in self.puts:
            put(pod, each.at, copy_of(each.value))
        engine = step_into(pod, target.container)
        place = None if is_hidden(engine) else _script(engine)
        if target.variable:
            variable: Path = ("env", ("name", target.variable), "value")
            put(engine, variable, _lengthened(step_into(engine, variable) or "", self.flags))
        elif place is None:
            engine["args"] = [*(engine.get("args") or ()), *self.flags]
        else:
            field_, item = _field_of(engine, place)
            engine[field_][item] = _lengthened(engine[field_][item], self.flags)
        return pod


def _lengthened(line: str, flags: Sequence[str]) -> str:
    """Return a command line with flags at its end, before blanks and the sign that the line goes on."""
    return re.sub(r"(?:\\\n|[ \t\n])*\Z", lambda end: f"{line and ' '}{shlex.join(flags)}{end[0]}", line, count=1)


def write_path(path: Iterable[Step]) -> str:
    """Write a path as the API server does, with list items by their name."""
    return "".join(f".{step}" if isinstance(step, str) else f"[{step[1]}]" for step in path).removeprefix(".")


def copy_of(value: Any) -> Any:
    """Return a copy of JSON that shares nothing with it, and has no part twice, as aliases of YAML make it."""
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    return [copy_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def step_into(tree: Any, path: Path) -> Any:
    """Return what a tree has at a path; None where it has nothing."""
    for step in path:
        if isinstance(step, str):
            tree = tree.get(step) if isinstance(tree, Mapping) else None
        else:
            items = tree if isinstance(tree, (list, tuple)) else ()
            tree = next((item for item in items if item.get(step[0]) == step[1]), None)
    return tree


def put(tree: Any, path: Path, value: Any) -> None:
    """Set a field or a list item of a tree, in place; what is missing on the way is made."""
    for step, after in pairwise(path):
        if not step_into(tree, (step,)):
            empty: Any = {} if isinstance(after, str) else []
            put(tree, (step,), empty if isinstance(step, str) else dict([step]))
        tree = step_into(tree, (step,))
    last = path[-1]
    if isinstance(last, str):
        tree[last] = value
        return
    place = next((place for place, item in enumerate(tree) if item.get(last[0]) == last[1]), len(tree))
    tree[place : place + 1] = [value]


def _holds(found: Any, wanted: Any) -> bool:
    """Return whether an object has all that is wanted of it; others, and the API server, may have added to it."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_holds(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        items = found if isinstance(found, (list, tuple)) else ()
        return all(any(_holds(item, each) for item in items) for each in wanted)
    return bool(found == wanted)


def find_engine(pod: Mapping[str, Any], name: str | None = None) -> Manifest | None:
    """Return the container of a pod that runs vLLM; None where it cannot be told."""
    found = list(pod.get("containers") or ())
    if name is not None or len(found) > 1:
        found = [each for each in found if (_is_likely(each) if name is None else each.get("name") == name)]
    return found[0] if len(found) == 1 else None


def _is_likely(container: Mapping[str, Any]) -> bool:
    words = (container.get("image", ""), *(container.get("command") or ()), *(container.get("args") or ()))
    return container.get("name") in _LIKELY or any("vllm" in str(word) for word in words)


def read_words(target: Target) -> list[str]:
    """Return the command line of the engine, word by word.

    Raises:
        AttachRefused: a shell runs more than the engine.
    """
    engine = target.engine
    if target.variable:
        text = str(step_into(engine, ("env", ("name", target.variable), "value")) or "")
        return [*_passed_on(engine), *_read_script(target.field("env", target.variable), text)]
    place = None if is_hidden(engine) else _script(engine)
    if place is None:
        return _passed_on(engine)
    return _read_script(target.field(_field_of(engine, place)[0]), _all_words(engine)[place])


def _all_words(engine: Mapping[str, Any]) -> list[str]:
    return [str(word) for field_ in ("command", "args") for word in engine.get(field_) or ()]


def _field_of(engine: Mapping[str, Any], place: int) -> tuple[str, int]:
    """Return the field of a word, and its place there."""
    commands = len(engine.get("command") or ())
    return ("command", place) if place < commands else ("args", place - commands)


def _script(engine: Mapping[str, Any]) -> int | None:
    """Return which of the words is the script of a shell that starts the engine; None where no shell does."""
    words = _all_words(engine)
    if not words or PurePosixPath(words[0]).name not in {"sh", "bash"}:
        return None
    return next((place for place in range(2, len(words)) if re.fullmatch("-[a-z]*c", words[place - 1])), None)


def is_hidden(engine: Mapping[str, Any]) -> bool:
    """Return whether a script starts the engine with flags of its own and the words behind it, as KServe's do."""
    place = _script(engine)
    return place is not None and "$@" in _all_words(engine)[place]


def _passed_on(engine: Mapping[str, Any]) -> list[str]:
    """Return the words that such a script passes on; all of them where there is none."""
    words, place = _all_words(engine), _script(engine)
    # The word behind the script is its name.
    return words if place is None else words[place + 2 :]


def variable_of(engine: Mapping[str, Any]) -> str:
    """Return the variable whose flags the engine's script appends; empty if there is none."""
    return VARIABLE if any(VARIABLE in str(word) for word in engine.get("command") or ()) else ""


def _read_script(at: str, script: str) -> list[str]:
    """Return the words of a script that is one command, to which flags can be added."""
    text = script.replace("\\\n", " ").strip()
    reader = shlex.shlex(text, posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, ""
    try:
        words, is_commented = list(reader), shlex.split(text, comments=True) != shlex.split(text)
    except ValueError as error:
        problem = f"is no command line ({error}): close its quotes, and end it without a backslash"
        raise AttachRefused([(at, problem)]) from error
    if "\n" in text or any(word and set(word) <= _OPERATORS for word in words):
        problem = (
            "is a script of several commands, so flags have no certain place: write vLLM's own as command and args"
        )
        raise AttachRefused([(at, problem)])
    if is_commented:
        raise AttachRefused([(at, "has a #, behind which the shell reads no flags: quote it, or remove the comment")])
    words = words[1:] if words[:1] == ["exec"] else words
    if words[:1] == ["env"] or (words and re.match(r"\w+=", words[0])):
        text = "sets variables before the command, where no cache identity has them: write them in env"
        raise AttachRefused([(at, text)])
    return words


@dataclass(frozen=True, kw_only=True)
class _Theirs:
    """The owner's words about the engine; None where the object says nothing."""

    words: tuple[str, ...]
    model: str | None
    revision: str | None
    image: str | None
    accelerator: str | None
    tensor_parallel: int | None
    env: tuple[Manifest, ...]

    def spec(self, spec: TierSpec) -> TierSpec:
        """Return the tier as it were, had it this engine."""
        accelerator = _said_of(resource=self.accelerator)
        security = spec.engine.pod_template.security_context
        engine = spec.engine.model_copy(
            update={
                **_said_of(image=self.image, tensor_parallel=self.tensor_parallel),
                "args": self.words,
                "env": self.env,
                "external": None,
                "compile_cache": None,
                # The janitor is of the same group on the volume.
                "pod_template": PodTemplate.model_validate({"securityContext": security}),
                "accelerator": spec.engine.accelerator.model_copy(update=accelerator),
            }
        )
        model = spec.model.model_copy(update=_said_of(name=self.model, revision=self.revision) | {"loras": ()})
        return spec.model_copy(update={"engine": engine, "model": model, "kv_events": None})


def _said_of(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def differences(plan: TierPlan, target: Target) -> dict[str, bool]:
    """Return what a running pod lacks to be an engine of the tier, by name; True: it serves with that of another spec.

    Raises:
        AttachRefused: it cannot become one.
    """
    words, found = read_words(target), dict[str, bool]()
    ours = {word.partition("=")[0]: word for word in words if MODULES in word}
    wanted = attach(plan, replace(target, pod=_without_ours(target)), [word for word in words if MODULES not in word])
    for each in wanted.puts:
        there = step_into(target.pod, each.at)
        if not _stands(each, there):
            found[write_path(each.at)] = there is not None and _serves(each, there)
    for flag in wanted.flags:
        name = flag.partition("=")[0]
        if flag != (there := ours.pop(name, "")):
            is_same = bool(there) and set(_NAMED.findall(flag)) == set(_NAMED.findall(there))
            found[name] = is_same or name == f"--{_SCHEDULER}"  # vLLM's own serves, too, and splits no hits
    return found | dict.fromkeys(ours, True)


def _stands(each: Put, found: Any) -> bool:
    """Return whether a running pod has it, or does without: a pod that has started had the time for its probe."""
    value = each.value
    if each.at[0] == "initContainers":
        # One of another release installs a connector, too; a chart may leave the rest of it out.
        value = {name: value[name] for name in ("name", "volumeMounts")}
    return "startupProbe" in each.at or _holds(found, value)


def _serves(each: Put, found: Any) -> bool:
    """Return whether an engine serves with what it has instead: another size, or an earlier configuration."""
    kinds = {step_into(volume, ("emptyDir", "medium")) for volume in (each.value, found)}
    is_value = each.at[-1] in {"memory", "sizeLimit", ("name", names.CONFIG_VARIABLE)}
    return is_value or ("emptyDir" in each.value and len(kinds) == 1)


def attach(plan: TierPlan, target: Target, words: Sequence[str] | None = None) -> EngineAdditions:
    """Decide what a pod needs that has nothing of a tier's; of a running one, the command line without ours is given.

    Raises:
        AttachRefused: it cannot become an engine of the tier.
    """
    is_running, words = words is not None, read_words(target) if words is None else words
    theirs = _read(plan, target, words)
    spec = theirs.spec(plan.spec)
    made = replace(plan, spec=spec, sizing=make_sizing(spec, plan.decisions), rendered=None, desired=None)
    own, port = template_of(made)["spec"], _port(plan, words)
    problems = [
        *_flag_problems(plan, target, words),
        *_variable_problems(plan, target),
        *_identity_problems(plan, target, made),
        *_pod_problems(made, target, own, is_running=is_running),
    ]
    if problems:
        raise AttachRefused(problems)
    return EngineAdditions(
        puts=tuple(_puts(made, target, own, port=port)),
        port=port,
        flags=_flags(made, own["containers"][0]["args"], engine_args.read(words)),
        notes=(*_notes(plan, theirs), *([_UNREAD] if target.engine.get("envFrom") else ())),
    )


def _without_ours(target: Target) -> Manifest:
    """Return a pod without what is put into pods, so that what it needs can be decided anew."""
    pod: Manifest = copy_of(target.pod)
    inits = pod.get("initContainers") or ()
    containers = [*inits, *(pod.get("containers") or ()), step_into(pod, target.container)]
    for owner, field_ in ((pod, "volumes"), *((each, "volumeMounts") for each in containers)):
        owner[field_] = [each for each in owner.get(field_) or () if not each["name"].startswith(_PREFIX)]
    pod["initContainers"] = [each for each in inits if each["name"] != names.INSTALL_CONTAINER]
    return pod


def _read(plan: TierPlan, target: Target, words: Sequence[str]) -> _Theirs:
    """Read what the object says about the identity of blocks."""
    engine, (positional, given) = target.engine, _arguments(words)
    args = engine_args.read(given)
    model = (args.words.get("model") or args.words.get("model-id") or (positional or target.model,))[-1]
    if model == _MOUNTED:
        model = target.model
    is_whole = bool(words) and not (target.is_partial or is_hidden(engine))
    assumed = "main" if is_whole and model and model != target.model and not model.startswith("/") else None
    return _Theirs(
        words=tuple(word for flag, found in args.words.items() if flag not in _READ for word in (f"--{flag}", *found)),
        model=model,
        revision=(args.words.get("revision") or (assumed,))[-1],
        image=engine.get("image"),
        accelerator=_accelerator(plan, engine),
        tensor_parallel=args.count("tensor-parallel-size")
        if is_whole or args.has("tensor-parallel-size")
        else target.tensor_parallel,
        env=tuple(each for each in engine.get("env") or () if each["name"] in engine_args.ENVIRONMENT),
    )


def _arguments(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the model of a command line, if it is no flag's, and the words after the program."""
    if "serve" in words:
        rest = words[words.index("serve") + 1 :]
        return (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else (None, rest)
    modules = [place for place, word in enumerate(words) if word == "-m"]
    return None, words[modules[0] + 2 :] if modules else words


def _accelerator(plan: TierPlan, engine: Mapping[str, Any]) -> str | None:
    resources = engine.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    if (wanted := plan.spec.engine.accelerator.resource) == CLAIMED or not asked:
        return None
    return wanted if wanted in asked else next((name for name in asked if "/" in name), NO_ACCELERATOR)


def _port(plan: TierPlan, words: Sequence[str]) -> int:
    external, said = plan.spec.engine.external, (engine_args.read(words).words.get("port") or ("",))[-1]
    return int(said) if said.isdecimal() else (names.HTTP_PORT if external is None else external.port)


_FORBIDDEN: Final = {
    f"--{_TRANSFER}": "names another connector: remove it, or attach engines without one",
    "--kv-offloading-size": "makes vLLM render a connector of its own: remove it; spec.cpu.size of the tier sets it",
    "--kv-offloading-backend": "makes vLLM render a connector of its own: remove it",
    f"--no-{_CACHING}": "turns off what the tiers stand on: remove it",
    "--config": "hides flags in a file: write them as args, where they become part of the cache identity",
    "--nnodes": "spreads an engine over several nodes: only engines of one pod can be attached",
    "--headless": "spreads an engine over several nodes: only engines of one pod can be attached",
}
_ANOTHER_SCHEDULER: Final = "names a scheduler of its own: remove it, or set spec.disk.splitHits of the tier to 'Off'"


def _flag_problems(plan: TierPlan, target: Target, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    spec = plan.spec
    forbidden = _FORBIDDEN if spec.disk.split_hits == "Off" else {**_FORBIDDEN, f"--{_SCHEDULER}": _ANOTHER_SCHEDULER}
    for flag, text in forbidden.items():
        if any(re.match(abbreviations(flag), word) for word in words):
            yield target.field("args", flag), text
    said = engine_args.read(words).words.get(_ALGORITHM)
    if said and said[-1] != spec.hash.algorithm:
        text = f"is {said[-1]}, and spec.hash.algorithm of the tier is {spec.hash.algorithm}: make the two equal"
        yield target.field("args", f"--{_ALGORITHM}"), text


def _variable_problems(plan: TierPlan, target: Target) -> Iterator[tuple[str, str]]:
    variables: Manifest = {}
    for each in target.engine.get("env") or ():
        if each["name"] in variables:
            yield target.field("env", each["name"]), "is there twice, and the last one counts: remove the others"
        variables[each["name"]] = each
    seed = variables.get("PYTHONHASHSEED")
    if seed is not None and seed.get("value") != plan.spec.hash.seed:
        said, ours = seed.get("value", "taken from another object"), plan.spec.hash.seed
        text = f"is {said}, and spec.hash.seed of the tier is {ours}: remove the variable, or set the field"
        yield target.field("env", "PYTHONHASHSEED"), text
    if "value" not in variables.get("PYTHONPATH", {"value": ""}):
        text = f"is taken from another object: write its value, to which {names.CONNECTOR_MOUNT} is added"
        yield target.field("env", "PYTHONPATH"), text


_FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "model_name": ("args.--model", "spec.model.name"),
    "model_revision": ("args.--revision", "spec.model.revision"),
    "engine_image": ("image", "spec.engine.image"),
    "engine_accelerator": ("resources.limits", "spec.engine.accelerator.resource"),
    "engine_tensor_parallel": ("args.--tensor-parallel-size", "spec.engine.tensorParallel"),
}
"""Part of the identity of blocks: the owner's field and that of the tier."""


def _identity_problems(plan: TierPlan, target: Target, made: TierPlan) -> Iterator[tuple[str, str]]:
    """Yield each field that would make blocks of another generation."""
    found, wanted = digest.identity(made.spec, plan.decisions.chunking.settings()), plan.generation.identity
    makes = f"which makes blocks of another identity than generation {plan.generation.digest}"
    for key, (theirs, ours) in _FIELDS.items():
        if key in wanted and found[key] != wanted[key]:
            text = f"is {found[key]}, {makes}: {ours} of the tier is {wanted[key]}; make the two equal"
            yield target.field(theirs), text
    for key, theirs, ours in (("engine_flags", "args.--", "args"), ("engine_env", "env.", "env")):
        for name in sorted(found[key].keys() | wanted[key].keys()):
            one, other = (_said(each[key].get(name)) for each in (found, wanted))
            if one != other:
                text = f"is {one}, {makes}: spec.engine.{ours} of the tier has {other}; make the two equal"
                yield target.field(f"{theirs}{name}"), text


def _said(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "set"
    return "left out" if value is None else str(value)


def _pod_problems(
    plan: TierPlan, target: Target, own: Mapping[str, Any], *, is_running: bool
) -> Iterator[tuple[str, str]]:
    pod, engine = target.pod, target.engine
    release = release_of(str(engine.get("image", "")))
    if release is not None and release not in SUPPORTED_VLLM:
        yield target.field("image"), f"is vLLM {release}, and the connector supports {' and '.join(SUPPORTED_VLLM)}"
    limit, size = None if is_running else _memory(engine, "limits"), plan.sizing
    if limit is not None and limit < (needed := size.memory_bytes):
        terms = (size.engine_memory_bytes, size.shm_bytes, size.io_worker_bytes)
        engine_bytes, shm, moving = map(quantity.show_bytes, terms)
        text = (
            f"is {quantity.show_bytes(limit)}, and the engine needs {quantity.show_bytes(needed)} (spec.engine.memory "
            f"{engine_bytes}, shared memory {shm}, moving blocks {moving}): raise it, or lower spec.cpu.size or "
            "spec.engine.memory of the tier"
        )
        yield target.field("resources", "limits", "memory"), text
    ours, theirs = (each.get("fsGroup") for each in (own["securityContext"], pod.get("securityContext") or {}))
    if theirs not in {None, ours}:
        where = "spec.engine.podTemplate.securityContext.fsGroup"
        text = f"is {theirs}, and the tier's is {ours}: make it equal, or set {where} of the tier"
        yield target.at("securityContext", "fsGroup"), text
    if (volume := _shm_volume(target)) is not None and (volume.get("emptyDir") or {}).get("medium") != "Memory":
        yield target.at("volumes", ("name", volume["name"])), f"is {names.SHM_MOUNT} and no memory: set medium: Memory"
    taken = {_directory(each) for each in engine.get("volumeMounts") or ()}
    for path in sorted(taken & {names.VOLUME_MOUNT, names.CONFIG_MOUNT, names.KEYS_MOUNT, names.CONNECTOR_MOUNT}):
        yield target.field("volumeMounts", path), "is where the tier's own files go: mount yours somewhere else"
    if step_into(engine, ("securityContext", "readOnlyRootFilesystem")) and names.SCRATCH_MOUNT not in taken:
        text = f"has no {names.SCRATCH_MOUNT}, where the engine must write: mount an emptyDir"
        yield target.field("volumeMounts"), text
    for field_, ours in (("volumes", {*map(_renamed, _VOLUMES)}), ("initContainers", {names.INSTALL_CONTAINER})):
        for each in pod.get(field_) or ():
            if each["name"] in ours:
                yield target.at(field_, ("name", each["name"])), "has a name that the tier needs: rename it"


def _memory(engine: Mapping[str, Any], kind: str) -> int | None:
    said = str(step_into(engine, ("resources", kind, "memory")))
    return quantity.parse_bytes(said) if quantity.is_quantity(said) else None


def _shm_volume(target: Target) -> Manifest | None:
    """Return the owner's volume for shared memory; None where there is none."""
    mounts = target.engine.get("volumeMounts") or ()
    name = next((each["name"] for each in mounts if _directory(each) == names.SHM_MOUNT), None)
    return next((each for each in target.pod.get("volumes") or () if each["name"] == name), None)


def _directory(mount: Mapping[str, Any]) -> str:
    return str(PurePosixPath(mount["mountPath"]))


def _renamed(volume: str) -> str:
    return f"{_PREFIX}{volume.removeprefix(_PREFIX)}"


def _puts(plan: TierPlan, target: Target, own: Mapping[str, Any], *, port: int) -> Iterator[Put]:
    engine, ours, at = target.engine, own["containers"][0], target.container
    shm = _shm_volume(target)
    yield from _pod_puts(target, own, shm)
    limit = step_into(shm, ("emptyDir", "sizeLimit"))
    if shm is not None and limit is not None and quantity.parse_bytes(str(limit)) < plan.sizing.shm_bytes:
        size = quantity.format_bytes(plan.sizing.shm_bytes)
        yield Put(("volumes", ("name", shm["name"]), "emptyDir", "sizeLimit"), size)
    for mount in _mounts(ours, shm):
        if shm is None or mount["mountPath"] != names.SHM_MOUNT:
            yield Put((*at, "volumeMounts", ("mountPath", mount["mountPath"])), mount)
    yield from _variables(plan, engine, ours, at)
    request = _memory(engine, "requests") or _memory(engine, "limits")
    if request is None or request < plan.sizing.memory_bytes:
        yield Put((*at, "resources", "requests", "memory"), quantity.format_bytes(plan.sizing.memory_bytes))
    yield from _startup(plan, target, ours["startupProbe"], port)


def _pod_puts(target: Target, own: Mapping[str, Any], shm: Manifest | None) -> Iterator[Put]:
    for init in own["initContainers"]:
        if init["name"] == names.INSTALL_CONTAINER:
            yield Put(("initContainers", ("name", init["name"])), {**init, "volumeMounts": _mounts(init, shm)})
    # Block files of all engines belong to one group.
    if step_into(target.pod, ("securityContext", "fsGroup")) is None:
        yield from (Put(("securityContext", each), own["securityContext"][each]) for each in _GROUP)
    for volume in own["volumes"]:
        if volume["name"] in _VOLUMES and (shm is None or volume["name"] != "shm"):
            name = _renamed(volume["name"])
            yield Put(("volumes", ("name", name)), {**volume, "name": name})


def _mounts(container: Mapping[str, Any], shm: Manifest | None) -> list[Manifest]:
    """Return the mounts of a container of ours by the names that volumes have in the other pod."""
    theirs = {} if shm is None else {"shm": shm["name"]}
    mounts = (each for each in container["volumeMounts"] if each["name"] in _VOLUMES)
    return [{**each, "name": theirs.get(each["name"], _renamed(each["name"]))} for each in mounts]


def _variables(plan: TierPlan, engine: Mapping[str, Any], ours: Mapping[str, Any], at: Path) -> Iterator[Put]:
    theirs = {each["name"]: each.get("value", "") for each in engine.get("env") or ()}
    for each in (*ours["env"], {"name": names.CONFIG_VARIABLE, "value": plan.config_digest}):
        name, value = each["name"], each.get("value", "")
        if name == "PYTHONPATH" and theirs.get(name):
            value = theirs[name] if value in theirs[name].split(":") else f"{value}:{theirs[name]}"
        if name in _VARIABLES and theirs.get(name) != value:
            yield Put((*at, "env", ("name", name)), {**each, "value": value})


def _startup(plan: TierPlan, target: Target, ours: Mapping[str, Any], port: int) -> Iterator[Put]:
    """Give the engine its time to start: pinning host memory and opening the volume takes a while."""
    probe, needed = target.engine.get("startupProbe"), plan.sizing.startup_seconds
    if probe is None and target.variable and needed > _PRESET_SECONDS:
        yield Put((*target.container, "startupProbe", "failureThreshold"), math.ceil(needed / 10))
    elif probe is None and not target.is_partial:
        command = [f"--port={port}" if word.startswith("--port=") else word for word in ours["exec"]["command"]]
        yield Put((*target.container, "startupProbe"), {**ours, "exec": {"command": command}})
    elif probe is not None:
        period = probe.get("periodSeconds") or 10
        if period * (probe.get("failureThreshold") or 3) + (probe.get("initialDelaySeconds") or 0) < needed:
            yield Put((*target.container, "startupProbe", "failureThreshold"), math.ceil(needed / period))


def _flags(plan: TierPlan, args: Sequence[str], theirs: EngineArgs) -> tuple[str, ...]:
    chosen = [word.partition("=")[0].lstrip("-") for word in checkpoints_of(plan.spec, plan.decisions.chunking).args()]
    wanted = {_TRANSFER, _SCHEDULER, _ALGORITHM, _CACHING, *chosen}
    return tuple(
        word for word in args if (flag := word.partition("=")[0].removeprefix("--")) in wanted and not theirs.has(flag)
    )


def _notes(plan: TierPlan, theirs: _Theirs) -> Iterator[str]:
    """Say where each part of the identity comes from."""
    names_of = ("model", "revision", "image", "accelerator", "tensor_parallel")
    said = {
        **{name.replace("parallel", "parallel size").replace("_", " "): getattr(theirs, name) for name in names_of},
        **{f"--{flag}": _said(found) for flag, found in engine_args.read(theirs.words).identity.items()},
        **{each["name"]: _said(each.get("value")) for each in theirs.env},
    }
    taken = [f"{name} {value}" for name, value in said.items() if value is not None]
    others = [name for name, value in said.items() if value is None]
    yield f"generation {plan.generation.digest} is that of {', '.join(taken) or 'the tier'}"
    if others:
        yield f"not said by the object, and taken from the tier: {', '.join(others)}"
