"""docs/training.md: its example runs."""

import re

import pytest

from tests.conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)


@pytest.mark.usefixtures("demo_names")
def test_training_page_example_runs_and_lowers_loss(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = BLOCKS
    exec(compile(code, "training.md", "exec"), {"__name__": "__main__"})
    losses = [float(x) for x in re.findall(r"[\d.]+", capsys.readouterr().out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
