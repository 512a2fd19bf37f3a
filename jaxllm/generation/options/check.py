"""Option checks: unknown names, invalid values and incompatible combinations."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation.options.table import MODES, OPTIONS, PLAIN, SERVE, STREAM
from jaxllm.generation.sampling.aliases import HINTS
from jaxllm.generation.sampling.options import PROCESSORS

Kind = Literal["generate", "stream", "serve"]


def check_options(options: Mapping[str, Any], kind: Kind = "generate") -> dict[str, Any]:
    """Return the options that are not None, validated and normalized.

    kind: the call that they are for. Checks that need the model come later: vocabulary and context.

    Raises SamplingError, with all complaints, for unknown names (with a suggestion), values of the
    wrong type or out of range, and incompatible options.
    """
    chosen = check_values(options)
    check_combination(chosen, select_mode(chosen, kind))
    return chosen


def check_values(options: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return the options that are not None, each validated and normalized by itself.

    source: a prefix for messages. Raises SamplingError with all unknown or invalid options.
    """
    chosen = {}
    wrong = [f"no option {name}{_suggest(name)}" for name in options if name not in OPTIONS]
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None or value is None:
            continue
        try:
            chosen[name] = option.check(value)
        except SamplingError as error:
            wrong.append(f"{source}{error}")
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"{source}{name} must be {option.meaning}; got {value!r:.60}")
    if wrong:
        raise SamplingError("; ".join(wrong))
    return chosen


def select_mode(options: Mapping[str, Any], kind: Kind = "generate") -> str:
    """Return the decoding mode that options select. Raises SamplingError if they select two."""
    asked = {
        way
        for name, value in options.items()
        if OPTIONS[name].selects_mode and value != OPTIONS[name].default
        for way in OPTIONS[name].modes
    }
    ways = [way for way in MODES if way in asked]
    if len(ways) > 1:
        raise SamplingError(f"{' and '.join(ways)} cannot be combined")
    if ways and kind == "stream":
        raise SamplingError(f"stream does not support {ways[0]}. Use generate")
    if ways and kind == "serve":
        named = [name for name in mode_option_names(ways[0]) if name in options]
        raise SamplingError(f"{SERVE} does not take {named[0]}")
    return ways[0] if ways else {"generate": PLAIN, "stream": STREAM, "serve": SERVE}[kind]


def mode_option_names(mode: str) -> list[str]:
    """Return the names of the options that only this decoding mode has."""
    return [name for name, option in OPTIONS.items() if option.modes == (mode,)]


def check_combination(options: Mapping[str, Any], mode: str) -> None:
    """Raise SamplingError for an option that this decoding mode does not take, or for two options
    that exclude each other."""
    for name, value in options.items():
        option = OPTIONS[name]
        if mode not in option.modes and not _is_default(value, option.default):
            goes = (
                "" if mode in (STREAM, SERVE) else f", which requires {' or '.join(option.modes)}"
            )
            raise SamplingError(f"{mode} does not take {name}{goes}")
    for one, other in (
        ("assistant_model", "prompt_lookup_num_tokens"),
        *(("sampler", name) for name in ("do_sample", "logits_processor", *PROCESSORS)),
    ):
        if one in options and other in options:
            raise SamplingError(f"give {one} or {other}, not both")
    if options.get("batch_invariant") and options.get("num_return_sequences", 1) > 1:
        raise SamplingError(
            "batch_invariant requires num_return_sequences=1. Repeat the prompt in the list instead"
        )


def row_options(options: Mapping[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Return the options of one prompt of a batch, taking its entry of each per-prompt list."""

    def row_value(name: str, value: Any) -> Any:
        per_row = OPTIONS[name].per_row and isinstance(value, list | tuple | np.ndarray)
        return (
            value[row] if per_row and not isinstance(value, str) and len(value) == rows else value
        )

    return {name: row_value(name, value) for name, value in options.items()}


def _suggest(name: Any) -> str:
    if name in HINTS:
        return f": {HINTS[name]}"
    return suggest_name(str(name), OPTIONS) or " (help(jaxllm.LM.generate) lists all options)"


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
