"""The compile cache: a private folder per user and processor, or none."""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

import jaxllm
from jaxllm.errors import ConfigError
from jaxllm.ops import compile_cache
from tests.conftest import Run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for programs, without changing the configuration of JAX."""
    monkeypatch.setenv(compile_cache.CACHE_ENV, str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *_: None)
        patch.setattr(compile_cache.compilation_cache, "reset_cache", lambda: None)
        yield tmp_path
    compile_cache.set_folder(None)
    jax.config.update("jax_compilation_cache_dir", before)


def cache_folder() -> Path | None:
    compile_cache.set_folder(None)
    assert compile_cache.enable_compile_cache() == compile_cache._folder
    return compile_cache._folder


@pytest.fixture
def folder(home: Path) -> Path:
    """The folder that is used at first."""
    found = cache_folder()
    assert found is not None
    return found


def test_cache_folder_is_private(home: Path, folder: Path) -> None:
    """The folder has mode 0700 and is used again."""
    assert folder.parent == home
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "one.program").write_bytes(b"")
    assert cache_folder() == folder


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o500])
def test_writable_cache_folder_is_not_used(folder: Path, mode: int) -> None:
    """A folder that others may write, or this user may not, is used once its mode is fixed."""
    folder.chmod(mode)
    if mode != 0o500 or os.getuid() != 0:  # the superuser may write anywhere
        assert cache_folder() is None
    folder.chmod(0o700)
    assert cache_folder() == folder


def test_cache_folder_with_foreign_content_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that contains a link, or belongs to another user, is not used."""
    (folder / "link.program").symlink_to(__file__)  # the target may belong to another user
    assert cache_folder() is None
    (folder / "link.program").unlink()
    assert cache_folder() == folder
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert cache_folder() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser gives files away")
def test_cache_folder_with_foreign_file_is_not_used(folder: Path) -> None:
    (folder / "theirs.program").write_bytes(b"")
    os.chown(folder / "theirs.program", 12345, -1)
    assert cache_folder() is None


def test_cpu_features_select_cache_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with other features has its own folder."""
    read = Path.read_text

    def without_avx(path: Path, **options: str) -> str:
        return read(path, **options).replace(" avx", " ").replace(" asimd", " ")

    if not Path("/proc/cpuinfo").exists():
        pytest.skip("/proc/cpuinfo is not available")
    monkeypatch.setattr(Path, "read_text", without_avx)
    there = cache_folder()
    assert there is not None
    assert there != folder
    assert there.parent == folder.parent


def test_named_cache_folder_is_used_or_refused(home: Path, tmp_path: Path) -> None:
    """A folder named by the caller wins over the variable; an unusable one raises."""
    named = tmp_path / "named"
    for keep in (str(named), named):
        assert compile_cache.enable_compile_cache(keep) == compile_cache._folder
        assert compile_cache._folder is not None
        assert compile_cache._folder.parent == named
    compile_cache._folder.chmod(0o777)
    with pytest.raises(ConfigError, match="another user may write there"):
        jaxllm.load("demo:llama", keep_programs=named)
    with pytest.raises(ConfigError, match="Not a directory"):
        compile_cache.enable_compile_cache(__file__)


def test_load_enables_compile_cache_on_request(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep_programs=True uses the default folder, unless the environment variable disables it."""
    compile_cache.set_folder(None)
    jaxllm.load("demo:llama")
    assert compile_cache._folder is None
    jaxllm.load("demo:llama", keep_programs=True)
    assert compile_cache._folder is not None
    assert compile_cache._folder.parent == home
    compile_cache.set_folder(None)
    monkeypatch.setenv(compile_cache.CACHE_ENV, "0")
    jaxllm.load("demo:llama", keep_programs=True)
    assert compile_cache._folder is None


def test_time_compiling_counts_each_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested and parallel compile spans count by their union, and only inside the context."""
    event = "/jax/core/compile/backend_compile_duration"
    with compile_cache.time_compiling() as seconds:
        assert seconds() == 0
        for now, passed in ((2.0, 1.0), (5.0, 1.0), (5.5, 1.0), (6.0, 3.5), (10.0, 0.5)):
            monkeypatch.setattr(compile_cache.time, "perf_counter", lambda now=now: now)
            jax.monitoring.record_event_duration_secs(event, passed)
        jax.monitoring.record_event_duration_secs("/jax/something/else_duration", 100.0)
        assert seconds() == pytest.approx(1.0 + 3.5 + 0.5)
    jax.monitoring.record_event_duration_secs(event, 100.0)
    assert seconds() == pytest.approx(5.0)


@pytest.mark.parametrize("enabled", [False, True])
def test_generate_reports_compile_time(
    run: Run, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setattr(compile_cache, "time_compiling", lambda: nullcontext(lambda: 5.5))
    monkeypatch.setattr(compile_cache, "has_compile_cache", lambda: enabled)
    err = run("generate", "-p", "Tom", "-n", 1)[2]
    later = "; the next run reuses the programs" * enabled
    assert err.endswith(f" s (5.5 s of it compiling{later})\n")
    assert json.loads(run("generate", "-p", "Tom", "-n", 1, "--json")[1])["compile_s"] == 5.5


def test_folder_within_the_folder_of_programs_is_allowed(tmp_path: Path) -> None:
    """XLA keeps a GPU's measurements in one; others must not be able to write there."""
    from jaxllm.files.program_folder import find_folder_problem

    inner = tmp_path / "programs" / "xla_gpu_per_fusion_autotune_cache_dir"
    inner.mkdir(parents=True, mode=0o700)
    assert find_folder_problem(inner.parent) == ""
    inner.chmod(0o777)
    assert "something other" in find_folder_problem(inner.parent)
