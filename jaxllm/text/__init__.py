"""Text in and out of a model: tokenizers, incremental detokenization, chat templates.

tokenizer: text to ids and back, for any kind of file; encoder: by the pieces of a text;
detokenizer: streamed text and stop strings. formats: Hugging Face's files; sentencepiece_model:
SentencePiece models; byte_level: vocab.json and merges.txt; tokenizer_limits: limits on them;
embedding_settings: sentence-transformers' files. chat: chat templates; sandbox, template_limits:
their sandbox and limits.
"""

from jaxllm.text.chat import ChatTemplate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "Detokenizer", "Tokenizer", "has_tokenizer"]
