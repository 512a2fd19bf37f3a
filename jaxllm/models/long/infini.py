"""Infini-attention (Munkhdalai et al. 2024)."""

from typing import Any

from jaxllm.errors import ConfigError


def attend(*args: Any, **settings: Any) -> tuple[Any, Any]:
    """Raises ConfigError: it is not there yet."""
    raise ConfigError("attention of kind 'infini' is not there yet: use kind 'dilated'")
