"""The progress bar appears on a terminal, and nowhere else."""

import pytest

from jaxllm.runtime.progress import bytes_bar


@pytest.mark.parametrize(("show", "seen"), [(True, True), (False, False), (None, False)])
def test_bytes_bar_writes_only_to_stderr(
    show: bool | None, seen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar appears on stderr if shown; by default only on a terminal."""
    with bytes_bar("loading tinyllama", 100, show) as advance:
        advance(60)
        advance(40)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading tinyllama" in err) is seen
