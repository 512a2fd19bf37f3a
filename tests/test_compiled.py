"""Where compiled programs are kept: in a folder of this user and this processor, or nowhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxllm import programs
from jaxllm.cli import compiled


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for programs, of which JAX is told nothing."""
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    with monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", lambda *_: None)
        yield tmp_path
    programs.keep(None)
    jax.config.update("jax_compilation_cache_dir", before)


def kept_in() -> Path | None:
    programs.keep(None)
    compiled.keep_compiled()
    return programs._folder


def test_the_folder_is_the_users_own(home: Path) -> None:
    folder = kept_in()
    assert folder is not None
    assert folder.parent == home
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "one.program").write_bytes(b"")
    assert kept_in() == folder


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o500])
def test_a_folder_that_others_may_write_to_is_not_used(home: Path, mode: int) -> None:
    folder = kept_in()
    assert folder is not None
    folder.chmod(mode)
    if mode != 0o500 or os.getuid() != 0:  # the superuser may write anywhere
        assert kept_in() is None
    folder.chmod(0o700)
    assert kept_in() == folder


def test_a_folder_with_something_of_others_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept_in()
    assert folder is not None
    (folder / "link.program").symlink_to(__file__)  # what it leads to may be anybody's
    assert kept_in() is None
    (folder / "link.program").unlink()
    assert kept_in() == folder
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert kept_in() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser gives files away")
def test_a_file_that_another_user_left_is_not_run(home: Path) -> None:
    folder = kept_in()
    assert folder is not None
    (folder / "theirs.program").write_bytes(b"")
    os.chown(folder / "theirs.program", 12345, -1)
    assert kept_in() is None


def test_another_processor_has_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = kept_in()
    read = Path.read_text

    def without_avx(path: Path, **options: str) -> str:
        return read(path, **options).replace(" avx", " ").replace(" asimd", " ")

    if not Path("/proc/cpuinfo").exists():
        pytest.skip("this system says nothing about its processor")
    monkeypatch.setattr(Path, "read_text", without_avx)
    there = kept_in()
    assert there is not None
    assert there != here
    assert there.parent == home
