"""Text in and out of a model: tokenizers, incremental detokenization, chat templates.

tokenizer: ids and back, whatever kind of file it comes from; reader: the text of a continuation as
it grows, detokenizer: the pieces of it, stop: where it ends. formats: Hugging Face's files, spm:
SentencePiece's, byte_level: vocab.json and merges.txt; written: any as Hugging Face's. chat:
templates; sandbox, syntax, budget: what a template may do, and for how long. bounds, regexes: what
a tokenizer's file may ask for.
"""

from jaxllm.text.chat import ChatTemplate
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "Detokenizer", "Tokenizer", "has_tokenizer"]
