"""The wheel contains the native kernels if there is a compiler, and works without them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from jaxllm.checkpoints.resolve import DEMO_DIR
from jaxllm.ops.native import INSTRUCTION_SETS, available_isas
from jaxllm.server.limits import PAGE_FILES
from tests.conftest import ROOT
from tests.tiny_models import load_twin

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

# Programs that pip and cmake call, without any compiler.
PROGRAMS = (
    "sh", "env", "uname", "cat", "ls", "rm", "mkdir", "cp", "mv", "ln", "sed", "grep", "tr",
    "chmod", "dirname", "basename", "test", "true", "false", "expr", "id",
)  # fmt: skip
PROMPT, LENGTH = "Once upon a time", 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package sources without build products."""
    target = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, target / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("jaxllm", "convert"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    return target


@pytest.fixture(scope="module")
def story() -> str:
    """Return the greedy float32 continuation that transformers generates."""
    twin = load_twin(DEMO_DIR / "llama")
    from jaxllm import load

    lm = load("demo:llama")
    assert lm.tokenizer is not None
    ids = lm.encode(PROMPT)
    with torch.no_grad():
        out = twin.torch_model.generate(
            torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
        )
    return lm.tokenizer.decode(out[0, len(ids) :].tolist())


def wheel(sources: Path, target: Path, **environment: str) -> tuple[zipfile.ZipFile, str]:
    """Build the wheel with pip and return it with the build log."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", target, sources]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    build_log = done.stdout + done.stderr
    assert done.returncode == 0, build_log[-8000:]
    (file,) = target.glob("jaxllm-*.whl")
    return zipfile.ZipFile(file), build_log


def run(packages: Path, *arguments: object) -> str:
    """Return stdout of `jaxllm ARGUMENTS`, run with only this installation of the package."""
    # -S ignores .pth files, which hides an editable installation.
    found = os.pathsep.join([str(packages), sysconfig.get_path("purelib")])
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAXLLM_")}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "jaxllm", *map(str, arguments)],
        capture_output=True, text=True, cwd=packages, env={**plain, "PYTHONPATH": found},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def generates_story(packages: Path, story: str) -> bool:
    """Return whether the demo's greedy text equals that of transformers."""
    options = ("-p", PROMPT, "-n", LENGTH, "--dtype", "float32")
    return run(packages, "generate", *options) == story


def test_wheel_without_compiler_works_and_is_reported(
    sources: Path, story: str, tmp_path: Path
) -> None:
    """Without a C++ compiler the build logs it, the wheel has no kernels, and it still generates
    the text of transformers.
    """
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python3").symlink_to(sys.executable)
    for name in PROGRAMS:
        if where := shutil.which(name):
            (bin / name).symlink_to(where)
    built, build_log = wheel(sources, tmp_path / "wheels", PATH=str(bin), CC="", CXX="")
    assert "No C++ compiler was found" in build_log
    assert not [name for name in built.namelist() if name.endswith(".so") or "native/csrc" in name]
    built.extractall(tmp_path / "packages")
    assert generates_story(tmp_path / "packages", story)
    facts = json.loads(run(tmp_path / "packages", "info", "--json"))
    assert facts["kernels"].startswith("none")


def test_wheel_with_compiler_contains_kernels(sources: Path, story: str, tmp_path: Path) -> None:
    """The wheel has kernels, sources of those for a GPU alone, and generates transformers' text."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler found")
    built, _ = wheel(sources, tmp_path / "wheels")
    names = built.namelist()
    assert "-py3-none-" in str(built.filename)  # for every Python
    assert "jaxllm/ops/native/_kernels.so" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jaxllm"}
    page = {f"jaxllm/server/page/{name}" for name in ("index.html", *PAGE_FILES)}
    assert {"jaxllm/convert/hf.py", "jaxllm/__init__.pyi", *page} <= {*names}
    sources_of_gpu = [name for name in names if "csrc" in name]
    assert "jaxllm/ops/cuda/csrc/kernel.cu" in sources_of_gpu  # compiled at first use
    assert {Path(name).parent.as_posix() for name in sources_of_gpu} == {"jaxllm/ops/cuda/csrc"}
    assert not [name for name in names if ".clang-format" in name]
    built.extractall(tmp_path / "packages")
    assert generates_story(tmp_path / "packages", story)
    facts = json.loads(run(tmp_path / "packages", "info", "--json"))
    assert facts["kernels"] in INSTRUCTION_SETS


def test_choice_of_sets_builds_those_of_this_processor(tmp_path: Path) -> None:
    """JAXLLM_SETS=machine configures the sets that the processor runs, best only portable and the
    last of them (with the set that the matrix unit adds to), and a name only that set.
    """
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("cmake or a C++ compiler is not installed")

    def configured(choice: str) -> list[str]:
        folder = tmp_path / choice
        command = ["cmake", "-S", ROOT, "-B", folder, f"-DJAXLLM_SETS={choice}"]
        command += [f"-DPython_EXECUTABLE={sys.executable}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split("Instruction sets: ")[1].splitlines()[0].split(";")

    every, machine, best = (configured(choice) for choice in ("all", "machine", "best"))
    assert [name for name in every if name in machine] == machine
    assert best[0] == "portable" and machine[-1] in best and len(best) <= 3
    assert configured("portable") == ["portable"]
    if available_isas() and "JAXLLM_ISA" not in os.environ:
        assert set(available_isas()) <= set(machine)
