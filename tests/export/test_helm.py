"""The chart: its values are those that its templates use. `make verify-deploy` renders it."""

import re
from dataclasses import replace

import yaml
from made_settings import made_settings

from penstock.export import helm
from penstock.export.kubernetes import documents
from penstock.export.settings import ModelFiles
from penstock.export.yaml_text import NAMESPACE, RELEASE


def made_chart(**changed: object) -> dict[str, str]:
    named = {"name": RELEASE, "namespace": NAMESPACE, "keys_secret": f"{RELEASE}-keys"}
    files = ModelFiles("pvc", "/models", f"{RELEASE}-models")
    settings = made_settings(**(named | {"files": files} | changed))
    return helm.chart(settings, documents(settings), "digits", "0.1.0")


def test_every_value_is_used_and_every_use_is_a_value() -> None:
    chart = made_chart()
    templates = "".join(text for path, text in chart.items() if path.startswith("templates/"))
    used = set(re.findall(r"\.Values\.(\w+)", templates))
    assert used == yaml.safe_load(chart["values.yaml"]).keys() == helm.VALUES.keys()


def test_values_that_the_settings_do_not_need_are_left_out() -> None:
    chart = made_chart(files=ModelFiles("image", "/models"), keys_secret="")
    values = yaml.safe_load(chart["values.yaml"])
    assert values.keys() == helm.VALUES.keys() - {"modelsClaim", "keysSecret"}


def test_names_are_the_releases() -> None:
    chart = made_chart()
    assert not any(RELEASE in text or NAMESPACE in text for text in chart.values())
    values = yaml.safe_load(chart["values.yaml"])
    assert values["keysSecret"] == values["modelsClaim"] == ""
    expression = '{{ .Values.keysSecret | default (printf "%s-keys" .Release.Name) | quote }}'
    assert expression in chart["templates/deployment.yaml"]
    assert 'job=\\"{{ .Release.Name }}\\"' in chart["templates/scaledobject.yaml"]


def test_a_chart_has_both_autoscalers_and_renders_one() -> None:
    chart = made_chart()
    for name, kind in (("scaledobject", "keda"), ("hpa", "hpa")):
        first, *_, last = chart[f"templates/{name}.yaml"].splitlines()
        assert (first, last) == (f'{{{{- if eq .Values.autoscaler "{kind}" }}}}', "{{- end }}")
    assert 'has .Values.autoscaler (list "keda" "hpa" "none")' in chart["templates/checks.yaml"]
    settings = made_settings()
    fixed = replace(settings, scaling=replace(settings.scaling, autoscaler="none"))
    assert yaml.safe_load(helm.values_text(fixed, documents(fixed)))["autoscaler"] == "none"


def test_the_charts_own_file() -> None:
    about = yaml.safe_load(made_chart()["Chart.yaml"])
    assert (about["apiVersion"], about["name"], about["version"]) == ("v2", "digits", "0.1.0")
