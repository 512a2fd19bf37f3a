"""`jaxllm info`: facts about a checkpoint."""

from collections import Counter

from jaxllm.cli.console import spinner, write_json, write_rows
from jaxllm.cli.options import AsJson, Model, Strict

EXAMPLE = "Example: jaxllm info ~/models/TinyLlama-1.1B"


def info(model: Model = "demo:llama", as_json: AsJson = False, strict: Strict = False) -> None:
    """Show a checkpoint's architecture, parameters, bytes, cache. Reads no weights."""
    with spinner("starting"):
        import jax

        from jaxllm.cache import init_cache
        from jaxllm.convert.registry import open_checkpoint, stores_tokenizer
        from jaxllm.models import build, param_shapes
        from jaxllm.models.moe import max_read_fraction
        from jaxllm.models.packing import describe_attention
        from jaxllm.ops import native

    opened = open_checkpoint(model, strict=strict)
    config = opened.config
    shapes = jax.tree.leaves(param_shapes(build(config)))
    count = sum(leaf.size for leaf in shapes)
    active = sum(round(leaf.size * max_read_fraction(config, leaf.ndim)) for leaf in shapes)
    size = opened.nbytes
    token = init_cache(config, 1, 1, dtype=opened.precision.cache).tail
    facts = {
        "path": str(opened.directory),
        "form": opened.file_format,
        **config.to_dict(),
        "parameters": count,
        **({} if active == count else {"parameters_per_token": active}),
        "bytes": size,
        "dtype": opened.precision.weights,
        "quantized": opened.precision.quantize,
        "formats": dict(sorted(Counter(opened.formats.values()).items())),
        "recipe": list(opened.recipe),
        "ignored": list(opened.ignored),
        "cache_bytes_per_token": sum(x.nbytes for x in jax.tree.leaves((token.k, token.v))),
        "tokenizer": stores_tokenizer(opened),
        "kernels": native.isa() or "none: on a CPU, decoding quantized or bfloat16 weights is slow",
        "attention": describe_attention(config, opened.precision.cache),
        "instructions": native.INSTRUCTION_SETS.get(str(native.isa())),
    }
    if as_json:
        return write_json(facts)
    width, shown = max(map(len, facts)), dict[str, object]()
    for name, value in facts.items():
        shown[name] = f"{value:,}" if type(value) is int else value
        if isinstance(value, dict):
            shown[name] = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    if isinstance(opened.precision.quantize, tuple):
        shown["quantized"] = f"by {len(opened.precision.quantize)} rules"
    formats = Counter(opened.formats.values())
    shown["formats"] = ", ".join(f"{formats[name]} {name}" for name in sorted(formats))
    shown["ignored"] = ", ".join(opened.ignored)
    shown["recipe"] = f"\n{'':{width}}  ".join(opened.recipe)
    write_rows(shown.items())
