"""What changes for a Triton repository when Penstock serves it. Pure; `api/import_triton` reads."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config import ModelConfig
from penstock.repository import pbtxt

ENVIRONMENT = "EXECUTION_ENV_PATH"
ALONE = "a request of another shape waits in a queue of its own instead of ending the batch"


def describe(config: ModelConfig) -> str:
    """Say how a version is served, in one line."""
    devices = {each: config.devices.count(each) for each in config.devices}
    places = ", ".join(f"{count} on {device}" for device, count in devices.items())
    engine = config.backend
    if config.engine != config.backend:
        engine += f", run by Penstock's {config.engine} engine on GPUs"
    size = config.max_batch_size
    batches = f"batches of up to {size}" if config.batching.is_dynamic else "each request alone"
    return f"{engine}; instances: {places}; {batches}"


def refusals(config: ModelConfig) -> list[str]:
    """Return what is only seen when the model is loaded."""
    if config.backend == "python" and ENVIRONMENT in config.options:
        return [f"parameters.{ENVIRONMENT}: models run in the server's own Python"]
    return []


def differences(config: ModelConfig) -> Iterator[str]:
    """Yield what differs from Triton, beside the warnings about fields without effect."""
    written = pbtxt.parse(config.written)
    policy = config.batching
    is_default = policy.slo_latency_s is None and policy.max_wait_s is None
    if policy.is_dynamic and is_default and not policy.policies[0].max_queue_size:
        yield (
            "requests wait at most 1 s, or ten times the largest batch; "
            "parameters.penstock.max_wait_ms 0 restores Triton's unbounded queue"
        )
    if policy.is_dynamic and not all(spec.is_fixed for spec in config.inputs):
        yield ALONE
    if config.backend == "onnxruntime":
        if not written.instance_group and not config.uses_gpu:
            yield "one instance on the CPU, where Triton starts two"
        if config.engine != config.backend:
            yield (
                "on GPUs Penstock's own engine computes; parameters.penstock.gpu_engine "
                "'onnxruntime' chooses ONNX Runtime's providers"
            )
    if config.backend == "python":
        yield "an instance that crashes is started again, and its requests run again"
    if any(spec.datatype == "BYTES" for spec in config.inputs) and config.backend == "onnxruntime":
        yield "texts that are not UTF-8 are refused"
