"""Training of demo:llama and demo:gpt2 on stories from scripts/demo_models/story_grammar.py.

One decision: the models use the training loop of jaxllm.train, like any other model. This file has
only their shapes, initial weights and recipe: a first run that trains to copy names, and a second
one that trains on stories. Repeat the command to resume an interrupted run.

    python scripts/demo_models/train_demo.py --arch llama --out jaxllm/demo --seed 0
"""

import argparse
import dataclasses
import math
import re
import shutil
import sys
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
from tokenizers import Tokenizer

import jaxllm
from jaxllm.train.data.rows import Rows
from jaxllm.train.loop import TrainPlan, train
from jaxllm.train.objective import LossOutput, forward, log_likelihoods
from jaxllm.train.partition import TrainedParams, partition
from jaxllm.train.step import Setup, eval_step
from jaxllm.weights.paths import Params, first_match, flatten, map_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models import demo_data
from scripts.demo_models.demo_data import GLIMPSES, PACKED, STORIES, Phase, StoryData
from scripts.demo_models.demo_files import save_hf
from scripts.demo_models.story_consistency import draw_openings, generate_stories, rate_stories
from scripts.demo_models.story_grammar import draw_stories

POSITIONS = 512
VOCAB_SIZE = 1536
CONFIGS: dict[str, jaxllm.ModelConfig] = {
    "llama": jaxllm.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
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
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        hidden_act="gelu_new",
        max_position_embeddings=POSITIONS,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}
MUON_RATE, ADAM_RATE, GATE_RATE = 2e-2, 3e-3, 3e-2
# The optimizer by parameter path: matrices inside the blocks; memory gates (only models of
# scripts/demo_models/train_long.py have them); everything else.
OPTIMIZERS = (
    (r"(layers|h)\.\d+\..*(proj|attn|fc)\.weight", "muon"),
    (r".*\.memory_gate", "adam"),
    (r".*", "adamw"),
)
HELD_OUT, TOKENIZED = 256, 4000  # stories for the perplexity, and for training the tokenizer
MEASURED = 256  # openings that a trained model continues
HELD_OUT_SEED = 1_000_000_007
README = """# A demo model of the {arch} kind

It generates short stories. It was trained from scratch on stories of
scripts/demo_models/story_grammar.py.

| | |
|---|---|
{facts}
"""

# (regex over paths, (mean, standard deviation)). Projections into the residual stream start small.
# Embeddings start large, so that names remain distinguishable.
INITIALIZERS: tuple[tuple[str, tuple[float, float]], ...] = (
    (r".*bias", (0.0, 0.0)),
    (r".*(norm|layernorm|ln_\w)\.weight", (1.0, 0.0)),
    (r"embed_tokens\.weight|wte\.weight", (0.0, 0.1)),
    (r".*(o_proj|down_proj|c_proj)\.weight", (0.0, 0.01)),
    (r".*", (0.0, 0.02)),
)
# Mimetic initialization (Trockman and Kolter 2023, arXiv 2305.09828). From layer COPY_LAYER on,
# heads initially output a copy of the attended input; from MATCH_LAYER on, they attend to inputs
# similar to the query. With small random matrices, copying did not form in a million tokens.
COPY_LAYER, COPY_SCALE = 1, 0.3
MATCH_LAYER, MATCH_SCALE = 2, 0.3


@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """Cross-entropy with a weight per label: `extra_inputs`, float32 `[V]`."""

    def __call__(
        self, model: nn.Module, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        label_BT = rows.label_BT
        weight_BT = jnp.where(label_BT >= 0, extra_inputs[jnp.maximum(label_BT, 0)], 0.0)
        logprob_BT = log_likelihoods(forward(model, params, rows).logits, label_BT)
        return LossOutput(-(weight_BT * logprob_BT).sum(), weight_BT.sum(), {})


@dataclasses.dataclass(frozen=True)
class MixedOptimizer:
    """Muon (Jordan et al. 2024) for matrices of blocks, AdamW for the rest, Adam for memory gates.

    Gates have a higher learning rate; otherwise they would hardly change. Gradients are clipped.
    Rates warm up in `warmup` steps, then follow a cosine down to `floor` times their peaks.
    """

    steps: int
    warmup: int
    floor: float

    def build(self) -> optax.GradientTransformation:
        def rate(peak: float) -> optax.Schedule:
            total = max(2, self.steps)
            warmup = min(self.warmup, total - 1)
            return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total, peak * self.floor)

        def labels(trained: TrainedParams) -> dict[str, str | None]:
            return {path: first_match(OPTIMIZERS, path) for path in trained}

        methods = {
            "muon": optax.contrib.muon(rate(MUON_RATE), weight_decay=0.1, consistent_rms=None),
            "adam": optax.adam(rate(GATE_RATE), b1=0.9, b2=0.98),
            "adamw": optax.adamw(rate(ADAM_RATE), b1=0.9, b2=0.98),
        }
        return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(methods, labels))


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """One run of the training loop."""

    phases: tuple[Phase, ...]
    cast_weight: float
    """Loss weight of names and pronouns; other tokens have 1."""
    warmup: int
    floor: float


