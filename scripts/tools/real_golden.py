"""What llama.cpp computes for a published model: the reference of `make test-real`.

Tokens of the varied texts of `tests/real/texts.py`, the most likely tokens at each position of its
other texts, and greedy continuations. It takes llama-cpp-python, which jaxllm does not need. To
have the file's own weights without rounded products, quantize them to F32 first:

    llama-quantize --allow-requantize MODEL.gguf F32.gguf F32
    python scripts/tools/real_golden.py MODEL.gguf F32.gguf tests/real/gemma3_270m.json
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `tests` is
from tests.real.texts import CHAT, CONTINUED, READ, varied_texts

TOP = 6  # log-probabilities at each position
NEW_TOKENS = 24


def log_softmax(logits_XV: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    shifted_XV = logits_XV.astype(np.float64) - logits_XV.max(-1, keepdims=True)
    return shifted_XV - np.log(np.exp(shifted_XV).sum(-1, keepdims=True))


def read_text(llama: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """Return each position's most likely tokens, and the log-probability of the next one."""
    llama.reset()
    llama.eval(tokens)
    logprob_TV = log_softmax(np.array(llama.scores[: len(tokens)]))
    top_TK = np.argsort(-logprob_TV, axis=-1, kind="stable")[:, :TOP]
    values_TK = np.take_along_axis(logprob_TV, top_TK, -1)
    next_T = [
        round(float(row[token]), 4) for row, token in zip(logprob_TV, tokens[1:], strict=False)
    ]
    return {
        "tokens": list(tokens),
        "top": top_TK.tolist(),
        "logprobs": np.round(values_TK, 4).tolist(),
        "next": next_T,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the published GGUF file")
    parser.add_argument("exact", type=Path, help="the same weights in F32")
    parser.add_argument("output", type=Path, help="the JSON file to write")
    options = parser.parse_args(arguments)
    import llama_cpp

    llama = llama_cpp.Llama(
        str(options.exact), n_ctx=512, logits_all=True, type_k=0, type_v=0, verbose=False
    )

    def encode(text: str, bos: bool, special: bool = False) -> list[int]:
        return llama.tokenize(text.encode(), add_bos=bos, special=special)

    def answer(prompt: str) -> list[int]:
        tokens = encode(prompt, bos=True)
        for _ in range(NEW_TOKENS):
            llama.reset()
            llama.eval(tokens)
            tokens.append(int(np.argmax(llama.scores[len(tokens) - 1])))
        return tokens

    result = {
        "sha256": hashlib.sha256(options.model.read_bytes()).hexdigest(),
        "llama_cpp_python": llama_cpp.__version__,
        "chat": encode(CHAT, bos=False, special=True),
        "strings": [encode(text, bos=False) for text in varied_texts()],
        "read": [read_text(llama, encode(text, bos=True)) for text in READ],
        "continued": [read_text(llama, answer(prompt)) for prompt in CONTINUED],
    }
    lines = (
        f"{json.dumps(name)}: " + (
            "[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in value) + "]"
            if isinstance(value, list) else json.dumps(value)
        )
        for name, value in result.items()
    )  # fmt: skip
    options.output.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
