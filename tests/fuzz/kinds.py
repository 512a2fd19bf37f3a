"""Kinds of files to fuzz: how to write valid ones and how to read them."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxllm
from jaxllm.adapters import LoraConfig, init_adapter, write_adapter, write_gguf_adapter
from jaxllm.adapters.multi_lora import with_loaded_adapters
from jaxllm.batch_inference.rows import read_rows
from jaxllm.cache import fork, load_cache, save_cache
from jaxllm.checkpoints.native import Checkpoint, save, with_params
from jaxllm.cli.options import override_precision, read_json_option
from jaxllm.cli.quantize import read_rules
from jaxllm.config.model import ModelConfig
from jaxllm.convert.gguf.writer import write_gguf
from jaxllm.convert.hf import open_hf, write_hf
from jaxllm.convert.registry import open_checkpoint
from jaxllm.evaluate.likelihood.data import Batch, loader, read_documents
from jaxllm.evaluate.likelihood.score import Columns, run_batches
from jaxllm.evaluate.parity.activations import JaxBackend
from jaxllm.evaluate.parity.golden import make, read
from jaxllm.export import runtime
from jaxllm.export.command_line import export
from jaxllm.files import read_json
from jaxllm.generation.options.resolve import resolve_options
from jaxllm.lm import LM
from jaxllm.text.chat import ChatTemplate
from jaxllm.text.formats import TokenizerTree
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.paths import Params, flatten, map_leaves
from jaxllm.weights.precision import Precision
from jaxllm.weights.quantize import resolve_rules
from tests.convert.flax_twin import as_flax
from tests.fuzz.mutate import redigest_cache, redigest_export
from tests.text.conftest import train_byte_level, train_sentencepiece

SIZES = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
    "max_position_embeddings": 64, "norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = jaxllm.Rope(
    rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=32
)
CONFIGS: dict[str, ModelConfig] = {
    "llama": jaxllm.LlamaConfig(**SIZES, hidden_act="silu", rope=ROPE),
    "gpt2": jaxllm.GPT2Config(**SIZES, hidden_act="gelu_new"),
}
GENERATION = {
    "bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.7, "top_k": 5, "do_sample": True,
    "max_new_tokens": 4, "repetition_penalty": 1.1, "bad_words_ids": [[7]],
}  # fmt: skip
TEMPLATE = """{{ bos_token }}{% for m in messages %}[{{ m.role|upper }}] {{ m.content.strip() }}
{% endfor %}{% if add_generation_prompt %}{{ '%s:' % 'assistant' }}{% endif %}"""
MESSAGES = [{"role": "user", "content": "One day"}, {"role": "assistant", "content": "there was"}]
TEXT = "Once upon a time, there was a girl.  She had 12 red balls!\n"


class Kind(NamedTuple):
    """make: writes valid files to a directory. use: reads them. names: the files to mutate.

    redigest: updates digests after a mutation, as an attacker would.
    """

    make: Callable[[Path], object]
    use: Callable[[Path], object]
    names: tuple[str, ...]
    redigest: Callable[[Path], object] | None = None


def _write_lines(directory: Path, name: str, *rows: Any) -> None:
    (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _use_adapter(path: Path) -> None:
    with_loaded_adapters(CONFIGS["llama"], _random("llama")[1], {"x": path})


def _random(name: str) -> tuple[Any, Params]:
    model, rng = jaxllm.build(CONFIGS[name]), np.random.default_rng(0)
    shapes = jaxllm.models.param_shapes(model)
    draw = lambda _, s: jax.device_put(rng.standard_normal(s.shape, np.float32) * 0.1)  # noqa: E731
    return model, map_leaves(draw, shapes)


def _checkpoint(name: str) -> Any:
    _, params = _random(name)
    tensors = {path: LazyTensor.from_array(np.asarray(x)) for path, x in flatten(params)}
    return Checkpoint(Path(), CONFIGS[name], tensors, GENERATION, Precision())


def _make_hf(name: str) -> Callable[[Path], object]:
    return lambda directory: write_hf(directory, _checkpoint(name))


def _make_shards(directory: Path) -> None:
    from safetensors.numpy import load_file, save_file

    _make_hf("gpt2")(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"shard-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(places.values())):
        save_file({n: x for n, x in tensors.items() if places[n] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def _make_flax(directory: Path) -> None:
    _make_hf("gpt2")(directory)
    as_flax(directory, shards=2)


def _make_native(directory: Path) -> None:
    checkpoint = _checkpoint("llama")
    rules = [[r"layers\.0\..*", "int4-g32-zp"], [r"layers\.1\..*", "int8"], [".*", "bf16-packed"]]
    precision = Precision.from_dict(
        {"weights": "bfloat16", "quantize": rules, "overrides": [["norm", {"weights": "float32"}]]}
    )
    params = map_leaves(lambda path, x: precision.cast(path, x), _random("llama")[1])
    save(directory, with_params(checkpoint, params, precision))


def _use_checkpoint(directory: Path) -> None:
    lm: LM = jaxllm.load(directory)
    resolve_options(lm.config, lm.generation, [[1]], {})


def _make_tokenizer(directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(open_checkpoint("demo:llama").directory / name, directory / name)
    (directory / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    (directory / "added_tokens.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def _use_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    for special in (False, True):
        tokenizer.decode(tokenizer.encode(TEXT, parse_special=special), skip_special=special)


def _make_sentencepiece(directory: Path) -> None:
    model = train_sentencepiece([TEXT] * 8, vocab_size=300)
    (directory / "tokenizer.model").write_bytes(model)


def _cache(directory: Path) -> Path:
    return directory / "story.safetensors"


def _make_cache(directory: Path) -> None:
    model, params = _random("llama")
    cache = jaxllm.init_cache(model.config, 1, 8)
    cache = jaxllm.prefill(model, params, cache, np.arange(5)[None]).cache
    save_cache(_cache(directory), fork(cache, 2, capacity=6), model, params)


def _use_cache(directory: Path) -> None:
    cache = load_cache(_cache(directory), *_random("llama"), prefix=[0, 1])
    assert cache.tokens(1)[:2] == [0, 1]


def _numbers(batch: Batch) -> Columns:
    return {"logprob": -np.linspace(0, 9, int(batch.scored_BT.sum()), dtype=np.float32)}


def _use_journal(directory: Path) -> None:
    data = loader([list(range(40))], window=8, stride=4, batch=3)
    columns = run_batches(data, _numbers, models={}, journal=directory / "journal.jsonl")
    expected = [_numbers(batch)["logprob"] for batch in data.batches()]
    assert np.array_equal(columns["logprob"], np.concatenate(expected))


def _make_precision(directory: Path) -> None:
    data = {
        "weights": "bfloat16", "cache": "int8", "quantize": [["lm_head.*", "int8"], [".*", None]],
        "overrides": [[r"layers\.0", {"weights": "float32", "activations": "float16"}]],
    }  # fmt: skip
    (directory / "precision.json").write_text(json.dumps(data))
    (directory / "rules.json").write_text(json.dumps(data["quantize"]))


def _use_precision(directory: Path) -> None:
    table = read_json_option("--precision", directory / "precision.json")
    precision = override_precision(Precision(), table, "--precision")
    resolve_rules(read_rules(directory / "rules.json"))
    hash(precision)
    for path in ("layers.0.mlp.down_proj.weight", "lm_head.weight", "a" * 200):
        precision.param_format(path, (256, 256))
        precision.activation_dtype(path)


def _use_batch(directory: Path) -> None:
    for row in read_rows(directory / "batch.jsonl"):
        json.dumps(row)


def _make_options(directory: Path) -> None:
    options = {
        "max_new_tokens": 5, "seed": 7, "do_sample": True, "temperature": 0.7, "top_k": 5,
        "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [8, 9]], "eos_token_id": [2, 3],
        "stop_strings": ["x"], "suppress_tokens": [5], "logit_bias": {"3": 1.5}, "chunk": 4,
        "min_new_tokens": 1, "presence_penalty": 0.1, "top_logprobs": 2, "pad_token_id": 0,
    }  # fmt: skip
    (directory / "options.json").write_text(json.dumps(options))


def _use_options(directory: Path) -> None:
    options = read_json(directory / "options.json")
    resolve_options(CONFIGS["llama"], {}, [[1, 2]], options)
    resolve_options(CONFIGS["llama"], options, [[1, 2], [3]], {})


HF = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER = (
    "tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip


def _make_adapter(directory: Path) -> None:
    params = _random("llama")[1]
    lora = LoraConfig(
        r=2,
        target_modules=("q_proj", "embed_tokens", "down_proj"),
        rank_pattern={"down_proj": 3},
        alpha_pattern={r"self_attn\.q_proj": 4.5},
        use_dora=True,
    )
    made = init_adapter(CONFIGS["llama"], params, lora, jax.random.key(0))
    write_adapter(directory, made, CONFIGS["llama"], base="somewhere")


def _make_gguf(directory: Path) -> None:
    demo = open_checkpoint("demo:llama").directory
    rules = [["lm_head.weight", "int8-g32-f16"], [r"layers\.0\..*", "int4-g32-f16"]]
    precision = Precision.from_dict({"quantize": rules})
    params = map_leaves(lambda path, x: precision.cast(path, x), _random("llama")[1])
    plain = dataclasses.replace(_checkpoint("llama"), generation={"eos_token_id": [2, 3]})
    checkpoint = with_params(plain, params, precision)
    tokens = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    tree = TokenizerTree({**tokens, "added_tokens": []}, {}, adds_bos=False)
    small = {name: i for name, i in tree.tree["model"]["vocab"].items() if i < 300}
    merges = [m for m in tokens["model"]["merges"] if "".join(m).replace(" ", "") in small]
    tree.tree["model"] = {**tokens["model"], "vocab": small, "merges": merges}
    write_gguf(
        directory / "model.gguf",
        checkpoint,
        "Q8_0",
        tokenizer=tree,
        templates={"default": TEMPLATE},
    )


def _use_gguf(directory: Path) -> None:
    lm: LM = jaxllm.load(directory / "model.gguf")
    if lm.tokenizer is not None:
        lm.tokenizer.decode(lm.tokenizer.encode(TEXT))


def _make_gguf_adapter(directory: Path) -> None:
    lora = LoraConfig(r=2, target_modules=("q_proj", "embed_tokens", "down_proj"))
    made = init_adapter(CONFIGS["llama"], _random("llama")[1], lora, jax.random.key(0))
    write_gguf_adapter(directory / "x.gguf", made, CONFIGS["llama"])


KINDS: dict[str, Kind] = {
    "gguf": Kind(_make_gguf, _use_gguf, ("model.gguf",)),
    "gguf adapter": Kind(_make_gguf_adapter, lambda d: _use_adapter(d / "x.gguf"), ("x.gguf",)),
    "llama": Kind(_make_hf("llama"), _use_checkpoint, (*HF, "config.json")),
    "gpt2 in shards": Kind(
        _make_shards,
        open_hf,
        ("config.json", "model.safetensors.index.json", "shard-0.safetensors"),
    ),
    "flax": Kind(
        _make_flax,
        _use_checkpoint,
        ("flax_model-00001-of-00002.msgpack", "flax_model.msgpack.index.json"),
    ),
    "native": Kind(_make_native, _use_checkpoint, (*HF, "config.json")),
    "tokenizer.json": Kind(_make_tokenizer, _use_tokenizer, TOKENIZER),
    "vocab.json": Kind(
        lambda d: train_byte_level([TEXT], 300).model.save(str(d)),
        _use_tokenizer,
        ("vocab.json", "merges.txt"),
    ),
    "tokenizer.model": Kind(_make_sentencepiece, _use_tokenizer, ("tokenizer.model",)),
    "template": Kind(
        _make_tokenizer,
        lambda d: ChatTemplate.from_directory(d).render(MESSAGES),
        ("chat_template.jinja", "tokenizer_config.json"),
    ),
    "cache": Kind(_make_cache, _use_cache, ("story.safetensors",), redigest_cache),
    "journal": Kind(_use_journal, _use_journal, ("journal.jsonl",)),
    "vectors": Kind(
        lambda d: make(d, JaxBackend("tiny", *_random("llama")), [[5, 7, 9], [1, 2]], new_tokens=2),
        read,
        ("vectors.json", "vectors.safetensors"),
    ),
    "export": Kind(
        lambda d: export(*_random("llama"), d, num_tokens=2, max_tokens=6, step_names=["decode"]),
        runtime.load,
        ("manifest.json", "weights.safetensors", "decode.stablehlo"),
        redigest_export,
    ),
    "documents": Kind(
        lambda d: _write_lines(d, "documents.jsonl", {"text": TEXT}, {"text": "One day", "id": 3}),
        lambda d: read_documents(d / "documents.jsonl"),
        ("documents.jsonl",),
    ),
    "precision, rules": Kind(_make_precision, _use_precision, ("precision.json", "rules.json")),
    "adapter": Kind(
        _make_adapter, _use_adapter, ("adapter_config.json", "adapter_model.safetensors")
    ),
    "options": Kind(_make_options, _use_options, ("options.json",)),
    "batch lines": Kind(
        lambda d: _write_lines(
            d, "batch.jsonl", {"prompt": TEXT, "id": "a", "temperature": 0.5}, {"prompt": [1, 2]},
            "One day",
        ),
        _use_batch,
        ("batch.jsonl",),
    ),
}  # fmt: skip
