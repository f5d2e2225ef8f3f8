"""A Helm chart of the same documents as `kubernetes`, with values. Pure.

Names and the namespace are those of the Helm release. Rendered with the default values, the chart
gives what `penstock export kubernetes` writes for that name and namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.export.kubernetes import Document
from penstock.export.settings import ClusterSettings
from penstock.export.yaml_text import RELEASE, Yaml, dump, dump_template, values_in

AUTOSCALERS = ("keda", "hpa", "none")
# Each value of the chart, in the order of values.yaml, and what it is.
VALUES: Mapping[str, str] = {
    "image": "Image of the server.",
    "autoscaler": "keda scales on queued requests, hpa on CPU or a metric of pods; or none.",
    "minReplicas": "Lowest number of pods; their number if autoscaler is none.",
    "maxReplicas": "Most pods.",
    "queueDepth": "Queued requests per pod above which an autoscaler adds one.",
    "prometheusUrl": "Prometheus that KEDA asks.",
    "resources": "What each pod gets. Requests equal limits: threads fit the cores.",
    "modelsClaim": "PersistentVolumeClaim with the models; empty: RELEASE-models.",
    "keysSecret": "Secret with keys.toml and metrics-key; empty: RELEASE-keys.",
    "nodeSelector": "Labels of the nodes to run on.",
    "tolerations": "Taints of nodes that are accepted.",
    "networkPolicy": "Whether a NetworkPolicy restricts who may connect.",
    "serviceMonitor": "Whether a ServiceMonitor asks Prometheus' operator to scrape the pods.",
}
CHECKS = """\
{{- if not (has .Values.autoscaler (list "keda" "hpa" "none")) }}
{{- fail (printf "autoscaler is %q; expected keda, hpa or none" .Values.autoscaler) }}
{{- end }}
"""


def chart(
    settings: ClusterSettings, documents: Sequence[Document], chart_name: str, version: str
) -> dict[str, str]:
    """Return the chart's files by path."""
    about: Yaml = {
        "apiVersion": "v2",
        "name": chart_name,
        "description": f"Penstock, serving {chart_name}.",
        "type": "application",
        "version": version,
        "appVersion": version,
    }
    templates = {
        f"templates/{each.file}": dump_template(each.body, each.comments, each.condition)
        for each in documents
    }
    return {
        "Chart.yaml": dump(about),
        "values.yaml": values_text(settings, documents),
        "templates/checks.yaml": CHECKS,
        **templates,
    }


def values_text(settings: ClusterSettings, documents: Sequence[Document]) -> str:
    """Return values.yaml, each value with what it is."""
    values: dict[str, Yaml] = {
        "autoscaler": settings.scaling.autoscaler,
        "networkPolicy": True,
        "serviceMonitor": True,
    }
    for document in documents:
        for each in values_in(document.body):
            assert values.setdefault(each.path, each.value) == each.value, each.path
    assert values.keys() <= VALUES.keys(), values.keys() - VALUES.keys()
    # Templates have the defaults that depend on the release.
    values = {path: "" if RELEASE in str(value) else value for path, value in values.items()}
    parts = [dump({path: values[path]}, [text]) for path, text in VALUES.items() if path in values]
    return "\n".join(parts)
