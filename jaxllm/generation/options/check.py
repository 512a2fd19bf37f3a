"""Option checks: unknown names, invalid values and incompatible combinations."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np

from jaxllm.cache.kv import KVCache
from jaxllm.errors import SamplingError, suggest_name
from jaxllm.generation import option_table
from jaxllm.generation.completion import Decoder, LanguageModel, StoppingCriterion
from jaxllm.generation.decoders import DECODERS, BeamSearch, PlainGeneration
from jaxllm.generation.loops.overflow import OverflowPolicy, find_policy
from jaxllm.generation.option_table import HINTS, MAX_SEED, OPTIONS, Call, GenerateOptions, Option
from jaxllm.generation.sampling.options import PROCESSORS, check_sampling_option
from jaxllm.generation.sampling.parsers import is_within
from jaxllm.generation.sampling.sampler import Processor, Sampler, ScoreFunction
from jaxllm.grammar.grammar import KINDS, Grammar, as_grammar
from jaxllm.models.interventions import as_edits
from jaxllm.runtime.validation import is_integer, is_number
from jaxllm.steps import EditMap

_CALL_NAMES: dict[Call, str] = {"generate": "", "stream": "stream", "serve": "a request to serve"}
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_GROUPS: dict[str, tuple[type[Decoder], ...]] = {
    "": (),
    "plain": (PlainGeneration,),
    "plain or beams": (PlainGeneration, BeamSearch),
    "samplers": tuple(decoder for decoder in DECODERS if decoder.samples),
}
# The decoders that take each option: its group, and those that have it as a field.
TAKEN_BY = {
    name: _GROUPS[option.decoders]
    + tuple(d for d in DECODERS if name in {f.name for f in dataclasses.fields(d)})
    or DECODERS
    for name, option in OPTIONS.items()
}
_NAMED = {kind.__name__: kind for kind in (KVCache, LanguageModel, Processor, Sampler, Grammar)}
_ALIASES = {
    "np": np,
    "StoppingCriterion": StoppingCriterion,
    "ScoreFunction": ScoreFunction,
    "EditMap": EditMap,
    "OverflowPolicy": OverflowPolicy,
}
_TYPES = get_type_hints(GenerateOptions, {**vars(option_table), **_NAMED, **_ALIASES})


def check_options(options: Mapping[str, Any], kind: Call = "generate") -> dict[str, Any]:
    """Return the options that are not None, validated and normalized.

    Args:
        kind: the call that they are for. Checks that need the model come later: vocabulary and
            context.

    Raises SamplingError, with all complaints, for unknown names (with a suggestion), values of the
    wrong type or out of range, and incompatible options.
    """
    checked = check_values(options)
    select_decoder(checked, kind)
    return checked


def check_values(options: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return the options that are not None, each validated and normalized by itself.

    Args:
        source: a prefix for messages.

    Raises:
        SamplingError: With all unknown or invalid options.
    """
    checked = {}
    wrong = [f"no option {name}{_suggest(name)}" for name in options if name not in OPTIONS]
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None or value is None:
            continue
        try:
            checked[name] = _check_value(name, value, option)
        except SamplingError as error:
            wrong.append(f"{source}{error}")
        except (TypeError, ValueError, OverflowError):
            wrong.append(f"{source}{name} must be {option.meaning}; got {value!r:.60}")
    if wrong:
        raise SamplingError("; ".join(wrong))
    return checked


def select_decoder(
    options: Mapping[str, Any], kind: Call = "generate", defaults: Mapping[str, Any] = _NO_OPTIONS
) -> type[Decoder]:
    """Return the decoder that options select; `defaults` may select it too.

    Raises:
        SamplingError: If they select two, for a given option that the decoder does not take, and
            for two options that exclude each other. Defaults that it does not take are for other
            decoders.
    """
    merged = {**defaults, **options}
    selecting = [
        TAKEN_BY[name]
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
        names = [name for name in OPTIONS if TAKEN_BY[name] == (decoder,) and name in merged]
        raise SamplingError(f"{_CALL_NAMES[kind]} does not take {names[0]}")
    for name, value in options.items():
        if not is_taken(name, decoder, kind) and not _is_default(name, value):
            needed = f", which requires {' or '.join(d.name for d in TAKEN_BY[name])}"
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
        return value[row] if per_row and len(value) == rows else value

    return {name: row_value(name, value) for name, value in options.items()}


def _suggest(name: Any) -> str:
    if name in HINTS:
        return f": {HINTS[name]}"
    return suggest_name(str(name), OPTIONS) or " (help(jaxllm.LM.generate) lists all options)"


def is_taken(name: str, decoder: type[Decoder], kind: Call) -> bool:
    """Return whether a call that uses this decoder takes the option."""
    return decoder in TAKEN_BY[name] and kind in OPTIONS[name].calls


def _is_default(name: str, value: Any) -> bool:
    default = OPTIONS[name].default
    same = type(value) is type(default) and bool(value == default)
    return same and OPTIONS[name].decoders != "samplers"


def _check_value(name: str, value: Any, option: Option) -> Any:
    """Return the normalized value; raises TypeError or ValueError for an invalid one."""
    if name in PROCESSORS:
        return check_sampling_option(name, value)
    if name in KINDS:
        return as_grammar(value, name)
    value = _convert(value, _TYPES[name], option)
    if isinstance(option.default, tuple):
        value = tuple(value) if isinstance(value, list) else (value,)
    if name == "stop_strings" and "" in value:
        raise ValueError
    if name == "overflow" and isinstance(value, str):
        return find_policy(value)
    for edit in value.values() if name == "edits" else ():
        as_edits(edit)
    return value


def _convert(x: Any, kind: Any, option: Option) -> Any:
    """Return x as a type of `GenerateOptions`: numbers as Python's, sequences as lists."""
    origin, within = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for one in within:
            try:
                return _convert(x, one, option)
            except (TypeError, ValueError):
                continue
    elif origin is Literal:
        if isinstance(x, str) and x in within:
            return x
    elif origin is Sequence:
        if isinstance(x, list | tuple) or (isinstance(x, np.ndarray | jax.Array) and x.ndim):
            return [_convert(item, within[0], option) for item in x]
    elif origin is Mapping:
        if isinstance(x, Mapping) and all(isinstance(name, within[0]) for name in x):
            return x
    elif origin is Callable:
        if _takes_two_args(x):
            return x
    elif kind is int:
        if is_integer(x) and is_within(operator.index(x), option) and x <= MAX_SEED:
            return operator.index(x)
    elif kind is float:
        if is_number(x) and is_within(x, option):
            return float(x)
    elif kind is bool:
        if isinstance(x, bool | np.bool_):
            return bool(x)
    elif kind is not np.ndarray and isinstance(x, kind):
        return x
    raise ValueError


def _takes_two_args(x: Any) -> bool:
    """Return whether x can be called with two arguments, judging by its signature."""
    try:
        inspect.signature(x).bind(None, None)
    except ValueError:  # it has no signature
        return callable(x)
    except TypeError:
        return False
    return True
