"""`jaxllm train distill`: options that cannot be met. The README test runs the command once."""

from pathlib import Path

import pytest

from tests.conftest import Run, assert_refused

pytestmark = pytest.mark.usefixtures("demo_names")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the student must be either --student DIR"),
        (("--layers", 9), "must keep 1 to 2 layers"),
        (("--layers", 1, "--written", 600), "exceed the teacher's context of 512"),
    ],
)
def test_impossible_student_is_refused(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    text, out = tmp_path / "story.txt", tmp_path / "out"
    text.write_text("Once upon a time there was a dog.\n")
    assert_refused(run, message, "train", "distill", "demo:llama", out, "--data", text, *arguments)
    assert not out.exists()
