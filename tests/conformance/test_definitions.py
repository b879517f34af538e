# SPDX-License-Identifier: Apache-2.0
"""CustomResourceDefinitions: what is served, dropped, filled in and refused, what rules say, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from objects import GROUP, Define, Http, Json, Kubectl, Until, definition, refusal, widget

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

MERGE = "application/merge-patch+json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OURS = Path(__file__).resolve().parents[2] / "crds" / "kvcachetier.yaml"
TEXT: Json = {"type": "string", "maxLength": 10}


def test_a_definition_is_established(http: Http, widgets: str) -> None:
    status = http("GET", f"{CRDS}/widgets.{GROUP}")[1]["status"]
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert status["storedVersions"] == ["v1"]
    assert status["acceptedNames"]["kind"] == "Widget"


def test_what_the_schema_does_not_know_is_dropped_and_defaults_are_filled_in(http: Http, widgets: str) -> None:
    manifest = widget(unknown=1, free={"anything": {"goes": 1}}, ports=[{"name": "a", "more": 2}])
    _, made = http("POST", widgets, manifest)
    free = {"anything": {"goes": 1}}
    filled = {"mode": "Fast", "replicas": 1, "ports": [{"name": "a", "port": 80}]}
    assert made["spec"] == {"size": 1, "free": free, **filled}


def test_a_null_counts_as_absent_unless_it_is_allowed(http: Http, widgets: str) -> None:
    _, made = http("POST", widgets, widget(mode=None, note=None))
    assert made["spec"]["mode"] == "Fast"
    assert made["spec"]["note"] is None


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    TABLES["refused_values"],
    ids=["maximum", "type", "required", "enum", "length", "list map", "set"],
)
def test_a_wrong_value_is_refused_by_its_field(http: Http, widgets: str, spec: Json, field: str, words: str) -> None:
    refused = refusal(http("POST", widgets, widget(**spec)))
    assert [cause["field"] for cause in refused["details"]["causes"]] == [field]
    assert words in refused["message"]
    assert refused["message"].startswith(f'Widget.{GROUP} "a" is invalid: ')


@pytest.mark.parametrize(
    ("schema", "words"), TABLES["refused_schemas"], ids=["root", "untyped", "items", "default", "both"]
)
def test_a_schema_that_is_not_structural_is_refused(http: Http, schema: Json, words: str) -> None:
    assert words in refusal(http("POST", CRDS, definition("Refused", schema)))["message"]


@pytest.mark.needs("controllers")
def test_a_definition_takes_its_objects_along(http: Http, until: Until, namespace: str) -> None:
    assert http("POST", CRDS, definition("Passing", {"type": "object"}))[0] == 201
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/passings"
    until(lambda: http("GET", path)[0] == 200)
    manifest = {"apiVersion": f"{GROUP}/v1", "kind": "Passing", "metadata": {"name": "a"}}
    until(lambda: http("POST", path, manifest)[0] in (201, 409))
    http("DELETE", f"{CRDS}/passings.{GROUP}")
    until(lambda: http("GET", f"{CRDS}/passings.{GROUP}")[0] == 404)
    until(lambda: http("GET", path)[0] == 404)


def ruled(kind: str, *rules: Json, **properties: Json) -> Json:
    spec = {"type": "object", "properties": properties, "x-kubernetes-validations": list(rules)}
    return definition(kind, {"type": "object", "properties": {"spec": spec}})


@pytest.fixture(scope="module")
def _gadgets_served(define: Define) -> Iterator[None]:
    define(ruled("Gadget", *TABLES["gadget"]["rules"], **TABLES["gadget"]["properties"]))
    return


@pytest.fixture
def gadgets(_gadgets_served: None, namespace: str) -> str:
    return f"/apis/{GROUP}/v1/namespaces/{namespace}/gadgets"


def gadget(**spec: Any) -> Json:
    return {"apiVersion": f"{GROUP}/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": spec}


@pytest.mark.since(29)
@pytest.mark.parametrize(("spec", "words"), TABLES["ruled_out"], ids=["message", "expression", "none", "quantity"])
def test_a_rule_refuses_with_its_message(http: Http, gadgets: str, spec: Json, words: str) -> None:
    (cause,) = refusal(http("POST", gadgets, gadget(**spec)))["details"]["causes"]
    assert cause["field"] == "spec"
    assert words in cause["message"]


@pytest.mark.since(29)
def test_a_rule_may_look_at_what_was_before(http: Http, gadgets: str) -> None:
    assert http("POST", gadgets, gadget(model="a"))[0] == 201
    refused = refusal(http("PATCH", f"{gadgets}/g", {"spec": {"model": "b"}}, media_type=MERGE))
    assert "model is immutable" in refused["message"]
    assert http("PATCH", f"{gadgets}/g", {"spec": {"note": "x"}}, media_type=MERGE)[0] == 200


@pytest.mark.since(33)
def test_what_was_stored_before_a_rule_came_may_stay_until_it_is_changed(
    http: Http, define: Define, namespace: str, until: Until
) -> None:
    spec = {"type": "object", "properties": {"size": {"type": "integer"}, "name": TEXT, "note": {"type": "string"}}}
    crd = define(definition("Ratchet", {"type": "object", "properties": {"spec": spec}}))
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/ratchets"
    manifest = {"apiVersion": f"{GROUP}/v1", "kind": "Ratchet", "metadata": {"name": "r"}}
    assert http("POST", path, {**manifest, "spec": {"size": 20, "name": "wrong"}})[0] == 201
    tightened = {
        "size": {"type": "integer", "maximum": 9},
        "name": {**TEXT, "x-kubernetes-validations": [{"rule": "self == 'right'", "message": "not right"}]},
        "note": {"type": "string"},
    }
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"] = tightened
    change = {"spec": {"versions": crd["spec"]["versions"]}}
    assert http("PATCH", f"{CRDS}/ratchets.{GROUP}", change, media_type=MERGE)[0] == 200
    new = {**manifest, "metadata": {"name": "new"}, "spec": {"size": 20}}
    until(lambda: http("POST", path, new, dryRun="All")[0] == 422)
    code, kept = http("PATCH", f"{path}/r", {"spec": {"note": "x"}}, media_type=MERGE)
    assert code == 200, kept
    assert http("PATCH", f"{path}/r", {"spec": {"size": 21}}, media_type=MERGE)[0] == 422
    assert "not right" in refusal(http("PATCH", f"{path}/r", {"spec": {"name": "worse"}}, media_type=MERGE))["message"]
    assert http("PATCH", f"{path}/r", {"spec": {"size": 3, "name": "right"}}, media_type=MERGE)[0] == 200


@pytest.mark.since(29)
@pytest.mark.parametrize("rule", TABLES["no_rules"], ids=["field", "syntax", "function", "truth"])
def test_a_rule_that_is_none_is_refused(http: Http, rule: str) -> None:
    refusal(http("POST", CRDS, ruled("Refused", {"rule": rule}, a=TEXT)))


@pytest.mark.since(29)
@pytest.mark.parametrize(("rule", "factor"), TABLES["costly_rules"], ids=["far", "little"])
def test_a_rule_that_may_cost_too_much_is_refused(http: Http, rule: str, factor: str) -> None:
    many = {"type": "array", "items": {"type": "string"}}
    fifty = {"type": "array", "maxItems": 50, "items": TEXT}
    texts = {"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 4000}}
    refused = refusal(http("POST", CRDS, ruled("Refused", {"rule": rule}, many=many, fifty=fifty, texts=texts)))
    assert f"estimated rule cost exceeds budget by factor of {factor}" in refused["message"]
    place = "spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].rule"
    assert place in [cause["field"] for cause in refused["details"]["causes"]]


@pytest.mark.since(29)
def test_rules_may_together_cost_too_much(http: Http) -> None:
    lists = {"type": "array", "maxItems": 100, "items": {"type": "string", "maxLength": 10000}}
    rules = [
        {"rule": f"self.texts.all(text, text != '{index}' && text.matches('^{'[a-z]' * 9}$'))"} for index in range(30)
    ]
    refused = refusal(http("POST", CRDS, ruled("Refused", *rules, texts=lists)))
    assert "estimated rule cost total for entire OpenAPIv3 schema exceeds budget by factor of" in refused["message"]


@pytest.mark.since(29)
def test_our_own_definition_is_accepted_and_prints_its_columns(http: Http, kubectl: Kubectl) -> None:
    ours = yaml.safe_load(OURS.read_text())
    name = ours["metadata"]["name"]
    is_there = http("GET", f"{CRDS}/{name}")[0] == 200
    code, answer = http("POST", CRDS, ours, dryRun="All") if is_there else http("POST", CRDS, ours)
    assert code in (201, 409), answer
    kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=240s")
    try:
        kubectl("create", "-f", "-", stdin=(OURS.parent / "samples" / "minimal.yaml").read_text())
        shown = kubectl("get", "kvt").splitlines()[0].split()
        columns = ours["spec"]["versions"][0]["additionalPrinterColumns"]
        visible = [word for each in columns if not each.get("priority") for word in each["name"].upper().split()]
        assert shown == ["NAME", *visible]
        assert "FIELDS:" in kubectl("explain", "kvt.spec.cpu")
    finally:
        kubectl.run("delete", "kvt", "--all", "--wait=false")
        if not is_there:
            http("DELETE", f"{CRDS}/{name}")