def make_runs(steps: int) -> tuple[TrainRun, ...]:
    """Return the run that trains to copy names, and the one with `steps` steps of stories.

    The latter ends with packed rows, for about a sixth as many steps.
    """
    return (
        TrainRun((GLIMPSES,), cast_weight=3.0, warmup=40, floor=1.0),
        TrainRun(
            (
                dataclasses.replace(STORIES, steps=steps),
                dataclasses.replace(PACKED, steps=max(1, steps * 8 // 45)),
            ),
            cast_weight=1.0,
            warmup=20,
            floor=1 / 30,
        ),
    )


@partial(jax.jit, static_argnums=0)
def init_params(model: nn.Module, key: jax.Array) -> Params:
    """Draw initial parameters by `INITIALIZERS`, attention's by `_init_attention`."""

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean, deviation = first_match(INITIALIZERS, path) or (0.0, 0.0)
        return mean + deviation * jax.random.normal(keys[path], shape.shape, shape.dtype)

    shapes = jaxllm.param_shapes(model)
    paths = [path for path, _ in flatten(shapes)]
    keys = dict(zip(paths, jax.random.split(key, len(paths)), strict=True))
    params, attention_key = map_leaves(draw, shapes), jax.random.fold_in(key, 1)
    return map_leaves(partial(_init_attention, attention_key, model.config.hidden_size), params)


def _init_attention(key: jax.Array, D: int, path: str, weight_OI: jax.Array) -> jax.Array:
    """Return the weight, or its mimetic initialization: o = v transposed, k = q, orthonormal rows.

    It requires heads that span the model's width and do not share keys, as in the demo models.
    """
    match = re.fullmatch(r"(?:layers|h)\.(\d+)\.(?:self_attn|attn)\.(\w+)\.weight", path)
    if not match:
        return weight_OI
    layer, name = int(match[1]), match[2]
    q_or_k, v = (
        jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, 2 * layer + i), (D, D)))[0]
        for i in (0, 1)
    )
    if name == "c_attn":  # queries, keys and values, stacked by rows
        parts = zip(("q_proj", "k_proj", "v_proj"), jnp.split(weight_OI, 3), strict=True)
        rename = partial(path.replace, "c_attn")
        return jnp.concatenate([_init_attention(key, D, rename(part), w) for part, w in parts])
    if name in ("q_proj", "k_proj") and layer >= MATCH_LAYER:
        return math.sqrt(MATCH_SCALE) * q_or_k
    if name == "v_proj" and layer >= COPY_LAYER:
        return v
    if name in ("o_proj", "c_proj") and layer >= COPY_LAYER:
        return COPY_SCALE * v.T
    return weight_OI


def execute_run(
    model: nn.Module,
    params: Params,
    tokenizer: Tokenizer,
    run: TrainRun,
    seed: int,
    directory: Path | None = None,
) -> Params:
    """Execute a training run; return the parameters.

    Args:
        directory: where the training state is saved, to resume from.
    """
    data = StoryData(tokenizer, run.phases, seed)
    weight_V = np.ones(model.config.vocab_size, np.float32)
    weight_V[demo_data.find_cast_ids(tokenizer)] = run.cast_weight
    optimizer = MixedOptimizer(len(data), run.warmup, run.floor)
    setup = Setup(model, WeightedLoss(), optimizer)
    plan, inputs = TrainPlan(steps=len(data), seed=seed), jnp.asarray(weight_V)
    return train(params, data, setup, plan, extra_inputs=inputs, directory=directory).params


