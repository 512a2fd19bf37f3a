"""Shared test setup: strict numerics, compile caching, fixtures and test data."""

import gc
import importlib.util
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
jax.config.update("jax_traceback_in_locations_limit", 0)  # saves a tenth of tracing time

os.environ["JAXLLM_COMPILE_CACHE"] = "0"  # write nothing to the user's home
OURS = "jaxllm-tests-"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # processes share compiled programs
    _CACHE_DIR = tempfile.TemporaryDirectory(prefix=OURS)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE_DIR.name
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)  # which also locks the folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
if OURS in os.environ["JAX_COMPILATION_CACHE_DIR"]:
    # The cache is for processes that tests start. pytest's own process hardly ever needs a program
    # again, and each write scans the whole folder.
    jax.config.update("jax_enable_compilation_cache", False)

# Compile times vary, so there is no deadline; CI runs the same examples every time.
hypothesis.settings.register_profile(
    "here",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("here")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = Path(os.environ.get("JAXLLM_TEST_DATA", ROOT.parent / "shared" / "data"))


# The longest files start first, so that two workers finish together.
LONGEST = ("test_readme.py", "test_notebooks.py", "test_cli.py", "test_lm.py")
# Files, and tests of which `make test` runs only the first case; `make test-more` runs the rest,
# and the tests of what few people need.
RESEARCH = "tests/research/"
MORE = {
    line
    for line in (ROOT / "tests" / "more.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
}


WITHOUT_TORCH = importlib.util.find_spec("torch") is None


def _skip_for_torch(name: str, error: BaseException | None) -> None:
    """Skip a test or file, by name, if it failed because PyTorch is not installed."""
    packages = ("torch", "peft", "accelerate")  # the others need PyTorch
    missing = isinstance(error, ImportError) and (error.name in packages or "PyTorch" in str(error))
    if WITHOUT_TORCH and missing:
        pytest.skip(f"{name} needs PyTorch, which is not installed", allow_module_level=True)


class _Module(pytest.Module):
    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            _skip_for_torch(self.nodeid, error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    try:
        return (yield)
    except ImportError as error:
        _skip_for_torch(item.nodeid, error)
        raise


pytest_runtest_setup = pytest_runtest_call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    seen: set[str] = set()
    for item in items:
        file, _, _ = item.nodeid.partition("::")
        test, _, _ = item.nodeid.partition("[")
        if file in MORE or file.startswith(RESEARCH) or (test in MORE and test in seen):
            item.add_marker(pytest.mark.more)
        seen.add(test)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection and collect less often.

    Tracing creates so many small objects that frequent collections are expensive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


# Thousands of compiled programs in one process exhaust its memory maps.
MOST_PROGRAMS = 800


@pytest.fixture(scope="session")
def compiled() -> Iterator[list[str]]:
    """The names of all programs compiled so far: a list that grows with each one.

    With a cache on disk, programs found there would count too: they were traced and lowered.
    """
    names: list[str] = []

    def listen(event: str, *_: Any, fun_name: str = "?", **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name.removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def afresh() -> Iterator[None]:
    """Clear compiled programs before and after a test that patches the code."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _limit_programs(compiled: list[str]) -> Iterator[None]:
    """Let tests reuse compiled programs until there are too many.

    A program for several devices has more maps: a module of 300 tests on eight ended by it.
    """
    yield
    if len(compiled) > MOST_PROGRAMS // min(4, jax.device_count()):
        jax.clear_caches()
        compiled.clear()


@pytest.fixture(scope="session")
def shallow_demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first two layers of each demo model (see `tiny_models.cut_demo`)."""
    from tests.tiny_models import cut_demo

    folder = tmp_path_factory.mktemp("demos")
    for family in ("llama", "gpt2"):
        cut_demo(family, folder / family)
    return folder


@pytest.fixture(scope="session")
def shallow(shallow_demos: Path) -> Callable[[str], Path]:
    """The directory of a demo model's first two layers, by its family."""
    return lambda family: shallow_demos / family


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A directory with the exported steps of a tiny Llama, the model and its parameters.

    The steps take two rows of 4 new tokens, of 13 in total.
    """
    from jaxllm.export.command_line import export
    from tests.tiny_models import random_model

    directory, lm = tmp_path_factory.mktemp("export") / "plain", random_model("llama")
    export(*lm, directory, num_tokens=4, max_tokens=13, batch=2, write_mlir=True)
    return directory, *lm


@pytest.fixture
def demo_names(shallow_demos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the first two layers of the demo models under their names, such as demo:llama."""
    from jaxllm.checkpoints import resolve

    monkeypatch.setattr(resolve, "DEMO_DIR", shallow_demos)


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


def succeed(run: Run, *arguments: object, **options: str | bytes) -> tuple[str, str]:
    """Run `jaxllm ARGS`, check that it exits with status 0, and return stdout and stderr."""
    status, out, err = run(*arguments, **options)
    assert status == 0, (arguments, out, err)
    return out, err


def assert_refused(run: Run, message: str, *arguments: object, **options: str | bytes) -> None:
    """Check that `jaxllm ARGS` exits with status 1, or 2 for wrong usage, and one line that
    contains a message.
    """
    status, out, err = run(*arguments, **options)
    assert status in (1, 2) and out == "", (arguments, err)
    assert message in err, arguments
    assert err.count("\n") == 1, err


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """Return the path of a shared test data folder; skip the test if it is missing."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"test data {name} is missing (set JAXLLM_TEST_DATA)")
        return path

    return find


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matplotlib figures that are saved."""
    from matplotlib.figure import Figure

    found: list[Any] = []
    real = Figure.savefig

    def savefig(self: Any, *arguments: Any, **options: Any) -> None:
        found.append(self)
        real(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found
