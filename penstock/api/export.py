"""Write a model or repository for other systems: plain Kubernetes, a Helm chart, KServe.

Options become settings here, with every default resolved; `penstock.export` renders them. Nothing
secret is written: API keys and credentials are references to Secrets.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.parse import urlsplit

import penstock
from penstock.api.export_options import (
    ClusterOptions,
    DeploymentOptions,
    HelmOptions,
    KserveOptions,
    KubernetesOptions,
)
from penstock.benchmark.run_files import write_text
from penstock.errors import CommandLineError, ConfigError
from penstock.export import helm, kserve, kubernetes, workload
from penstock.export.names import (
    image_problem,
    label_problem,
    name_problem,
    namespace_problem,
    object_problem,
    parse_memory,
    resource_problem,
)
from penstock.export.settings import (
    KEYS_FILE,
    METRICS_KEY,
    Autoscaler,
    ClusterSettings,
    ModelFiles,
    ModelsFrom,
    Ports,
    ReplicaPolicy,
    Stopping,
)
from penstock.export.sizing import SizeOverrides, Sizing, size
from penstock.export.workload import Workload
from penstock.export.yaml_text import NAMESPACE, RELEASE, dump
from penstock.repository.model_source import resolve

STDOUT = "-"
MARK = "Written by penstock export"
STORAGE = re.compile(r"[a-z][a-z0-9+.-]*://[!-~]+", re.IGNORECASE)
LABEL = re.compile(r"(?P<key>[\w./-]+)=(?P<value>[\w.-]*)")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export. `files` are texts by their path in the folder."""

    folder: str
    files: Mapping[str, str]
    # Files of an earlier export that are gone.
    removed: tuple[str, ...]
    sizing: Sizing
    # Optional dependencies that the image needs, and commands to run next.
    extras: tuple[str, ...]
    next_commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """Folder that files go to, and the command that writes them."""

    out: str
    form: str


def export_kubernetes(model: str, options: KubernetesOptions) -> Exported:
    """Write a Deployment and what belongs to it as plain documents."""
    found = workload.read(resolve(model))
    settings = _deployment_settings(found, options, options.name or found.name, options.namespace)
    every = kubernetes.chosen(kubernetes.documents(settings))
    files = {each.file: dump(each.body, [_mark("kubernetes"), *each.comments]) for each in every}
    commands = [
        *_secret_command(settings),
        shlex.join(["kubectl", "apply", "--filename", options.out]),
    ]
    return _write(_Target(options.out, "kubernetes"), files, settings.sizing, found, commands)


def export_helm(model: str, options: HelmOptions) -> Exported:
    """Write a Helm chart of the same documents."""
    if options.out == STDOUT:
        raise CommandLineError(["--out -: a chart has several files; expected a folder"])
    found = workload.read(resolve(model))
    name = options.name or found.name
    settings = _deployment_settings(found, options, RELEASE, NAMESPACE)
    documents = kubernetes.documents(settings)
    chart = helm.chart(settings, documents, name, penstock.__version__)
    files = {path: _marked(path, text) for path, text in chart.items()}
    named = _deployment_settings(found, options, name, "default")
    commands = [*_secret_command(named), shlex.join(["helm", "install", name, options.out])]
    return _write(_Target(options.out, "helm"), files, settings.sizing, found, commands)


def export_kserve(model: str, options: KserveOptions) -> Exported:
    """Write a ServingRuntime and an InferenceService."""
    found = workload.read(resolve(model))
    problems: list[str] = []
    if not options.storage_uri:
        problems.append("--storage-uri is required, e.g. s3://bucket/models")
    elif not STORAGE.fullmatch(options.storage_uri):
        text = f"--storage-uri {options.storage_uri!r}: expected a URI such as s3://bucket/models"
        problems.append(text)
    name = options.name or found.name
    settings = _settings(
        found, options, name, options.namespace, ModelFiles("image", kserve.MODELS), problems
    )
    documents = kserve.documents(settings, options.storage_uri)
    files = {each.file: dump(each.body, [_mark("kserve"), *each.comments]) for each in documents}
    commands = [
        *_secret_command(settings),
        shlex.join(["kubectl", "apply", "--filename", options.out]),
    ]
    return _write(_Target(options.out, "kserve"), files, settings.sizing, found, commands)


