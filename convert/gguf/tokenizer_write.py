"""Conversion of a tokenizer to GGUF keys, which `tokenizer_read` reads back as the same tokenizer.

A model type or a pre-tokenizer that GGUF cannot name is refused, since llama.cpp would silently
give texts other ids.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.convert.gguf.pre_tokenizers import GPT2_REGEX, PRE_TOKENIZERS
from jaxllm.convert.gguf.tokenizer_read import ID_KEYS, TEMPLATE_KEY, find_ends
from jaxllm.errors import ConfigError
from jaxllm.text import sentencepiece_model
from jaxllm.text.formats import TokenizerTree
from jaxllm.text.sentencepiece_model import SPACE, derive_merges

_UNKNOWN = 2  # a piece type
# Marks of calls and thoughts, which llama.cpp shows in texts.
_SHOWN = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
          "<tool_response|>", '<|"|>')  # fmt: skip
_LOWEST_SCORE = -1e9  # the score of pieces that no merge produces


def make_tokenizer_keys(
    source: TokenizerTree,
    templates: Mapping[str, str],
    generation: Mapping[str, Any],
    vocab_size: int,
) -> dict[str, Any]:
    """Return keys with values. vocab_size: rows of the token table; missing tokens are padded.

    Raises ConfigError for a tokenizer that cannot be written as GGUF.
    """
    tree, roles = source.with_merges(), source.roles
    model = tree["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refusal(f"a model of type {model['type']!r:.40}")
    added = {token["id"]: token for token in tree["added_tokens"]}
    names = {index: name for name, index in model["vocab"].items()}
    names |= {index: token["content"] for index, token in added.items()}
    if max(names) >= vocab_size:
        raise ConfigError(
            f"the tokenizer has ids up to {max(names)}, but the token table has {vocab_size} rows:"
            " GGUF requires a row per token"
        )
    tokens = [names.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    kinds = [
        sentencepiece_model.NORMAL if index in names else sentencepiece_model.UNUSED
        for index in range(vocab_size)
    ]
    for index, token in added.items():
        kinds[index] = (
            sentencepiece_model.CONTROL
            if token.get("special")
            else sentencepiece_model.USER_DEFINED
        )
    if _step_types(tree.get("decoder")) == ["ByteLevel"]:
        own = _byte_level_keys(tree)
    elif model.get("byte_fallback"):
        own = _sentencepiece_keys(tree, tokens, kinds)
    else:
        raise _refusal(f"a BPE with the decoder {_step_types(tree.get('decoder'))}")
    ids = {name: index for index, name in names.items()}
    ids_by_key = {ID_KEYS[role]: ids[text] for role, text in roles.items()}
    ids_by_key |= _eos_keys(generation, ids_by_key.get("eos_token_id"))
    keys = {
        **own,
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        **ids_by_key,
        "add_bos_token": source.adds_bos,
        "add_eos_token": source.end is not None and source.end == roles.get("eos"),
    }
    settings = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    named = {re.sub(r"\W", "_", name, flags=re.ASCII): text for name, text in templates.items()}
    for name, text in named.items():
        settings[TEMPLATE_KEY if name == "default" else f"{TEMPLATE_KEY}.{name}"] = text
    if others := sorted(named.keys() - {"default"}):
        settings["tokenizer.chat_templates"] = others
    return settings


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer cannot be written as GGUF: {what}. GGUF supports SentencePiece BPE and"
        " byte-level BPE"
    )


def _eos_keys(generation: Mapping[str, Any], eos: int | None) -> dict[str, int]:
    """Return the keys of ids that end an answer, as many as there are keys for."""
    given = generation.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    others = [index for index in ids if index != eos and index >= 0]
    if eos is None and others:
        return dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), others, strict=False))
    return dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))


def dropped_settings(generation: Mapping[str, Any], keys: Mapping[str, Any]) -> list[str]:
    """Return the settings of a generation_config.json that GGUF has no key for, for a message.

    Args:
        keys: The keys that are written. Ends that readers know by name need none.
    """
    eos = generation.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [eos]
    lost = [f"eos_token_id {i}" for i in ends if i is not None and i not in find_ends(keys)]
    neutral: tuple[Any, ...] = (None, False, [])
    named = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    return lost + [
        name
        for name, value in generation.items()
        if name not in named and not name.startswith("_") and value not in neutral
    ]


def _iterate_steps(step: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield a step of a tokenizer.json, or the steps of a sequence."""
    if isinstance(step, dict):
        if key not in step:
            yield step
        for part in step.get(key, ()):
            yield from _iterate_steps(part, key)


