"""The progress bar appears on a terminal, and nowhere else."""

import pytest

from jaxllm.runtime.progress import bytes_bar


@pytest.mark.parametrize(("show", "seen"), [(True, True), (False, False), (None, False)])
def test_the_bar_goes_to_stderr(
    show: bool | None, seen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with bytes_bar("loading tinyllama", 100, show) as advance:
        advance(60)
        advance(40)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading tinyllama" in err) is seen
