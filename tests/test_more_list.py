"""more.txt: the tests that `make test` leaves to `make test-more`."""

import re

from tests.conftest import MORE, ROOT


def test_more_txt_names_existing_tests() -> None:
    """Every line of more.txt names an existing test, also after tests are renamed or removed."""
    for line in MORE:
        file, _, test = line.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE), line
