"""The tables of the page on scale are what the script makes."""

from simulate_serving import filled

from tests.conftest import ROOT


def test_the_page_shows_what_the_script_makes() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert filled(page) == page
    assert page.count("| one machine with 8 GPUs |") == 1
