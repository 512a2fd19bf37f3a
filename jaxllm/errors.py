"""The exceptions of jaxllm: one small family, raised on the host before anything is dispatched.

Each message names the thing, what was expected, what was got and, where there is one, the remedy.
"""

import difflib
from collections.abc import Iterable


class JaxllmError(ValueError):
    """The parent of every error that jaxllm raises on purpose."""


class ConfigError(JaxllmError):
    """A configuration is malformed, unsupported, or contradicts itself."""


class CheckpointError(JaxllmError):
    """A checkpoint's files are missing, unsafe, malformed, or do not fit its configuration."""


class TokenError(JaxllmError):
    """A token id or a position is outside what the model knows, or token arrays do not fit."""


class CapacityError(JaxllmError):
    """A write would not fit into a cache, or a text not into the model's context."""


class SamplingError(JaxllmError):
    """A sampling or generation option is out of its range."""


class NonFiniteError(JaxllmError):
    """The model returned NaN or infinite logits."""


class CacheMismatchError(JaxllmError):
    """A cache does not belong to this model, batch, precision or prefix."""


class TemplateError(JaxllmError):
    """A chat template is missing, malformed, or exceeded its limits."""


class UnreadWarning(UserWarning):
    """A checkpoint has settings that nothing here reads."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ ": did you mean X?" with the known name that is most like an unknown one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""
