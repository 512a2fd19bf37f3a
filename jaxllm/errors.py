"""Exceptions of jaxllm, raised on the host before anything is dispatched.

Each message names the thing, the value it got, the value it expected and, if possible, a remedy.
"""

import contextlib
import difflib
import linecache
import traceback
from collections.abc import Iterable, Iterator


class JaxllmError(ValueError):
    """Base class of every error that jaxllm raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of the traceback: the error, and the line of the cell.

        IPython calls this hook, and keeps the error in `sys.last_value`. (In some releases of
        Python 3.12 and 3.13, `traceback.print_last` prints nothing.)
        """
        lines = [f"{type(self).__name__}: {self}"]
        for frame, number in traceback.walk_tb(self.__traceback__):
            if frame.f_globals.get("__name__") == "__main__":
                source = linecache.getline(frame.f_code.co_filename, number).strip()
                lines[1:] = [f"  line {number} of the cell: {source}"]
        show = "import sys, traceback; traceback.print_exception(sys.last_value)"
        return [*lines, f"  Its traceback: {show}"]


class ConfigError(JaxllmError):
    """A configuration is malformed, unsupported or inconsistent."""


class CheckpointError(JaxllmError):
    """A checkpoint's files are missing, unsafe, malformed, or do not match its configuration."""


class NewerFileError(CheckpointError):
    """A later version of jaxllm wrote the file."""


class TokenError(JaxllmError):
    """A token id or position is outside the model's range, or a token array is malformed."""


class CapacityError(JaxllmError):
    """A write does not fit into a cache, or a text not into the model's context."""


class SamplingError(JaxllmError):
    """A sampling or generation option is unknown, invalid or out of range."""


class GrammarError(SamplingError):
    """A grammar is invalid or unsupported, or leaves a row without a token."""


class NonFiniteError(JaxllmError):
    """The model returned NaN or infinite logits."""


class RequestError(JaxllmError):
    """A request's own text, option or callback failed while it ran; the others continue."""


def as_request_error(error: Exception) -> JaxllmError:
    """Return what ends one request: the error itself, or one that names what was not expected."""
    if isinstance(error, JaxllmError):
        return error
    made = RequestError(f"this request failed: {type(error).__name__}: {error!s:.300}")
    made.__cause__ = error
    return made


class OverloadError(JaxllmError):
    """Too many requests are waiting."""


class ClosedError(RuntimeError):
    """A background server was closed."""


class CacheMismatchError(JaxllmError):
    """A cache does not belong to this model, batch, precision or prefix."""


class TemplateError(JaxllmError):
    """A chat template is missing, malformed, or exceeded its limits."""


class UnusedSettingsWarning(UserWarning):
    """A checkpoint has settings that jaxllm does not use."""


class LargerWeightsWarning(UserWarning):
    """Weights take more memory than in their file, since jaxllm lacks their format."""


@contextlib.contextmanager
def requires_extra(extra: str, what: str, error: type[JaxllmError] = ConfigError) -> Iterator[None]:
    """Import optional packages within this context.

    Args:
        extra: The extra that brings them.
        what: What needs them, for the message.
        error: What to raise if one is missing; it names the package and the extra.
    """
    try:
        yield
    except ImportError as missing:
        name = missing.name or missing
        raise error(f"{what} needs {name}: pip install 'jaxllm[{extra}]'") from missing


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean X?" with the known name closest to `name`, or "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""
