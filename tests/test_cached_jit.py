"""Compile cache on disk: equal results, and no tracing the second time."""

import os
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
import jaxllm.convert.registry
from jaxllm import models
from jaxllm.errors import CheckpointError
from jaxllm.generation.loops import rounds, rows
from jaxllm.generation.sampling.sampler import FunctionProcessor
from jaxllm.models import compiled_steps
from jaxllm.ops import compile_cache, native
from jaxllm.ops.compile_cache import CachedJit
from jaxllm.weights import load
from jaxllm.weights.safetensors import first_non_finite

traced: list[str] = []


def scaled(x_B: jax.Array, by: float, about: object) -> jax.Array:
    """Scale x_B, and record each tracing."""
    traced.append(f"{by} {x_B.shape}")
    return x_B.astype(jnp.float32) * by


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    traced.clear()
    compile_cache.set_folder(tmp_path)
    yield tmp_path
    compile_cache.set_folder(None)


def fresh() -> CachedJit:
    """Return an empty CachedJit, as a new process would have."""
    return CachedJit(scaled, static_argnums=(1,))


X = np.arange(4, dtype=np.float32)


def test_cached_program_is_not_retraced(folder: Path) -> None:
    """A program is traced once per static argument, shape and dtype, also if they alternate."""
    for _ in range(3):
        np.testing.assert_array_equal(fresh()(X, 2.0, ()), X * 2)
    assert traced == ["2.0 (4,)"]
    np.testing.assert_array_equal(fresh()(X, 3.0, ()), X * 3)
    np.testing.assert_array_equal(fresh()(X[:2], 2.0, ()), X[:2] * 2)
    assert fresh()(X.astype(np.int32), 2.0, ()).dtype == jnp.float32
    assert traced == ["2.0 (4,)", "3.0 (4,)", "2.0 (2,)", "2.0 (4,)"]
    one = fresh()
    for x in (X, X[:2], X):  # shapes may alternate
        np.testing.assert_array_equal(one(x, 2.0, ()), x * 2)
    assert len(traced) == 4


def test_kernel_setting_changes_cache_key(folder: Path) -> None:
    fresh()(X, 2.0, ())
    with native.disable_kernels():
        fresh()(X, 2.0, ())
    assert len(traced) == (2 if native.is_enabled() else 1)


def test_prepared_program_is_not_retraced(folder: Path) -> None:
    """`prepare` traces once for shapes alone; the call, in this or a later process, does not."""
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    first = fresh()
    for _ in range(2):
        first.prepare(shape, 2.0, ())
    assert traced == ["2.0 (4,)"]
    np.testing.assert_array_equal(first(X, 2.0, ()), X * 2)
    (file,) = folder.iterdir()
    later = fresh()
    later.prepare(shape, 2.0, ())
    np.testing.assert_array_equal(later(X, 2.0, ()), X * 2)
    assert len(traced) == 1
    later.prepare(jax.ShapeDtypeStruct((9,), X.dtype), 2.0, ())  # it ran: nothing to prepare
    assert len(traced) == 1
    file.write_bytes(b"damaged")
    again = fresh()
    again.prepare(shape, 2.0, ())
    np.testing.assert_array_equal(again(X, 2.0, ()), X * 2)
    assert len(traced) == 2


def test_first_programs_are_loaded_ahead(folder: Path) -> None:
    """They are those that the last process with the same fact ran; a damaged one is made again."""

    def start() -> list[Any]:
        """Begin as a new process does; return the programs that are loaded."""
        compile_cache.set_folder(folder)
        compile_cache.load_first_programs("command")
        return [future.result() for future in compile_cache._pending.values()]

    assert start() == []
    np.testing.assert_array_equal(fresh()(X, 2.0, ()), X * 2)
    np.testing.assert_array_equal(fresh()(X[:2], 2.0, ()), X[:2] * 2)
    programs = [*folder.glob("*.program")]
    for file in programs:  # each is read once, before the function is called
        assert len(start()) == 2 and None not in start()
        file.rename(folder / "elsewhere")
        for x in (X, X[:2]):
            np.testing.assert_array_equal(fresh()(x, 2.0, ()), x * 2)
        (folder / "elsewhere").rename(file)
    assert len(traced) == 2
    compile_cache.load_first_programs("other command")
    start()
    fresh()(X[:1], 2.0, ())
    assert len(start()) == 1  # the last process used that one alone
    (file,) = {*folder.glob("*.program")} - {*programs}
    file.write_bytes(b"damaged")
    assert start() == [None]
    np.testing.assert_array_equal(fresh()(X[:1], 2.0, ()), X[:1] * 2)
    assert len(traced) == 4


