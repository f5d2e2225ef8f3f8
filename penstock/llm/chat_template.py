"""Compile chat templates: in Jinja's sandbox, with the functions that models expect. They see
messages only.
"""

from __future__ import annotations

import datetime
import json
import logging

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import BackendFailed, error_text

log = logging.getLogger("penstock.text")


class TemplateRefused(TemplateError):
    """Raised by a template that does not take the messages."""


def compile_template(source: str) -> Template:
    """Raise BackendFailed if it cannot be compiled."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form)
    )
    try:
        return environment.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # The compiler raises TemplateError, RecursionError and others.
        log.error("the chat template cannot be read: %s", error_text(error))
        raise BackendFailed("the model's chat template has an error; see the log") from None


def _refuse(message: object) -> None:
    raise TemplateRefused(str(message))


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
