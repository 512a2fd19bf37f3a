"""KL divergence of each weight format from float32 on a trained model, for BENCHMARKS.md.

One decision: the text is sampled from the model itself at temperature 1, so that every model is
measured on text from its own distribution.

    python scripts/benchmarks/format_divergence.py --model demo:llama
    python scripts/benchmarks/format_divergence.py --model FILE.gguf --formats stored
"""

import argparse
import dataclasses

import jaxllm
from jaxllm.evaluate.likelihood.data import Loader, loader

FORMATS = "int8,int8-g64,int4-g128,int4-g64,int4-g32-zp"


def sample_documents(lm: jaxllm.LM, rows: int, tokens: int) -> Loader:
    """Return documents of `tokens` tokens, sampled from the model."""
    prompt = lm.encode("")
    completions = lm.generate(
        [prompt] * rows,
        do_sample=True,
        temperature=1.0,
        seed=list(range(rows)),
        max_new_tokens=tokens - len(prompt),
        eos_token_id=[],
    )
    return loader([prompt + done.tokens for done in completions], window=tokens, batch=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo:llama")
    parser.add_argument("--rows", type=int, default=16, help="number of documents")
    parser.add_argument("--formats", default=FORMATS, help="stored: as in the file")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per document")
    options = parser.parse_args()
    exact = jaxllm.load(options.model, dtype="float32")
    text = sample_documents(exact, options.rows, options.tokens)
    print("| weights | inputs | mean KL | p99 | max | same top-1 | perplexity ratio |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in options.formats.split(","):
        quantize = None if name == "stored" else name
        lm = jaxllm.load(options.model, dtype="float32", quantize=quantize)
        for int8 in (False, True):
            precision = dataclasses.replace(lm.model.precision, int8_inputs=int8)
            model = jaxllm.build(lm.config, precision)
            result = jaxllm.divergence(exact.model, exact.params, model, lm.params, text)
            inputs = "int8" if int8 else "exact"
            kl, ratio = result.kl, result.perplexity_ratio
            print(
                f"| {name} | {inputs} | {kl.mean:.2e} ± {kl.error:.0e} | {result.kl_p99:.2e}"
                f" | {result.kl_max:.2e} | {result.same_top.mean:.2%}"
                f" | {ratio.mean:.5f} ± {ratio.error:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