def _deployment_settings(
    found: Workload, options: DeploymentOptions, name: str, namespace: str
) -> ClusterSettings:
    problems = _files_problems(options)
    files = ModelFiles(
        cast(ModelsFrom, options.models_from),
        options.models_path,
        options.claim or f"{name}-models",
        options.download_image,
        options.download_command,
        options.download_secret,
    )
    return _settings(found, options, name, namespace, files, problems)


def _files_problems(options: DeploymentOptions) -> list[str]:
    """Return which options the form of --models-from lacks, and which it does not have."""
    form = options.models_from
    required = {
        "--download-image": options.download_image,
        "--download-command": options.download_command,
    }
    given = {"init": required | {"--download-secret": options.download_secret}}
    given["pvc"] = {"--claim": options.claim}
    problems = [
        f"{flag} is required with --models-from init"
        for flag, value in required.items()
        if form == "init" and not value
    ]
    problems += [
        f"{flag} needs --models-from {other}"
        for other, flags in given.items()
        for flag, value in flags.items()
        if other != form and value
    ]
    if options.download_image and (problem := image_problem(options.download_image)):
        problems.append(f"--download-image: {problem}")
    named = {"--claim": options.claim, "--download-secret": options.download_secret}
    problems += _object_problems(named)
    return problems + _path_problems(options.models_path)


def _path_problems(path: str) -> list[str]:
    """Return what is wrong with the folder of the models in a container."""
    if not path.startswith("/") or ":" in path:
        return [f"--models-path {path}: expected an absolute path without a colon"]
    parts = PurePosixPath(os.path.normpath(path)).parts[1:]
    if not parts:
        return [f"--models-path {path}: hides the files of the image; expected a path like /models"]
    if parts[0] == "tmp":
        text = "the pod has an empty volume at /tmp; expected a path like /models"
        return [f"--models-path {path}: {text}"]
    return []


def _object_problems(names: Mapping[str, str]) -> list[str]:
    """Return which flags name no object of Kubernetes."""
    told = ((flag, object_problem(name)) for flag, name in names.items() if name)
    return [f"{flag}: {problem}" for flag, problem in told if problem]


