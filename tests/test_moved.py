"""Old names of modules work for one release, and say what they are now."""

import importlib
import subprocess
import sys

import pytest

from jaxllm import moved


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_a_module_that_moved_is_found_by_its_old_name(old: str) -> None:
    new = moved.MODULES[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        found = importlib.import_module(old)
    there = {k: v for k, v in vars(importlib.import_module(new)).items() if k[0] != "_"}
    assert there.items() <= vars(found).items()


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("jaxllm.decode.sampling", "Sampler"),
        ("jaxllm.evaluate.equivalence", "verify"),
        ("jaxllm.evaluate.likelihood", "document_logprobs"),
    ],
)
def test_what_a_module_had_that_is_a_package_now_is_found_there(package: str, name: str) -> None:
    room = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} is"):
        getattr(room, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = room.nothing


def test_the_warning_points_at_who_imports() -> None:
    code = "import jaxllm\nfrom jaxllm.decode.batch import decode\n"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-"], input=code, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "<stdin>:2: DeprecationWarning: jaxllm.decode.batch is" in done.stderr
