from pathlib import Path

import pytest

from tests.tiny_models import save_random


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model without an end of text."""
    directory = tmp_path_factory.mktemp("models") / "m"
    save_random(directory, "llama", num_hidden_layers=1, eos_token_id=None)
    return directory
