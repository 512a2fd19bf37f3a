"""Option checks: unknown names, invalid values and incompatible combinations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation.completion import Decoder
from jaxllm.generation.decoders import DECODERS, PlainGeneration
from jaxllm.generation.options.table import OPTIONS, Kind
from jaxllm.generation.sampling.aliases import HINTS
from jaxllm.generation.sampling.options import PROCESSORS

_CALL_NAMES: dict[Kind, str] = {"generate": "", "stream": "stream", "serve": "a request to serve"}
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def check_options(options: Mapping[str, Any], kind: Kind = "generate") -> dict[str, Any]:
    """Return the options that are not None, validated and normalized.

    kind: the call that they are for. Checks that need the model come later: vocabulary and context.

    Raises SamplingError, with all complaints, for unknown names (with a suggestion), values of the
    wrong type or out of range, and incompatible options.
    """
    checked = check_values(options)
    select_decoder(checked, kind)
    return checked


def check_values(options: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return the options that are not None, each validated and normalized by itself.

    source: a prefix for messages. Raises SamplingError with all unknown or invalid options.
    """
    checked = {}
    wrong = [f"no option {name}{_suggest(name)}" for name in options if name not in OPTIONS]
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None or value is None:
            continue
        try:
            checked[name] = option.check(value)
        except SamplingError as error:
            wrong.append(f"{source}{error}")
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"{source}{name} must be {option.meaning}; got {value!r:.60}")
    if wrong:
        raise SamplingError("; ".join(wrong))
    return checked


def select_decoder(
    options: Mapping[str, Any], kind: Kind = "generate", defaults: Mapping[str, Any] = _NO_OPTIONS
) -> type[Decoder]:
    """Return the decoder that options select; `defaults` may select it too.

    Raises SamplingError if they select two, for a given option that the decoder does not take, and
    for two options that exclude each other. Defaults that it does not take are for other decoders.
    """
    merged = {**defaults, **options}
    selecting = [
        OPTIONS[name].decoders
        for name, value in merged.items()
        if OPTIONS[name].selects_decoder and value != OPTIONS[name].default
    ]
    selected = [decoder for decoder in DECODERS if (decoder,) in selecting]
    if len(selected) > 1:
        raise SamplingError(f"{' and '.join(d.name for d in selected)} cannot be combined")
    decoder = selected[0] if selected else PlainGeneration
    if selected and kind == "stream":
        raise SamplingError(f"stream does not support {decoder.name}. Use generate")
    if selected and kind == "serve":
        names = [
            name for name in OPTIONS if OPTIONS[name].decoders == (decoder,) and name in merged
        ]
        raise SamplingError(f"{_CALL_NAMES[kind]} does not take {names[0]}")
    for name, value in options.items():
        option = OPTIONS[name]
        if not option.is_taken_by(decoder, kind) and not _is_default(value, option.default):
            needed = f", which requires {' or '.join(d.name for d in option.decoders)}"
            raise SamplingError(
                f"{_CALL_NAMES[kind] or decoder.name} does not take {name}"
                f"{needed if kind == 'generate' else ''}"
            )
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
    return decoder


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
