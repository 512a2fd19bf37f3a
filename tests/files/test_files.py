"""File access: invalid files and JSON are refused by name; writes are atomic."""

import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import CapacityError, CheckpointError, ConfigError
from jaxllm.files import (
    atomic_directory,
    atomic_file,
    check_memory,
    check_vacant,
    compile_pattern,
    lock_file,
    machine_memory,
    parse_json,
    path_exists,
    path_inside,
    read_bytes,
    read_json,
    read_text,
    remove_partials,
)

# Reading.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path.name), "cannot read"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b"x" * 101), "got 101 bytes, expected at most 100"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8"),
    ],
)
def test_read_text_refuses_non_regular_files(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    """FIFOs, directories, devices, link loops, and missing, oversized or non-UTF-8 files raise
    CheckpointError without blocking.
    """
    path = tmp_path / "x"
    make(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_text(path, 100)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_impossible_names_do_not_exist(name: str, tmp_path: Path) -> None:
    """A name that is too long or contains NUL does not exist, and reading it raises
    CheckpointError.
    """
    assert not path_exists(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_bytes(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1, column 2"),
        ("9" * 5000, "an integer has 5,000 digits"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested more than 64 levels deep"),
        ("1e999", "exceeds float64"),
        ("NaN", "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ('"\\ud800"', "a lone surrogate"),
        ('{"\\udc00": 1}', "a lone surrogate"),
        ('{"a": 1, "b": 2, "a": 3}', "the name 'a' occurs twice"),
    ],
)
def test_parse_json_refuses_invalid_json(text: str, words: str) -> None:
    """Bad syntax, deep nesting, huge or non-finite numbers, lone surrogates and repeated names
    raise one-line errors that give the cause.
    """
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        parse_json(text, "the rules", ConfigError)
    assert str(caught.value).startswith("the rules is not valid JSON (")
    assert "\n" not in str(caught.value)


def test_json_is_read_from_bytes_and_files(tmp_path: Path) -> None:
    """parse_json reads bytes, and read_json requires an object at the top level."""
    assert parse_json(b'{"a": [1, 2.5, null]}', "x") == {"a": [1, 2.5, None]}
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"list\.json must hold a JSON object: got list"):
        read_json(tmp_path / "list.json")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", "a\\b", "a\0b"])
def test_path_inside_refuses_non_plain_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        path_inside(tmp_path, name)


def test_path_inside_refuses_links_leaving_directory(tmp_path: Path) -> None:
    """Links within the directory are followed; a link that leaves it and a missing
    file are errors.
    """
    home = tmp_path / "home"
    home.mkdir()
    (home / "file").write_text("x")
    (home / "near").symlink_to("file")
    assert path_inside(home, "near").read_text() == "x"
    (tmp_path / "alias").symlink_to("home")
    assert path_inside(tmp_path / "alias", "file").read_text() == "x"
    (tmp_path / "outside").write_text("x")
    (home / "far").symlink_to("../outside")
    with pytest.raises(CheckpointError, match="far is a link that leaves the directory"):
        path_inside(home, "far")
    with pytest.raises(CheckpointError, match="missing is missing"):
        path_inside(home, "missing")


# Writing.


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_atomic_file_replaces_completely_or_not(tmp_path: Path) -> None:
    """After an error the old file is unchanged and no partial file is left; otherwise the new
    content appears at the end.
    """
    path = tmp_path / "x"
    for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
        path.write_text("before")
        with pytest.raises((KeyboardInterrupt, CheckpointError)), atomic_file(path, "w") as file:
            file.write("after")
            raise error
        assert path.read_text() == "before"
        assert _names(tmp_path) == {"x"}
    with atomic_file(path, "w") as file:
        file.write("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    nowhere = tmp_path / "nowhere" / "x"
    with pytest.raises(CheckpointError, match="x: No such file"), atomic_file(nowhere):
        pass


def test_atomic_file_follows_links_and_preserves_devices(tmp_path: Path) -> None:
    """Writing through a link changes its target, a device stays a device, and a directory is
    refused.
    """
    (tmp_path / "link").symlink_to("target")
    with atomic_file(tmp_path / "link", "w") as file:
        file.write("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "x"
    with atomic_file(Path(os.devnull)) as file:
        file.write(b"x")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(CheckpointError, match="Is a directory"), atomic_file(tmp_path):
        pass


@pytest.mark.parametrize("there", [False, True])
def test_atomic_directory_appears_completely_or_not(there: bool, tmp_path: Path) -> None:
    """After an error the target is unchanged; on success all files appear at once, and existing
    files stay.
    """
    target = tmp_path / "deep" / "made"
    if there:
        target.mkdir(parents=True)
        (target / "mine").write_text("mine")
    with pytest.raises(KeyboardInterrupt), atomic_directory(target) as made:
        (made / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert target.exists() == there
    with atomic_directory(target) as made:
        (made / "config.json").write_text("{}")
        (made / "weights").write_text("w")
        assert not (target / "config.json").exists()
    assert _names(target) == {"config.json", "weights"} | ({"mine"} if there else set())
    assert _names(tmp_path / "deep") == {"made"}
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        check_vacant(target, "config.json", "a checkpoint")


def test_atomic_directory_accepts_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory can be the target, and a file as the parent is refused."""
    monkeypatch.chdir(tmp_path)
    check_vacant(Path(), "config.json", "a checkpoint")
    with atomic_directory(Path()) as made:
        (made / "config.json").write_text("{}")
    assert _names(tmp_path) == {"config.json"}
    with pytest.raises(CheckpointError, match="is not a directory"):
        check_vacant(Path("config.json/x"), "config.json", "a checkpoint")


def test_remove_partials_deletes_only_stale_partials(tmp_path: Path) -> None:
    """Old partial files and directories are deleted; locked, recent and differently named ones
    stay.
    """
    long_ago = time.time() - 1e6
    for name in (".a.1.0.partial", ".b.1.partial", ".kept.1.0.partial", ".notes.partial", "x"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (long_ago, long_ago))
    folder = tmp_path / ".made.7.3.partial"
    folder.mkdir()
    (folder / "x").write_text("")
    os.utime(folder, (long_ago, long_ago))
    (tmp_path / ".young.1.0.partial").write_text("")
    with lock_file(tmp_path / ".kept.1.0.partial"):
        remove_partials(tmp_path)
    assert _names(tmp_path) == {".kept.1.0.partial", ".notes.partial", ".young.1.0.partial", "x"}


def test_lock_file_is_exclusive(tmp_path: Path) -> None:
    """A second lock is refused until the first is released, and a FIFO cannot be locked."""
    path = tmp_path / "journal"
    in_use = pytest.raises(CheckpointError, match="in use by another process")
    with lock_file(path), in_use, lock_file(path):
        pass
    with lock_file(path):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"), lock_file(tmp_path / "pipe"):
        pass


# Patterns and memory.


def test_compile_pattern_matches_in_linear_time() -> None:
    """`re` would take 2**5000 steps for this pattern."""
    assert not compile_pattern("(.+)+x").fullmatch("a" * 5000)
    assert compile_pattern(r"layers\.\d+\..*").fullmatch("layers.3.mlp")


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(", "not a valid regex"),
        ("(?=a)", "no look-around"),
        (r"(a)\1", "not a valid regex"),
        ("a" * 1001, "at most 1,000"),
        (["a"], "must be a string"),
        ("\ud800", "not a valid regex"),
        ("((a{1,100}){1,100}){1,100}", "not a valid regex"),
    ],
)
def test_compile_pattern_refuses_invalid_patterns(regex: Any, words: str) -> None:
    """Invalid, oversized and non-string patterns and look-around raise errors that start with the
    given name.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        compile_pattern(regex, "the rule")
    assert str(caught.value).startswith("the rule: ")


def test_check_memory_refuses_more_than_machine_has() -> None:
    """A size above the machine's memory raises CapacityError, and one byte passes."""
    available = machine_memory()
    if available is None:
        pytest.skip("the memory size is unknown on this platform")
    check_memory(1, "a byte")
    with pytest.raises(CapacityError, match=r"the cache needs .* GB; this machine has"):
        check_memory(available + 1, "the cache")
