"""Teacher and student speak of the same tokens, or are refused.

Models of a family pad their vocabularies to different sizes (Qwen 2.5 has 151,936 and 152,064 rows
for the same tokens): both are cut to the real ones. Where an id means something else, every number
would be wrong and no message would say so: tokenizers are compared token by token.
"""

from jaxllm.api import LM
from jaxllm.errors import ConfigError, TokenError
from jaxllm.text.tokenizer import Tokenizer

_SHOWN = 3


def shared_size(teacher: LM, student: LM) -> int:
    """How many tokens both know: ids from 0 that mean the same, and have a row in both models.

    Raises ConfigError where the tokenizers differ, or one has none.
    """
    tokenizers = _tokenizer(teacher, "teacher"), _tokenizer(student, "student")
    check_same(*tokenizers)
    return min(tokenizers[0].vocab_size, teacher.config.vocab_size, student.config.vocab_size)


def check_same(teacher: Tokenizer, student: Tokenizer) -> None:
    """Raise ConfigError, with the first tokens that differ, for tokenizers that do not write
    every id alike.

    Which ids end a text may differ: instruction-tuned models of a family have others.
    """
    sizes = teacher.vocab_size, student.vocab_size
    unlike = [i for i in range(max(sizes)) if _token(teacher, i) != _token(student, i)]
    if unlike:
        shown = "; ".join(
            f"{i} is {_token(teacher, i)!r:.40} and {_token(student, i)!r:.40}"
            for i in unlike[:_SHOWN]
        )
        raise ConfigError(
            f"teacher and student have different tokenizers, {len(unlike)} of {max(sizes)} ids are"
            f" not the same ({shown}): let the teacher write texts for the student (sequences)"
        )


def _tokenizer(lm: LM, name: str) -> Tokenizer:
    if lm.tokenizer is None:
        raise ConfigError(
            f"the {name} {lm.path.name} has no tokenizer: whether its ids mean the same as the"
            " other's cannot be known; put the tokenizer's files beside the model"
        )
    return lm.tokenizer


def _token(tokenizer: Tokenizer, index: int) -> str | None:
    """How the vocabulary writes an id; None for one that it has not."""
    try:
        return tokenizer.token(index)
    except TokenError:
        return None
