"""Trains the two small models in jaxllm/demo on stories from scripts/story_grammar.py.

One decision: a model is trained with the code that later runs it. `jaxllm.forward` under
`jax.value_and_grad` is all there is to it; nothing here knows what a layer is.

    python scripts/train_demo.py --arch llama --out jaxllm/demo --seed 0
"""

import argparse
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from demo_data import PAD_ID, encode, pack, pad, train_tokenizer
from demo_files import save
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from story_grammar import stories
from tokenizers import Tokenizer

import jaxllm
from jaxllm.weights.paths import Params, first_match, flatten, map_leaves

POSITIONS = 512
VOCAB_SIZE = 1536
CONFIGS: dict[str, jaxllm.ModelConfig] = {
    "llama": jaxllm.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="silu",
        max_position_embeddings=POSITIONS,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope=jaxllm.Rope(rope_type="default", rope_theta=10000.0),
    ),
    "gpt2": jaxllm.GPT2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        hidden_act="gelu_new",
        max_position_embeddings=POSITIONS,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}
STEPS = 1600
BATCH = 2
MUON_RATE, ADAM_RATE = 2e-2, 3e-3
# Which optimizer trains what, by path: matrices inside the blocks, and everything else.
OPTIMIZERS = ((r"(layers|h)\.\d+\..*(proj|attn|fc)\.weight", "muon"), (r".*", "adamw"))
HELD_OUT, TOKENIZED = 256, 4000  # stories to measure on, stories the tokenizer is trained on
STORIES_A_ROW = 3  # that a packed row uses up at most
README = """# A demo model of the {arch} kind

Tells short stories. Trained from scratch on the output of scripts/story_grammar.py.

| | |
|---|---|
{facts}
"""

# (regex over paths, (mean, standard deviation)); what writes into the residual stream starts small.
STARTS: tuple[tuple[str, tuple[float, float]], ...] = (
    (r".*bias", (0.0, 0.0)),
    (r".*(norm|layernorm|ln_\w)\.weight", (1.0, 0.0)),
    (r".*(o_proj|down_proj|c_proj)\.weight", (0.0, 0.01)),
    (r".*", (0.0, 0.02)),
)


@partial(jax.jit, static_argnums=0)
def init_params(model: nn.Module, key: jax.Array) -> Params:
    """Parameters to start from, drawn by the rules of `STARTS`."""

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean, deviation = first_match(STARTS, path) or (0.0, 0.0)
        return mean + deviation * jax.random.normal(keys[path], shape.shape, shape.dtype)

    shapes = jaxllm.param_shapes(model)
    paths = [path for path, _ in flatten(shapes)]
    keys = dict(zip(paths, jax.random.split(key, len(paths)), strict=True))
    return map_leaves(draw, shapes)


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for tables, norms and biases.

    Gradients are clipped; rates warm up over a twentieth of the steps and go down along a cosine.
    """

    def rate(peak: float) -> optax.Schedule:
        warm, total = max(1, steps // 20), max(2, steps)
        return optax.warmup_cosine_decay_schedule(0.0, peak, warm, total, peak / 30)

    def labels(params: Params) -> Params:
        return map_leaves(lambda path, _: first_match(OPTIMIZERS, path), params)

    methods = {
        "muon": optax.contrib.muon(rate(MUON_RATE), weight_decay=0.1, consistent_rms=None),
        "adamw": optax.adamw(rate(ADAM_RATE), b1=0.9, b2=0.98),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(methods, labels))


def sum_loss(params: Params, model: nn.Module, token_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of every next token that is no padding: (sum in nats, how many)."""
    logits_BTV = jaxllm.forward(model, params, None, token_BT[:, :-1]).logits
    target_BT = token_BT[:, 1:]
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, target_BT)
    real_BT = target_BT != PAD_ID
    return jnp.where(real_BT, loss_BT, 0.0).sum(), real_BT.sum()


@partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(0, 1))
def train_step(
    params: Params,
    state: Any,
    token_BT: jax.Array,
    *,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
) -> tuple[Params, Any, jax.Array]:
    """One step of the optimizer: (params, state, mean loss in nats)."""

    def mean_loss(params: Params) -> jax.Array:
        total, count = sum_loss(params, model, token_BT)
        return total / count.astype(jnp.float32)

    loss, gradients = jax.value_and_grad(mean_loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(model: nn.Module, rows: np.ndarray, seed: int) -> Params:
    """Train from scratch, `BATCH` rows a step; a bar on stderr tells how it goes."""
    steps = len(rows) // BATCH
    params = init_params(model, jax.random.key(seed))
    optimizer = make_optimizer(steps)
    state = optimizer.init(params)
    columns = ("{task.description}", BarColumn(), "{task.fields[note]}", TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(model.config.model_type, total=steps, note="compiling")
        began = time.perf_counter()
        for step in range(steps):
            token_BT = jnp.asarray(rows[step * BATCH : (step + 1) * BATCH])
            params, state, loss = train_step(
                params, state, token_BT, model=model, optimizer=optimizer
            )
            if step % 10 == 0 or step + 1 == steps:
                speed = (step + 1) * BATCH * POSITIONS / (time.perf_counter() - began)
                note = f"{step + 1}/{steps} loss {loss:.3f} {speed:,.0f} tokens/s"
                progress.update(bar, completed=step + 1, note=note)
    return params


def perplexity(model: nn.Module, params: Params, rows: np.ndarray) -> float:
    """exp(mean negative log-likelihood) of the stories in padded rows, in float32."""
    measure = jax.jit(sum_loss, static_argnums=1)
    parts = np.split(rows, range(BATCH * 4, len(rows), BATCH * 4))
    sums = [measure(params, model, jnp.asarray(part)) for part in parts]
    total, count = (float(sum(column)) for column in zip(*sums, strict=True))
    return math.exp(total / count)


def make_data(steps: int, seed: int) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """(tokenizer, packed rows for `steps` steps, no story twice; padded rows of other stories)."""
    count = max(TOKENIZED, steps * BATCH * STORIES_A_ROW)
    texts = list(stories(HELD_OUT + count, seed))
    tokenizer = train_tokenizer(texts[HELD_OUT : HELD_OUT + TOKENIZED], VOCAB_SIZE)
    held_out = pad(encode(tokenizer, texts[:HELD_OUT]), POSITIONS)
    rows = pack(encode(tokenizer, texts[HELD_OUT:]), POSITIONS + 1)
    return tokenizer, rows[: steps * BATCH], held_out


def make_model(arch: str, out: Path, steps: int, seed: int) -> None:
    """Train one architecture, measure it as it will be saved, and save it to `out / arch`."""
    config = CONFIGS[arch]
    model = jaxllm.build(config)
    tokenizer, rows, held_out = make_data(steps, seed)
    began = time.perf_counter()
    params = train(model, rows, seed)
    minutes = (time.perf_counter() - began) / 60
    half = jaxllm.cast(params, jaxllm.Precision.uniform("float16"))
    measured = perplexity(model, half, held_out)
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(half)):,}",
        "command": f"`python scripts/train_demo.py --arch {arch} --seed {seed} --steps {steps}`",
        "steps": f"{steps:,} of {BATCH} x {POSITIONS} tokens",
        "held-out perplexity": f"{measured:.3f} a token, on {HELD_OUT} stories",
        "training time": f"{minutes:.1f} minutes on {os.cpu_count()} CPU cores",
    }
    save(out / arch, config, half, tokenizer, README.format(arch=arch, facts=_table(facts)))
    print(f"{out / arch}: held-out perplexity {measured:.3f}, {minutes:.1f} minutes")


def _table(facts: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo models on generated stories; minutes on two CPU cores.",
        epilog="example: python scripts/train_demo.py --arch llama --out jaxllm/demo --seed 0",
    )
    parser.add_argument("--arch", choices=(*CONFIGS, "both"), default="both")
    parser.add_argument("--out", type=Path, default=Path("jaxllm/demo"), help="parent directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    for arch in CONFIGS if options.arch == "both" else (options.arch,):
        make_model(arch, options.out, options.steps, options.seed)


if __name__ == "__main__":
    main()