def measure_perplexity(model: nn.Module, params: Params, held_out: list[Rows]) -> float:
    """Return exp(mean negative log-likelihood) of stories in padded rows, in float32."""
    trained, frozen = partition(params)
    setup = Setup(model, WeightedLoss(), MixedOptimizer(1, 0, 1.0))
    weight_V, key = jnp.ones(model.config.vocab_size), jax.random.key(0)
    parts = [eval_step(trained, frozen, weight_V, r, key, setup=setup) for r in held_out]
    return math.exp(sum(float(p.total) for p in parts) / sum(float(p.weight) for p in parts))


def make_held_out_rows(tokenizer: Tokenizer) -> list[Rows]:
    """Return held-out stories in batches of eight rows."""
    texts = list(draw_stories(HELD_OUT, HELD_OUT_SEED))
    rows = demo_data.pad(demo_data.encode(tokenizer, texts), POSITIONS)
    return [demo_data.make_rows(part) for part in np.split(rows, range(8, len(rows), 8))]


def make_model(arch: str, out: Path, steps: int, seed: int) -> None:
    """Train one architecture, then measure it in float16 and save it to `out / arch`."""
    model = jaxllm.build(CONFIGS[arch])
    tokenizer = demo_data.train_tokenizer(draw_stories(TOKENIZED, seed), VOCAB_SIZE)
    work = out / f".{arch}.training"
    params, seconds = init_params(model, jax.random.key(seed)), -time.process_time()
    for number, run in enumerate(make_runs(steps)):
        params = execute_run(model, params, tokenizer, run, seed + number, work / str(number))
    seconds += time.process_time()
    save_model(arch, params, tokenizer, out, steps, seed, seconds)
    shutil.rmtree(work)


def save_model(
    arch: str,
    params: Params,
    tokenizer: Tokenizer,
    out: Path,
    steps: int,
    seed: int,
    seconds: float,
) -> None:
    """Measure a trained model in float16 and save it to `out / arch` with a README."""
    half = jaxllm.cast(params, jaxllm.Precision.uniform("float16"))
    perplexity = measure_perplexity(
        jaxllm.build(CONFIGS[arch]), half, make_held_out_rows(tokenizer)
    )
    phases = [phase for run in make_runs(steps) for phase in run.phases]
    phase_texts = ", ".join(f"{p.steps:,} of {p.rows} x {p.width}" for p in phases)
    tokens = sum(p.steps * p.rows * p.width for p in phases)
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(half)):,}",
        "command": f"`python scripts/demo_models/train_demo.py --arch {arch}"
        f" --seed {seed} --steps {steps}`",
        "steps": f"{phase_texts} tokens, {tokens / 1e6:.1f} million in total",
        "held-out perplexity": f"{perplexity:.3f} per token, on {HELD_OUT} stories",
        "training time": f"{seconds / 60:.1f} minutes of one processor core",
    }
    save_hf(out / arch, CONFIGS[arch], half, tokenizer, "")
    stories = generate_stories(jaxllm.load(out / arch), draw_openings(MEASURED), 64)
    facts["consistent names and pronouns"] = (
        f"in {100 * rate_stories(stories)[0]:.1f}% of {MEASURED} stories, greedy decoding"
        " (scripts/demo_models/story_consistency.py)"
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    readme = README.format(arch=arch, facts=table)
    (out / arch / "README.md").write_text(readme, encoding="utf-8")
    print(f"{out / arch}: held-out perplexity {perplexity:.3f}, {seconds / 60:.1f} minutes")


def main() -> None:
    """Train the models selected on the command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo models on generated stories; minutes on two CPU cores.",
        epilog="example: python scripts/demo_models/train_demo.py --arch llama --out jaxllm/demo",
    )
    parser.add_argument("--arch", choices=(*CONFIGS, "both"), default="both")
    parser.add_argument("--out", type=Path, default=Path("jaxllm/demo"), help="parent directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STORIES.steps, help="steps of stories")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    for arch in CONFIGS if options.arch == "both" else (options.arch,):
        make_model(arch, options.out, options.steps, options.seed)


if __name__ == "__main__":
    main()
