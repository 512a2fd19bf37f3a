"""Pre-tokenizers of byte-level tokenizers, by their names in `tokenizer.ggml.pre`.

A file has only the name. The regexes are those of the tokenizer.json that llama.cpp's
`llama-vocab.cpp` links to the name, so texts get the same ids as with Hugging Face's format. The
names of a row are all that llama.cpp splits in the same way.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.errors import CheckpointError
from jaxllm.text.byte_level import byte_level_step

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEGIN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """A pre-tokenizer.

    Attributes:
        regexes: Applied in order, each to the pieces that the earlier ones left.
        ignore_merges: Whether a piece that is a token is never split (`ignore_merges`).
        adds_bos: The default of `add_bos_token`.
        normalizes_nfc: Whether texts are normalized to NFC first.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizes_nfc: bool = False


_LLAMA3 = PreTokenizer((f"{_BEGIN}\\p{{N}}{{1,3}}{_END}",), ignore_merges=True, adds_bos=True)
_THREE_DIGITS = _LLAMA3._replace(ignore_merges=False, adds_bos=False)
_PLAIN = PreTokenizer((GPT2_REGEX,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2_REGEX))
_ONE_DIGIT = PreTokenizer((f"{_BEGIN}\\p{{N}}{_END}",))
_GPT4O = PreTokenizer((_GPT4O_REGEX,))


def _share_row(pre: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), pre)


# The first name of a row is the one that is written.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_share_row(
        _LLAMA3,
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    **_share_row(
        _PLAIN,
        "gpt-2 olmo mpt phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"
        " modern-bert jina-es jina-de jina-v2-es jina-v2-de",
    ),
    "qwen2": _ONE_DIGIT._replace(normalizes_nfc=True),
    **_share_row(
        _ONE_DIGIT,
        "deepseek-r1-qwen stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2",
    ),
    **_share_row(_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    **_share_row(_THREE_DIGITS, "dbrx smaug-bpe glm4 chatglm-bpe"),
    **_share_row(_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    # Llama derivatives of other publishers.
    "deepseek-coder": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    "seed-coder": PreTokenizer(
        (f"{_BEGIN}\\p{{N}}{{1}}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",)
    ),
    "viking": PreTokenizer(
        (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}")
    ),
    # llama.cpp's default, which some files name.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_REGEX, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def find_pre_tokenizer(name: Any, where: str, *, architecture: Any) -> PreTokenizer:
    """Return the pre-tokenizer of a name; for the architecture gpt2 the name may be missing.

    Raises CheckpointError for a missing or unknown name, since a wrong split silently gives other
    tokens and worse answers.
    """
    if name is None and architecture == "gpt2":
        name = "gpt-2"
    if name is None:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre is missing, so the pre-tokenizer is unknown. Set it with"
            " gguf-new-metadata --pre-tokenizer NAME IN OUT (llama-bpe for Llama 3), or convert the"
            " model again with a newer llama.cpp"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre {name!r:.40} is not supported (known:"
            f" {', '.join(PRE_TOKENIZERS)})"
        )
    return PRE_TOKENIZERS[name]


def pre_tokenizer_json(pre: PreTokenizer) -> dict[str, Any]:
    """Return the equivalent `pre_tokenizer_json` of a tokenizer.json."""
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in pre.regexes
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level_step(use_regex=False)]}
