"""YAML that PyYAML reads back to the same values, and templates that hold Helm's expressions."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.export import yaml_text
from penstock.export.yaml_text import ChartValue, When

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(texts, documents, min_size=1, max_size=3))
def test_what_is_written_is_read_back(document: dict) -> None:
    assert yaml.safe_load(yaml_text.dump(document)) == document


@pytest.mark.parametrize(
    "text",
    ["yes", "No", "on", "null", "~", "1", "1.5", "1e3", "0x1F", "08:30", "2026-11-18", ".inf", ""]
    + ["- a", "a: b", "a #b", "#a", "@a", "%a", "{a}", "[a]", "*a", "&a", "!a", "|", ">", "'", '"']
    + [" a", "a ", "a\nb", "\u2028", "\x85", "\U0001f600", "---", "...", "=", "<<", "?", "a:"],
)
def test_texts_stay_texts(text: str) -> None:
    document = {"key": text, text: ["x", text]}
    assert yaml.safe_load(yaml_text.dump(document)) == document


def test_the_form_is_what_people_write() -> None:
    document = {
        "apiVersion": "v1",
        "metadata": {"name": "digits", "labels": {}},
        "spec": {
            "args": ["--host", "0.0.0.0"],
            "ports": [{"name": "http", "port": 8000}, {"name": "grpc", "port": 8001}],
            "nested": [["a", "b"], []],
        },
    }
    assert (
        yaml_text.dump(document, ["First.", "", "Second."])
        == """\
# First.
#
# Second.
apiVersion: v1
metadata:
  name: digits
  labels: {}
spec:
  args:
    - --host
    - "0.0.0.0"
  ports:
    - name: http
      port: 8000
    - name: grpc
      port: 8001
  nested:
    - - a
      - b
    - []
"""
    )


def test_a_comment_cannot_become_content() -> None:
    assert yaml.safe_load(yaml_text.dump({"a": 1}, ["one\nb: 2"])) == {"a": 1}


@given(texts)
def test_every_text_may_stand_in_a_comment(text: str) -> None:
    assert yaml.safe_load(yaml_text.dump({"a": 1}, [text])) == {"a": 1}


def test_a_comment_of_a_template_is_no_expression() -> None:
    text = yaml_text.dump_template({"a": 1}, ['model {{ fail "x" }}'])
    assert text.splitlines()[0] == '# model {{ "{{" }} fail "x" }}'


CHARTED = {
    "replicas": When('eq .Values.autoscaler "none"', False, ChartValue("replicas", 2)),
    "kept": When("true", True, {"a": 1}),
    "image": ChartValue("image.name", "penstock:1"),
    "resources": ChartValue("resources", {"cpu": "2"}),
    "list": [{"name": f"{yaml_text.RELEASE}-keys", "items": ChartValue("items", [])}],
    "braces": "{{ a }}",
}


def test_plain_yaml_has_the_defaults() -> None:
    assert yaml.safe_load(yaml_text.dump(CHARTED)) == {
        "kept": {"a": 1},
        "image": "penstock:1",
        "resources": {"cpu": "2"},
        "list": [{"name": f"{yaml_text.RELEASE}-keys", "items": []}],
        "braces": "{{ a }}",
    }


def test_a_template_has_expressions() -> None:
    assert (
        yaml_text.dump_template(CHARTED, ["Why."], ".Values.isOn")
        == """\
{{- if .Values.isOn }}
# Why.
{{- if eq .Values.autoscaler "none" }}
replicas: {{ .Values.replicas }}
{{- end }}
{{- if true }}
kept:
  a: 1
{{- end }}
image: {{ .Values.image.name | quote }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
list:
  - name: "{{ .Release.Name }}-keys"
    items:
      {{- toYaml .Values.items | nindent 6 }}
braces: "{{ "{{" }} a }}"
{{- end }}
"""
    )


def test_values_are_found() -> None:
    paths = [each.path for each in yaml_text.values_in(CHARTED)]
    assert paths == ["replicas", "image.name", "resources", "items"]