def test_prepared_programs_are_those_of_generation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generating waits for the programs that it prepared, and compiles no other."""
    started: list[str] = []
    start = CachedJit._start

    def count(self: CachedJit, folder: Path, key: str, args: Any) -> Any:
        if key not in compile_cache._pending:
            started.append(self._function.__name__)
        return start(self, folder, key, args)

    monkeypatch.setattr(CachedJit, "_start", count)
    programs = [rows.FIRST_DRAW, rounds.ROUND, compiled_steps.PREFILL]
    for program in programs:  # as in a new process
        monkeypatch.setattr(program, "_loaded", {})
    lm = jaxllm.load("demo:llama")
    list(lm.stream("Once", max_new_tokens=3, temperature=0.8, seed=3))
    assert sorted({*started} - {"_empty_cache", "_row_keys"}) == [
        "_draw_first",
        "_prefill",
        "_run_one_round",
    ]
    assert len(started) == len({*started})


def test_numbers_are_checked_again_if_a_file_changes(folder: Path, tmp_path: Path) -> None:
    """A file that held no NaN is searched for one again only after it changes."""
    path = tmp_path / "model"
    jaxllm.load("demo:llama").save(path)
    with unittest.mock.patch.object(load, "first_non_finite", wraps=first_non_finite) as search:
        jaxllm.load(path)
        assert search.call_count > 0
        search.reset_mock()
        jaxllm.load(path)
        assert search.call_count == 0
        file = path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-4:] = np.float32(np.nan).tobytes()
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="holds nan"):
            jaxllm.load(path)


def test_damaged_cache_file_is_rebuilt(folder: Path) -> None:
    fresh()(X, 2.0, ())
    (file,) = folder.iterdir()
    content = file.read_bytes()
    for damaged in (b"", content[:100], content[:-1], content[:-1] + b"x", b"x" + content[1:]):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(fresh()(X, 2.0, ()), X * 2)
        assert file.read_bytes() != damaged
    assert len(traced) == 6


def test_program_with_arbitrary_function_is_not_cached(folder: Path) -> None:
    """A static argument without a stable description, such as a lambda, prevents caching; the
    result is still right.
    """
    np.testing.assert_array_equal(fresh()(X, 2.0, FunctionProcessor(lambda s, c: s)), X * 2)
    assert not list(folder.iterdir())
    assert traced


def test_cached_jit_inlines_inside_jit(folder: Path) -> None:
    """Called while tracing, CachedJit becomes part of the outer program and writes no file."""
    np.testing.assert_array_equal(jax.jit(lambda x: fresh()(x, 2.0, ()))(X), X * 2)
    assert not list(folder.iterdir())


def test_cached_program_donates_arguments(folder: Path) -> None:
    for _ in range(2):
        donated = jnp.asarray(X) + 0
        out = CachedJit(scaled, static_argnums=(1,), donate_argnums=0)(donated, 2.0, ())
        np.testing.assert_array_equal(out, X * 2)
        assert donated.is_deleted()
    assert len(traced) == 1


def test_param_shapes_are_cached(folder: Path) -> None:
    """param_shapes is read back from the cache folder and recomputed if the file is damaged."""
    models.param_shapes.cache_clear()
    model = models.build(jaxllm.convert.registry.open_checkpoint("demo:llama").config)
    traced = models.param_shapes(model)
    (file,) = folder.glob("*.forms")
    for damage in (None, b"", file.read_bytes()[:-1]):
        if damage is not None:
            file.write_bytes(damage)
        models.param_shapes.cache_clear()
        assert models.param_shapes(model) == traced
    compile_cache.set_folder(None)
    models.param_shapes.cache_clear()
    assert models.param_shapes(model) == traced


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "Python": lambda patch: patch.setattr(sys, "version", "0.0.0"),
    "JAX": lambda patch: patch.setattr(jax, "__version__", "0.0.0"),
    "processors": lambda patch: patch.setattr(os, "sched_getaffinity", lambda _: range(7)),
    "flags": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_cached_program_of_other_environment_is_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another Python or JAX version, CPU count or XLA_FLAGS value traces the function again."""
    fresh()(X, 2.0, ())
    compile_cache._code_versions.cache_clear()
    try:
        CHANGES[name](monkeypatch)
        fresh()(X, 2.0, ())
        assert len(traced) == 2
    finally:
        compile_cache._code_versions.cache_clear()


def test_cache_evicts_least_recently_used_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()(X, 2.0, ())
    (first,) = folder.iterdir()
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 1)
    fresh()(X, 3.0, ())
    (left,) = folder.iterdir()
    assert left != first


def test_generation_from_cached_programs_is_identical(folder: Path) -> None:
    """Sampled tokens with the cache folder set equal those without it."""
    lm = jaxllm.load("demo:llama")
    options = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 40, "seed": 3}
    streamed = [p.token for p in lm.stream("Once", **options)]  # type: ignore[arg-type]
    assert list(folder.iterdir())
    compile_cache.set_folder(None)
    assert lm.generate("Once", **options).tokens == streamed  # type: ignore[call-overload]
