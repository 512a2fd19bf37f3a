"""The moving picture of README shows what the model writes."""

import pytest

from scripts.tools.terminal_picture import draw, make_lines
from tests.conftest import ROOT


@pytest.mark.more
def test_picture_is_what_the_script_draws() -> None:
    lines = make_lines()
    assert "True" in lines  # the rewound branch is the cache
    assert draw(lines) == (ROOT / "docs/terminal.svg").read_text(encoding="utf-8")