def _url_problem(url: str) -> str:
    """Return what is wrong with the URL of Prometheus; empty if nothing is."""
    with suppress(ValueError):
        parts = urlsplit(url)
        is_plain = all("!" <= character <= "~" for character in url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and is_plain:
            return ""
    return f"--prometheus-url {url!r}: expected a URL such as http://prometheus.monitoring.svc:9090"


def _settings(
    found: Workload,
    options: ClusterOptions,
    name: str,
    namespace: str,
    files: ModelFiles,
    problems: list[str],
) -> ClusterSettings:
    """Resolve all options; CommandLineError lists every problem."""
    if not options.image:
        problems.append("--image is required, e.g. --image registry.example.com/penstock:0.1.0")
    elif problem := image_problem(options.image):
        problems.append(f"--image: {problem}")
    if options.max_replicas < options.min_replicas:
        limits = f"{options.min_replicas} and --max-replicas {options.max_replicas}"
        problems.append(f"--min-replicas {limits} contradict each other")
    problems += _name_problems(options, namespace)
    if problem := resource_problem(options.gpu_resource):
        problems.append(f"--gpu-resource: {problem}")
    if options.insecure and options.keys_secret:
        problems.append("--insecure and --keys-secret contradict each other; leave one of them out")
    if problem := _url_problem(options.prometheus_url):
        problems.append(problem)
    monitoring, monitor_labels = "", tuple[tuple[str, str], ...]()
    if isinstance(options, DeploymentOptions):
        monitoring = options.monitoring_namespace
        monitor_labels = _labels("--monitor-label", options.monitor_label, problems)
    selector = _labels("--node-selector", options.node_selector, problems)
    sizing = _size(found, options, problems)
    if problems or sizing is None:
        raise CommandLineError(problems)
    scaler = cast(Autoscaler, options.autoscaler)
    return ClusterSettings(
        name,
        namespace,
        options.image,
        "/".join(filter(None, (files.folder.rstrip("/") or "/", found.path))),
        "" if options.insecure else options.keys_secret or f"{name}-keys",
        files,
        ReplicaPolicy(scaler, options.min_replicas, options.max_replicas, options.prometheus_url),
        Stopping(options.deregister_s, options.drain_s),
        sizing,
        monitoring,
        kserve.PORTS if isinstance(options, KserveOptions) else Ports(),
        monitor_labels,
        selector,
    )


def _name_problems(options: ClusterOptions, namespace: str) -> list[str]:
    namespaces = {"--namespace": namespace}
    if isinstance(options, DeploymentOptions):
        namespaces["--monitoring-namespace"] = options.monitoring_namespace
    told = [(flag, namespace_problem(name)) for flag, name in namespaces.items()]
    if options.name:
        told.append(("--name", name_problem(options.name)))
    problems = [f"{flag}: {problem}" for flag, problem in told if problem]
    return problems + _object_problems({"--keys-secret": options.keys_secret})


def _size(found: Workload, options: ClusterOptions, problems: list[str]) -> Sizing | None:
    try:
        memory = parse_memory(options.memory) if options.memory else None
    except ConfigError as error:
        problems.append(f"--memory: {error}")
        return None
    try:
        given = SizeOverrides(
            options.cpu, memory, options.gpus, options.gpu_resource, options.queue_depth
        )
        return size(found.models, given)
    except ConfigError as error:
        problems += error.problems
        return None


def _labels(flag: str, texts: Sequence[str], problems: list[str]) -> tuple[tuple[str, str], ...]:
    found = [LABEL.fullmatch(text) for text in texts]
    pairs = zip(texts, found, strict=True)
    problems += [f"{flag} {text}: expected KEY=VALUE" for text, each in pairs if each is None]
    labels = [(each["key"], each["value"]) for each in found if each is not None]
    told = [label_problem(*label) for label in labels]
    problems += [f"{flag}: {problem}" for problem in told if problem]
    return tuple(labels)


def _secret_command(settings: ClusterSettings) -> list[str]:
    """Return the command that makes the Secret of API keys, whose values only the user knows."""
    if not settings.keys_secret:
        return []
    name, where = settings.keys_secret, ["--namespace", settings.namespace]
    entries = [f"--from-file={KEYS_FILE}", f"--from-literal={METRICS_KEY}=SECRET_OF_A_METRICS_KEY"]
    return [shlex.join(["kubectl", "create", "secret", "generic", name, *where, *entries])]


def _mark(form: str) -> str:
    return f"{MARK} {form} {penstock.__version__}; the next export replaces it."


def _marked(path: str, text: str) -> str:
    """Return a chart's file with its mark, which Helm does not render."""
    mark = _mark("helm")
    first = f"{{{{- /* {mark} */}}}}" if path.startswith("templates/") else f"# {mark}"
    return f"{first}\n{text}"


def _write(
    target: _Target,
    files: Mapping[str, str],
    sizing: Sizing,
    found: Workload,
    commands: Sequence[str],
) -> Exported:
    """Write the files, and remove those of an earlier export: a ScaledObject that stays beside a
    new HPA would be applied with it."""
    removed: list[str] = []
    if target.out != STDOUT:
        folder = Path(target.out)
        check_own_files(folder, files)
        try:
            for path in files:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        for path, text in files.items():
            write_text(text, folder / path)
        removed = _remove_others(folder, files, f"{MARK} {target.form} ")
    return Exported(target.out, files, tuple(removed), sizing, found.extras, tuple(commands))


def check_own_files(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if a file that would be replaced was not written by an export."""
    problems = [
        f"{folder / name}: not written by penstock export; move it or choose another --out"
        for name in names
        if (folder / name).is_file() and not _has_mark(folder / name, MARK)
    ]
    if problems:
        raise ConfigError(problems)


def _has_mark(path: Path, mark: str) -> bool:
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return mark in file.readline()
    return False


def _remove_others(folder: Path, files: Mapping[str, str], mark: str) -> list[str]:
    """Remove files with this mark that were not written now, and return their paths."""
    there = [*folder.glob("*.yaml"), *folder.glob("templates/*.yaml")]
    removed: list[str] = []
    for path in sorted(there):
        name = path.relative_to(folder).as_posix()
        if name not in files and _has_mark(path, mark):
            with suppress(OSError):
                os.remove(path)
                removed.append(name)
    return removed