def _step_types(decoder: Any) -> list[str]:
    return [str(step.get("type")) for step in _iterate_steps(decoder, "decoders")]


def _byte_level_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the merges and the name of the pre-tokenizer."""
    regexes: list[str] = []
    for step in _iterate_steps(tree.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
                regexes.append(regex)
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "invert": True}:
                regexes.append(regex)  # it removes only text between matches: none
            case {"type": "Digits", "individual_digits": True}:
                regexes.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False, **flags}:
                regexes += [GPT2_REGEX] if flags.get("use_regex", True) else []
            case _:
                raise _refusal(f"the pre-tokenizer {step.get('type')!r} with these options")
    normal = [step.get("type") for step in _iterate_steps(tree.get("normalizer"), "normalizers")]
    model = tree["model"]
    for name, pre in PRE_TOKENIZERS.items():
        same = pre.regexes == tuple(regexes) and normal == (["NFC"] if pre.normalizes_nfc else [])
        if same and pre.ignore_merges == bool(model.get("ignore_merges")):
            merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
            return {"model": "gpt2", "pre": name, "merges": merges}
    raise _refusal(f"no known name (pre) for a split by {regexes!r:.200} after {normal}")


def _sentencepiece_keys(
    tree: dict[str, Any], tokens: Sequence[str], kinds: list[int]
) -> dict[str, Any]:
    """Return scores instead of merges, and options for spaces; update `kinds` in place.

    Merges that do not follow from scores are written as they are, in the form of Gemma 4.
    """
    model = tree["model"]
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    for index, token in enumerate(tokens):
        if (
            kinds[index] == sentencepiece_model.NORMAL
            and token.startswith("<0x")
            and len(token) == 6
        ):
            kinds[index] = sentencepiece_model.BYTE
        if token == model.get("unk_token"):
            kinds[index] = _UNKNOWN
    normal = [
        t for t, kind in zip(tokens, kinds, strict=True) if kind == sentencepiece_model.NORMAL
    ]
    rank = _score_pieces([left + right for left, right in merges])
    scores = {token: (rank or {}).get(token, _LOWEST_SCORE) for token in normal}
    has_scores = rank is not None and set(derive_merges(scores)) == set(merges)
    prefix = False
    strips = False
    escapes = False
    for step in _iterate_steps(tree.get("normalizer"), "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": text} if text == SPACE:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": text} if text == SPACE:
                escapes = True
            case {"type": "Strip"} | {"type": "Replace", "pattern": {"Regex": _}}:
                strips = True
            case _:
                raise _refusal(f"the normalizer {step.get('type')!r} with these options")
    for step in _iterate_steps(tree.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": text, "prepend_scheme": scheme} if (
                text == SPACE and not step.get("split", True)
            ):
                prefix = scheme != "never"
            case {"type": "Split", "pattern": {"String": " "}} if escapes:
                continue  # no space is left
            case _:
                raise _refusal(f"the pre-tokenizer {step.get('type')!r} with these options")
    if not has_scores:
        # llama.cpp splits at line ends first.
        if prefix or strips or any("\n" in token and token.strip("\n") for token in normal):
            raise _refusal("merges that do not follow from scores of pieces")
        for index, token in enumerate(tokens):
            if token in _SHOWN and kinds[index] == sentencepiece_model.CONTROL:
                kinds[index] = sentencepiece_model.USER_DEFINED
        return {
            "model": "gemma4",
            "merges": [" ".join(merge) for merge in merges],
            "add_space_prefix": False,
        }
    values = [scores.get(token, 0.0) for token in tokens]
    return {
        "model": "llama",
        "pre": "default",
        "scores": np.array(values, np.float32),
        "add_space_prefix": prefix,
        "remove_extra_whitespaces": strips,
    }


def _score_pieces(pieces: Sequence[str]) -> dict[str, float] | None:
    """Return the score of each piece, higher for earlier merges; None if there is none.

    pieces: the merges' results.

    In Llama's vocabulary runs of spaces come last, with one score, and merges in any order.
    """
    first = {piece: number for number, piece in reversed([*enumerate(pieces)])}
    runs = collections.Counter(piece for piece, _ in itertools.groupby(pieces))
    again = {piece for piece, count in runs.items() if count > 1}
    tail = min((first[piece] for piece in again), default=len(pieces))
    if not all(set(piece) == {SPACE} for piece in pieces[tail:]):
        return None
    return {piece: -float(n) if n < tail else _LOWEST_SCORE for piece, n in first.items()}
