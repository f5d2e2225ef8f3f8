"""Environment variables that a model's code gets. Pure: the environment is an argument.

The server's environment may hold secrets (cloud credentials, tokens) that models do not need.
Workers get the variables that configure programs and numeric libraries, and those that the model's
`penstock.env` names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

NAMES = frozenset(
    {
        # The system.
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TZDIR",
        "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES",
        "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
        # Compilers that torch.compile and Triton call.
        "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH",
        # GPU variables of containers.
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE",
        # Model caches, without the tokens for downloads.
        "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE",
        "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "SENTENCE_TRANSFORMERS_HOME",
        "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    }
)  # fmt: skip
PREFIXES = (
    "LC_", "XDG_", "PYTHON", "PENSTOCK_", "MALLOC_", "MIMALLOC_",
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "DNNL_", "ONEDNN_",
    # Nsight, which follows into workers.
    "NVTX_", "NSYS_", "QUADD_",
    "CUDA_", "CUDNN_", "CUBLAS_", "CUBLASLT_", "NCCL_", "HIP_", "ROCR_", "HSA_",
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "ORT_", "OV_", "OPENVINO_",
    "TF_", "XLA_", "JAX_",
)  # fmt: skip
# Names that look like secrets are not passed on, even if a prefix matches.
SECRETS = ("SECRET", "TOKEN", "PASSW", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE")


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that every worker gets."""
    return {
        name: value
        for name, value in environment.items()
        if name in NAMES or (name.startswith(PREFIXES) and not any(s in name for s in SECRETS))
    }


def asked_for(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the variables that a model's configuration names: NAME, or PREFIX_*."""
    names = {name for pattern in patterns for name in fnmatch.filter(environment, pattern)}
    return {name: value for name, value in environment.items() if name in names}
