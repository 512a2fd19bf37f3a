"""Text in and out of a model: tokenizers, incremental detokenization, chat templates.

tokenizer: text to ids and back, for any kind of file; stream_decoder: the streamed text of a
continuation; detokenizer: its pieces; stop: stop strings. formats: Hugging Face's files;
sentencepiece_model: SentencePiece models; byte_level: vocab.json and merges.txt; save_tokenizer:
writes any of them in Hugging Face's format. chat: chat templates; sandbox, template_ast,
template_limits: their sandbox and limits. tokenizer_limits: limits on a tokenizer's
files.
"""

from jaxllm.text.chat import ChatTemplate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "Detokenizer", "Tokenizer", "has_tokenizer"]
