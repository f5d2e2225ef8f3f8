"""Our own GPU kernels in Triton, one file for each kind of layer. They know tensors, but neither
models nor the server. Importing one needs Triton, so callers with a fallback import it on use.
`cublaslt` calls a library instead, and does not need Triton.
"""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
