"""What is said about a device's memory, with a stand-in for a GPU's counters."""

from types import SimpleNamespace

import jax
import pytest

from jaxllm.runtime.device_memory import describe_full_memory, describe_memory


def use_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"bytes_limit": 60 * 10**9, "pool_bytes": 55 * 10**9, "bytes_in_use": 4 * 10**9}
    gpu = SimpleNamespace(device_kind="NVIDIA H100", memory_stats=lambda: held)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])


def test_says_what_jax_took(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_memory() is None  # a CPU counts nothing
    use_gpu(monkeypatch)
    text = str(describe_memory())
    assert text.startswith("NVIDIA H100: JAX took 55.0 GB of its memory and takes at most 60.0 (")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text and text.endswith("4.0 GB are in use")


def test_full_memory_names_what_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_full_memory(ValueError("no")) is None
    use_gpu(monkeypatch)
    failed = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."
    text = str(describe_full_memory(RuntimeError(failed)))
    assert "12.50GiB could not be had" in text and "of 60.0 GB that JAX may take" in text
