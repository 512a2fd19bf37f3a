"""What every test shares: strict numerics, tiny random models, their PyTorch twins, the data."""

import gc
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time that tracing takes

os.environ["JAXLLM_COMPILE_CACHE"] = "0"  # nothing is left in anybody's home
OURS = "jaxllm-tests-"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what one process has compiled, others read
    _KEPT = tempfile.TemporaryDirectory(prefix=OURS)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _KEPT.name
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)  # which also locks the folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
if OURS in os.environ["JAX_COMPILATION_CACHE_DIR"]:
    # It is for processes that tests start. Of what pytest's own compile hardly one program in
    # twenty is wanted again, and each one written has all that are there looked through.
    jax.config.update("jax_enable_compilation_cache", False)

# Compiling takes what it takes, a busy machine longer; and what CI runs today it runs tomorrow.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("here")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = Path(os.environ.get("JAXLLM_TEST_DATA", ROOT.parent / "shared" / "data"))


# What takes longest in one piece begins first, so that two workers end together.
LONGEST = ("test_readme.py", "test_notebooks.py", "test_cli.py", "test_api.py")
# A file, or a test of which `make test` runs the first case alone; `make test-more` runs the rest.
MORE = {
    line
    for line in (ROOT / "tests" / "more.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    seen: set[str] = set()
    for item in items:
        file, _, _ = item.nodeid.partition("::")
        test, _, _ = item.nodeid.partition("[")
        if file in MORE or (test in MORE and test in seen):
            item.add_marker(pytest.mark.more)
        seen.add(test)


def pytest_collection_finish() -> None:
    """What has been imported is not looked through again whenever garbage is collected, and tracing
    makes so many small objects that it is worth waiting for more of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


# Thousands of compiled programs in one process exhaust its memory maps.
MOST_PROGRAMS = 800


@pytest.fixture(scope="session")
def compiled() -> Iterator[list[str]]:
    """The names of all programs that were compiled so far: a list that grows with every one.

    With a cache on disk, a program that was found there would count too: it was traced and lowered.
    """
    names: list[str] = []

    def listen(event: str, *_: Any, fun_name: str = "?", **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def afresh() -> Iterator[None]:
    """For a test that breaks the code: nothing compiled before is used in it, nor after it what it
    compiles.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def _forgotten(compiled: list[str]) -> Iterator[None]:
    """What a module has compiled serves the next ones, until there is too much of it."""
    yield
    if len(compiled) > MOST_PROGRAMS:
        jax.clear_caches()
        compiled.clear()


@pytest.fixture(scope="session")
def shallow_demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first two layers of each demo model (see `twins.cut_demo`)."""
    from tests.twins import cut_demo

    folder = tmp_path_factory.mktemp("demos")
    for family in ("llama", "gpt2"):
        cut_demo(family, folder / family)
    return folder


@pytest.fixture(scope="session")
def shallow(shallow_demos: Path) -> Callable[[str], Path]:
    """The directory of a demo model's first two layers, by its family."""
    return lambda family: shallow_demos / family


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `jaxllm ARGS` in this process: (exit status, stdout, stderr)."""
    from jaxllm import cli

    def command(*args: object, stdin: str | bytes = "") -> tuple[int, str, str]:
        content = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in args])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return command


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """The path of a folder of the shared test data; skips, by name, where it is missing."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"test data {name} is not there (set JAXLLM_TEST_DATA)")
        return path

    return find
