"""more.txt: the tests that `make test` leaves to `make test-more`."""

import re

from tests.conftest import MORE, ROOT


def test_lines_name_tests() -> None:
    """A test that was renamed or removed leaves no line behind."""
    for line in MORE:
        file, _, test = line.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE), line
