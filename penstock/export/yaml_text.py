"""Documents as YAML text: mappings, lists and scalars in block style, in the order given. Pure.

`ChartValue` and `When` mark what a Helm chart leaves to its values. As plain YAML they are their
defaults; in a template they are Helm's expressions. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

Scalar: TypeAlias = "str | int | float | bool | None"
Yaml: TypeAlias = "Scalar | Mapping[str, Yaml] | Sequence[Yaml] | ChartValue | When"
Lines: TypeAlias = Iterator[str]
INDENT = 2
# Texts that need no quotes, unless they read as another type.
PLAIN = re.compile(r"(?:--(?=[a-z])|[A-Za-z0-9_./])[A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*")
# In YAML 1.1 or 1.2; whatever begins like a number may be one, or a date.
OTHER_TYPES = re.compile(
    r"(?i:y|n|yes|no|true|false|on|off|null|nan|~|[-+]?\.(inf|nan))|[-+.]?[0-9].*|\.|\.\."
)
# Stand for the release's name and namespace in texts of a template.
RELEASE, NAMESPACE = "release-name-of-helm", "release-namespace-of-helm"
EXPRESSIONS = {
    "{{": '{{ "{{" }}',
    RELEASE: "{{ .Release.Name }}",
    NAMESPACE: "{{ .Release.Namespace }}",
}


@dataclass(frozen=True, slots=True)
class ChartValue:
    """A value that a chart's values.yaml sets, by its path there; `value` is the default."""

    path: str
    value: Yaml


@dataclass(frozen=True, slots=True)
class When:
    """A value of a mapping that is there only if a condition on the chart's values holds; `holds`
    says whether it does with their defaults."""

    condition: str
    holds: bool
    value: Yaml


def dump(document: Yaml, comments: Sequence[str] = ()) -> str:
    """Write one document, with comment lines before it."""
    return "\n".join([*_comments(comments), *_block(resolved(document), 0, False)]) + "\n"


def dump_template(document: Yaml, comments: Sequence[str] = (), condition: str = "") -> str:
    """Write one document as a template of a Helm chart, which renders to nothing unless the
    condition holds."""
    # Helm renders comments too.
    comments = [text.replace("{{", EXPRESSIONS["{{"]) for text in comments]
    lines = [*_comments(comments), *_block(document, 0, True)]
    if condition:
        lines = [f"{{{{- if {condition} }}}}", *lines, "{{- end }}"]
    return "\n".join(lines) + "\n"


def resolved(value: Yaml) -> Yaml:
    """Replace values of a chart and conditions by their defaults."""
    if isinstance(value, ChartValue | When):
        return resolved(value.value)
    if isinstance(value, Mapping):
        there = {key: each for key, each in value.items() if _is_there(each)}
        return {key: resolved(each) for key, each in there.items()}
    return [resolved(each) for each in value] if _is_list(value) else value


def values_in(value: Yaml) -> Iterator[ChartValue]:
    """Yield every value of a chart, in order."""
    if isinstance(value, ChartValue):
        yield value
    elif isinstance(value, When):
        yield from values_in(value.value)
    elif isinstance(value, Mapping) or _is_list(value):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from values_in(each)


def _is_there(value: Yaml) -> bool:
    return value.holds if isinstance(value, When) else True


def _is_list(value: Yaml) -> TypeGuard[Sequence[Yaml]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_block(value: Yaml) -> bool:
    return (isinstance(value, Mapping) or _is_list(value)) and bool(value)


def _comments(lines: Sequence[str]) -> Lines:
    each_line = (line for text in lines for line in text.splitlines() or [""])
    return (_printable(f"# {line}".rstrip()) for line in each_line)


def _printable(text: str) -> str:
    """Escape what YAML refuses even in comments, in the form of its quoted texts."""
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)


def _block(value: Yaml, margin: int, is_template: bool) -> Lines:
    """Yield the lines of a mapping or list that is not empty."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            shown = each.value if isinstance(each, When) else each
            lines = _entry(
                f"{' ' * margin}{_scalar(key, is_template)}:", shown, margin, is_template
            )
            if isinstance(each, When):
                yield f"{' ' * margin}{{{{- if {each.condition} }}}}"
                yield from lines
                yield f"{' ' * margin}{{{{- end }}}}"
            else:
                yield from lines
    elif _is_list(value):
        for each in value:
            yield from _item(each, margin, is_template)


def _entry(head: str, value: Yaml, margin: int, is_template: bool) -> Lines:
    below = margin + INDENT
    if isinstance(value, ChartValue) and (
        isinstance(value.value, Mapping) or _is_list(value.value)
    ):
        yield head
        yield f"{' ' * below}{{{{- toYaml .Values.{value.path} | nindent {below} }}}}"
    elif _is_block(value):
        yield head
        yield from _block(value, below, is_template)
    else:
        yield f"{head} {_inline(value, is_template)}"


def _item(value: Yaml, margin: int, is_template: bool) -> Lines:
    """Yield a list's item, whose first line begins with a dash."""
    dash = f"{' ' * margin}- "
    if not _is_block(value):
        yield dash + _inline(value, is_template)
        return
    first, *rest = _block(value, margin + INDENT, is_template)
    assert not first.lstrip().startswith("{{-"), "an item cannot begin with a condition"
    yield dash + first.lstrip()
    yield from rest


def _inline(value: Yaml, is_template: bool) -> str:
    if isinstance(value, ChartValue):
        return f"{{{{ .Values.{value.path}{_filters(value.value)} }}}}"
    if isinstance(value, Mapping):
        return "{}"
    if _is_list(value):
        return "[]"
    assert not isinstance(value, When | Sequence) or isinstance(value, str)
    return _scalar(value, is_template)


def _filters(default: Yaml) -> str:
    """Return what follows a chart's value. A text with the release's name has a default that is
    made when the chart is rendered: values.yaml cannot know the name."""
    if not isinstance(default, str):
        return ""
    if RELEASE not in default:
        return " | quote"
    form = json.dumps(default.replace("%", "%%").replace(RELEASE, "%s", 1))
    return f" | default (printf {form} .Release.Name) | quote"


def _scalar(value: Scalar, is_template: bool) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    has_expression = is_template and any(each in value for each in EXPRESSIONS)
    if PLAIN.fullmatch(value) and not OTHER_TYPES.fullmatch(value) and not has_expression:
        return value
    text = _printable(json.dumps(value, ensure_ascii=False))
    for each, expression in EXPRESSIONS.items() if has_expression else ():
        text = text.replace(each, expression)
    return text
