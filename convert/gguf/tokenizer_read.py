"""Reader of a GGUF file's tokenizer and chat template.

`tokenizer.ggml.model` "llama" is SentencePiece: pieces, scores and types. "gemma4" is the same with
merges instead of scores. "gpt2" is byte-level BPE: pieces, merges and the name of a pre-tokenizer
(`pre`). All are converted to the tree of a
tokenizer.json, so all other code handles them like any tokenizer.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.convert.gguf.pre_tokenizers import find_pre_tokenizer, pre_tokenizer_json
from jaxllm.errors import CheckpointError, TemplateError
from jaxllm.text import sentencepiece_model
from jaxllm.text.byte_level import BYTE_OF_SYMBOL, byte_level_step
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.formats import ROLES, TokenizerTree
from jaxllm.text.sentencepiece_model import build_tree, make_added_token
from jaxllm.text.tokenizer_limits import check_tree

NO_TOKENIZER = (None, "no_vocab", "none")  # files without a tokenizer
TEMPLATE_KEY = "tokenizer.chat_template"
ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",  # as llama.cpp spells it
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
assert set(ID_KEYS) == set(ROLES)
# Keys of ids that end a text; the end of a turn or message may differ from the end of a text.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# llama.cpp also ends a text at tokens with these names, and at these three of fill-in-the-middle,
# each by its key or else by one of its names. Its "</s>" is left out: Gemma has it for HTML.
END_NAMES = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
FILL_IN_NAMES = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "gpt2": {}, "gemma4": {}}


def read_tokenizer(settings: Mapping[str, Any], path: Path) -> TokenizerTree | None:
    """Return the tokenizer, or None if the file has none.

    Raises CheckpointError for an unsupported or malformed tokenizer.
    """
    kind = settings.get("tokenizer.ggml.model")
    if not stores_tokenizer(settings):
        return None
    if kind not in _DEFAULTS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model {kind!r:.40} is not supported (known:"
            f" {', '.join(_DEFAULTS)})"
        )
    where, ggml = str(path), _Keys(settings, str(path))
    tokens, type_V = _read_pieces(ggml, where)
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) < len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens has {twice!r:.60} twice")
    roles = _read_roles(ggml, tokens, _DEFAULTS[kind])
    scores: list[float] | None = None
    if kind != "gpt2":
        has_scores, adds_bos = kind == "llama", True
        tree = _build_sentencepiece(ggml, tokens, vocab, type_V, where, spaced=has_scores)
        if has_scores:
            scores = _read_scores(ggml, tokens, type_V, where)
        else:
            tree["model"]["merges"] = _read_merges(ggml, where)
    else:
        architecture = settings.get("general.architecture")
        pre = find_pre_tokenizer(ggml.get("pre"), where, architecture=architecture)
        tree, adds_bos = _build_byte_level(ggml, vocab, where), pre.adds_bos
        tree["pre_tokenizer"] = pre_tokenizer_json(pre)
        tree["normalizer"] = {"type": "NFC"} if pre.normalizes_nfc else None
        tree["model"]["ignore_merges"] = pre.ignore_merges
    unknown = None if kind == "gpt2" else vocab[tree["model"]["unk_token"]]
    tree["added_tokens"] = _find_added_tokens(tokens, type_V, set(roles.values()), unknown)
    # The pieces were checked as they were read.
    check_tree(tree | {"model": tree["model"] | {"vocab": {}, "merges": []}}, where)
    named = {role: tokens[index] for role, index in roles.items()}
    # Early files of Gemma 4 wrongly say that no begin token is added.
    says = kind == "gemma4" or ggml.get("add_bos_token", adds_bos)
    end = named.get("eos") if ggml.get("add_eos_token", False) is True else None
    return TokenizerTree(tree, named, says is True and "bos" in named, end, scores)


def stores_tokenizer(settings: Mapping[str, Any]) -> bool:
    """Return whether a file has a tokenizer, by its keys alone."""
    return settings.get("tokenizer.ggml.model") not in NO_TOKENIZER


def find_ends(settings: Mapping[str, Any]) -> list[Any]:
    """Return the ids that end a text as in llama.cpp: those of the keys, then others by name."""
    ggml, named = _Keys(settings, ""), END_NAMES.union(*FILL_IN_NAMES.values())
    tokens = ggml.get("tokens")
    listed = tokens if isinstance(tokens, list) else []
    ids = {listed[i]: i for i in sorted(map(listed.index, named.intersection(listed)))}
    end_ids = [ggml.get(key) for key in END_KEYS]
    end_ids += [index for token, index in ids.items() if token in END_NAMES]
    for key, names in FILL_IN_NAMES.items():
        end_ids.append(ggml.get(key, next((ids[name] for name in names if name in ids), None)))
    if wrong := [index for index in end_ids if index is not None and type(index) is not int]:
        raise CheckpointError(f"tokenizer.ggml: {wrong[0]!r:.40} is not the id of a token")
    in_parts = ids.keys() >= {"<|end|>", "<|call|>", "<|return|>"}  # "<|end|>" ends a part only
    dropped = {None, ids["<|end|>"] if in_parts else None}
    return [index for index in dict.fromkeys(end_ids) if index not in dropped]


def find_templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the one without a name in the file is "default"."""
    templates = {"default": settings.get(TEMPLATE_KEY)}
    templates |= {
        name: template
        for key, template in settings.items()
        if re.fullmatch(r"\w+", name := key.removeprefix(f"{TEMPLATE_KEY}."))
    }
    return {name: template for name, template in templates.items() if isinstance(template, str)}


