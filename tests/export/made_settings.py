"""Settings of a small Deployment, as tests of the renderers want them."""

from dataclasses import replace

from penstock.export.settings import ClusterSettings, ModelFiles, ReplicaPolicy, Stopping
from penstock.export.sizing import ModelNeeds, SizeOverrides, size

NEEDS = ModelNeeds(
    "digits",
    "1",
    "onnxruntime",
    num_workers=2,
    num_cores=2,
    num_rows=128,
    load_timeout_s=600.0,
    file_bytes=360_000,
)


def made_settings(gpus: int = 0, **changed: object) -> ClusterSettings:
    """Return settings with these fields changed."""
    settings = ClusterSettings(
        "digits",
        "vision",
        "registry.example.com/penstock:1",
        "/models/digits",
        "digits-keys",
        ModelFiles("pvc", "/models", "digits-models"),
        ReplicaPolicy("keda", 2, 10, "http://prometheus:9090"),
        Stopping(deregister_s=10, drain_s=30),
        size([NEEDS], SizeOverrides(gpus=gpus)),
        "monitoring",
    )
    return replace(settings, **changed)
