"""The common vocabulary of teacher and student.

Models of a family pad their vocabularies to different sizes (Qwen 2.5 has 151,936 and 152,064 rows
for the same tokens), so both are cut to the real tokens. If an id meant different tokens, every
loss would be silently wrong, so tokenizers are compared token by token.
"""

from jaxllm.errors import ConfigError, TokenError
from jaxllm.lm import LM
from jaxllm.text.tokenizer import Tokenizer

_MAX_SHOWN = 3


def common_vocab_size(teacher: LM, student: LM) -> int:
    """Return the number of common tokens: ids from 0 that mean the same and exist in both models.

    Raises ConfigError if the tokenizers differ, or one is missing.
    """
    tokenizers = _get_tokenizer(teacher, "teacher"), _get_tokenizer(student, "student")
    check_tokenizers(*tokenizers)
    return min(tokenizers[0].vocab_size, teacher.config.vocab_size, student.config.vocab_size)


def check_tokenizers(teacher: Tokenizer, student: Tokenizer) -> None:
    """Raise ConfigError, with examples, if an id has different tokens in the two tokenizers.

    The ids that end a text may differ, as they do for instruction-tuned models of a family.
    """
    sizes = teacher.vocab_size, student.vocab_size
    unlike = [i for i in range(max(sizes)) if _token_text(teacher, i) != _token_text(student, i)]
    if unlike:
        shown = "; ".join(
            f"{i} is {_token_text(teacher, i)!r:.40} and {_token_text(student, i)!r:.40}"
            for i in unlike[:_MAX_SHOWN]
        )
        raise ConfigError(
            f"teacher and student have different tokenizers: {len(unlike)} of {max(sizes)} ids"
            f" differ ({shown}). Train on texts that the teacher writes (sequence-level"
            " distillation) instead"
        )


def _get_tokenizer(lm: LM, name: str) -> Tokenizer:
    if lm.tokenizer is None:
        raise ConfigError(
            f"the {name} {lm.path.name} has no tokenizer to compare with the other's: put its"
            " tokenizer files into the model's directory"
        )
    return lm.tokenizer


def _token_text(tokenizer: Tokenizer, index: int) -> str | None:
    """Return the token of an id, or None if there is none."""
    try:
        return tokenizer.token(index)
    except TokenError:
        return None