def read_template(
    settings: Mapping[str, Any], roles: Mapping[str, str], path: Path
) -> ChatTemplate:
    """Return the chat template, with the one named "tool_use".

    Raises TemplateError if there is none or it is malformed.
    """
    templates = find_templates(settings)
    if "default" not in templates:
        raise TemplateError(
            f"{path} has no tokenizer.chat_template. Pass a template (jaxllm chat --chat-template"
            " FILE), or generate from plain text (jaxllm generate)"
        )
    return ChatTemplate(
        templates["default"], special_tokens(roles), tool_use=templates.get("tool_use")
    )


def special_tokens(roles: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the special tokens that templates can use: `("bos_token", "<s>")`."""
    return tuple((f"{role}_token", roles[role]) for role in ROLES if role in roles)


class _Keys:
    """The keys `tokenizer.ggml.*`."""

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self.settings, self.where = settings, where

    def get(self, key: str, default: Any = None) -> Any:
        return self.settings.get(f"tokenizer.ggml.{key}", default)

    def get_texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{key} is not a list of strings")
        return value

    def get_numbers(self, key: str, count: int) -> np.ndarray | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key} is not {count:,} numbers, one per token"
            )
        return value


def _read_pieces(ggml: _Keys, where: str) -> tuple[list[str], np.ndarray]:
    """Return the tokens by id and their types, without trailing padding tokens."""
    tokens = ggml.get_texts("tokens")
    type_V = ggml.get_numbers("token_type", len(tokens))
    if type_V is None:
        type_V = np.full(len(tokens), sentencepiece_model.NORMAL)
    used = np.flatnonzero(type_V != sentencepiece_model.UNUSED)
    count = int(used[-1]) + 1 if len(used) else 0
    if not count:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens is empty")
    tokens = tokens[:count]
    sentencepiece_model.check_lengths(tokens, f"{where}: tokenizer.ggml.tokens")
    return tokens, type_V[:count].astype(np.int64)


def _read_roles(ggml: _Keys, tokens: Sequence[str], defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of special tokens; raise CheckpointError for an invalid id."""
    roles = {}
    for role, key in ID_KEYS.items():
        index = ggml.get(key, defaults.get(role))
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            if ggml.get(key) is None:  # the default is outside a small vocabulary
                continue
            raise CheckpointError(
                f"{ggml.where}: tokenizer.ggml.{key} {index!r:.40} is none of {len(tokens):,} ids"
            )
        roles[role] = index
    return roles


def _read_scores(ggml: _Keys, tokens: Sequence[str], type_V: np.ndarray, where: str) -> list[float]:
    """Return the scores by id (`TokenizerTree`)."""
    score_V = ggml.get_numbers("scores", len(ggml.get_texts("tokens")))
    if score_V is None or not np.isfinite(score_V[: len(tokens)]).all():
        raise CheckpointError(f"{where}: tokenizer.ggml.scores are missing or not finite numbers")
    is_normal = type_V == sentencepiece_model.NORMAL
    return list(np.where(is_normal, score_V[: len(tokens)], np.nan).tolist())


def _read_merges(ggml: _Keys, where: str) -> list[Any]:
    """Return the merges, as texts or as pairs."""
    merges: list[Any] = ggml.get_texts("merges")
    if wrong := [merge for merge in merges if merge.count(" ") != 1]:
        raise CheckpointError(f"{where}: tokenizer.ggml.merges has {wrong[0]!r:.60}, not a pair")
    if "#version" in "".join(merges):  # which the library would skip, were it not a pair
        merges = [merge.split(" ") for merge in merges]
    return merges


def _build_sentencepiece(
    ggml: _Keys,
    tokens: list[str],
    vocab: dict[str, int],
    type_V: np.ndarray,
    where: str,
    spaced: bool,
) -> dict[str, Any]:
    """Return the tree without merges and added tokens.

    spaced: Whether a space is prepended to a text where no key decides.
    """
    unknown = ggml.get("unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.unknown_token_id {unknown!r:.40} is not an id"
        )
    held = {tokens[index] for index in np.flatnonzero(type_V == sentencepiece_model.BYTE)}
    missing = {f"<0x{byte:02X}>" for byte in range(256)} - held
    if held and missing:
        raise CheckpointError(f"{where}: {len(missing)} of 256 byte tokens are missing")
    return build_tree(
        vocab,
        [],
        unknown=tokens[unknown],
        byte_fallback=bool(held),
        dummy_prefix=ggml.get("add_space_prefix", spaced) is True,
        strip_spaces=ggml.get("remove_extra_whitespaces", False) is True,
    )


def _build_byte_level(ggml: _Keys, vocab: dict[str, int], where: str) -> dict[str, Any]:
    """Return the tree without added tokens and pre-tokenizer."""
    merges = _read_merges(ggml, where)
    # Published vocabularies lack symbols of bytes that hardly occur in text, such as control
    # characters (SmolLM2); the library and llama.cpp skip such a byte.
    printable = {s for s, byte in BYTE_OF_SYMBOL.items() if 32 <= byte < 127}
    if missing := printable - vocab.keys():
        raise CheckpointError(
            f"{where}: the tokens are not byte-level: {len(missing)} of the symbols for printable"
            f" ASCII are missing, {min(missing)!r} for example"
        )
    return {
        "version": "1.0",
        "post_processor": None,
        "decoder": byte_level_step(),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _find_added_tokens(
    tokens: Sequence[str], type_V: np.ndarray, special: set[int], unknown: int | None
) -> list[dict[str, Any]]:
    """Return all added tokens, which match text literally.

    They need no normalization, since llama.cpp's converter has undone it.

    Args:
        special: Ids with a role, which are special whatever their type is.
        unknown: The id of SentencePiece's unknown piece; other single characters with a role
            remain text.
    """
    control, user_defined = (
        set(np.flatnonzero(type_V == kind).tolist())
        for kind in (sentencepiece_model.CONTROL, sentencepiece_model.USER_DEFINED)
    )
    typed = control | user_defined | ({unknown} if unknown is not None else set())
    added = typed | {index for index in special if len(tokens[index]) > 1}
    special = special | (added - user_defined)
    return [
        make_added_token(index, tokens[index], special=index in special) | {"normalized": False}
        for index in sorted(added)
    ]
