"""Language models as pure functions in JAX and Flax.

Public names are in `__init__.pyi`; each is imported when it is first used, so that `import jaxllm`
(and `jaxllm --help`) does not import JAX. docs/architecture.md has the rooms.
"""

import os

import lazy_loader

if _threads := os.environ.get("JAXLLM_THREADS"):  # XLA reads it when its CPU client is created
    os.environ.setdefault("PJRT_NPROC", _threads)

__version__ = "1.0.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
