"""Text in and out of a model: tokenizers, incremental detokenization, chat templates."""

from jaxllm.text.chat import ChatTemplate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "Detokenizer", "Tokenizer", "has_tokenizer"]
