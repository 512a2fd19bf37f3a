"""Trains the two small models in jaxllm/demo on stories from scripts/demo_models/story_grammar.py.

One decision: the models are trained by the loop of jaxllm.train, as anybody's are. What is here is
what is theirs alone: their shapes, the numbers they start from, and the recipe, two runs of which
the first teaches to copy a name and the second to tell a story. An interrupted run goes on where it
was when the command is given again.

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
from jaxllm.train.losses import log_likelihoods
from jaxllm.train.objective import LossOutput, forward
from jaxllm.train.partition import TrainedParams, partition
from jaxllm.train.step import Setup, eval_step
from jaxllm.weights.paths import Params, first_match, flatten, map_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
from scripts.demo_models import demo_data
from scripts.demo_models.demo_data import GLIMPSES, PACKED, STORIES, Phase, Told
from scripts.demo_models.demo_files import save
from scripts.demo_models.story_consistency import continued, openings, rate
from scripts.demo_models.story_grammar import stories

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
# Which optimizer trains what, by path: matrices inside the blocks, gates of a memory (which these
# models have none of, those of scripts/demo_models/train_long.py do), and everything else.
OPTIMIZERS = (
    (r"(layers|h)\.\d+\..*(proj|attn|fc)\.weight", "muon"),
    (r".*\.memory_gate", "adam"),
    (r".*", "adamw"),
)
HELD_OUT, TOKENIZED = 256, 4000  # stories to measure on, stories the tokenizer is trained on
MEASURED = 256  # openings that a finished model continues
HELD_OUT_SEED = 1_000_000_007
README = """# A demo model of the {arch} kind

Tells short stories. Trained from scratch on the output of scripts/demo_models/story_grammar.py.

| | |
|---|---|
{facts}
"""

# (regex over paths, (mean, standard deviation)); what writes into the residual stream starts small.
# The table starts large, so that what two names have in common does not hide which is which.
STARTS: tuple[tuple[str, tuple[float, float]], ...] = (
    (r".*bias", (0.0, 0.0)),
    (r".*(norm|layernorm|ln_\w)\.weight", (1.0, 0.0)),
    (r"embed_tokens\.weight|wte\.weight", (0.0, 0.1)),
    (r".*(o_proj|down_proj|c_proj)\.weight", (0.0, 0.01)),
    (r".*", (0.0, 0.02)),
)
# Mimetic starts (Trockman and Kolter 2023, arXiv 2305.09828): from this layer on a head's output
# begins as a copy of what it looks at, and from this one on it looks at what is like the query.
# From small random matrices copying did not form in a million tokens.
COPIES_FROM, COPY = 1, 0.3
SEEKS_FROM, SEEK = 2, 0.3


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Cross-entropy in which each label has a weight: `extra_inputs`, float32 `[V]`."""

    def __call__(
        self, model: nn.Module, params: Params, extra_inputs: Any, rows: Rows, key: jax.Array
    ) -> LossOutput:
        label_BT = rows.label_BT
        weight_BT = jnp.where(label_BT >= 0, extra_inputs[jnp.maximum(label_BT, 0)], 0.0)
        found_BT = log_likelihoods(forward(model, params, rows).logits, label_BT)
        return LossOutput(-(weight_BT * found_BT).sum(), weight_BT.sum(), {})


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for tables, norms and biases, Adam
    at a high rate for gates, which at that of the rest would not leave where they begin.

    Gradients are clipped; rates warm up in `warm` steps and go down along a cosine to `floor`
    times their peaks.
    """

    steps: int
    warm: int
    floor: float

    def build(self) -> optax.GradientTransformation:
        def rate(peak: float) -> optax.Schedule:
            total = max(2, self.steps)
            warm = min(self.warm, total - 1)
            return optax.warmup_cosine_decay_schedule(0.0, peak, warm, total, peak * self.floor)

        def labels(trained: TrainedParams) -> dict[str, str | None]:
            return {path: first_match(OPTIMIZERS, path) for path in trained}

        methods = {
            "muon": optax.contrib.muon(rate(MUON_RATE), weight_decay=0.1, consistent_rms=None),
            "adam": optax.adam(rate(GATE_RATE), b1=0.9, b2=0.98),
            "adamw": optax.adamw(rate(ADAM_RATE), b1=0.9, b2=0.98),
        }
        return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(methods, labels))


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One run of the loop, of the steps and rates that `Mixed` has.

    cast: how much a name or a pronoun counts, beside 1 for other tokens.
    """

    phases: tuple[Phase, ...]
    cast: float
    warm: int
    floor: float


def lessons(steps: int) -> tuple[Lesson, ...]:
    """First to copy names, then to tell stories for so many steps, and a sixth of them packed."""
    return (
        Lesson((GLIMPSES,), cast=3.0, warm=40, floor=1.0),
        Lesson(
            (
                dataclasses.replace(STORIES, steps=steps),
                dataclasses.replace(PACKED, steps=max(1, steps * 8 // 45)),
            ),
            cast=1.0,
            warm=20,
            floor=1 / 30,
        ),
    )


@partial(jax.jit, static_argnums=0)
def init_params(model: nn.Module, key: jax.Array) -> Params:
    """Parameters to start from, drawn by the rules of `STARTS`, attention's by `_copying`."""

    def draw(path: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        mean, deviation = first_match(STARTS, path) or (0.0, 0.0)
        return mean + deviation * jax.random.normal(keys[path], shape.shape, shape.dtype)

    shapes = jaxllm.param_shapes(model)
    paths = [path for path, _ in flatten(shapes)]
    keys = dict(zip(paths, jax.random.split(key, len(paths)), strict=True))
    params, own = map_leaves(draw, shapes), jax.random.fold_in(key, 1)
    return map_leaves(partial(_copying, own, model.config.hidden_size), params)


def _copying(key: jax.Array, D: int, path: str, weight_OI: jax.Array) -> jax.Array:
    """The weight, or what it is in a head that copies: o = v transposed, k = q, orthonormal rows.

    For heads that cover the model's width and do not share keys, as the demo's are.
    """
    found = re.fullmatch(r"(?:layers|h)\.(\d+)\.(?:self_attn|attn)\.(\w+)\.weight", path)
    if not found:
        return weight_OI
    layer, name = int(found[1]), found[2]
    q_or_k, v = (
        jnp.linalg.qr(jax.random.normal(jax.random.fold_in(key, 2 * layer + which), (D, D)))[0]
        for which in (0, 1)
    )
    if name == "c_attn":  # queries, keys and values, one below the other
        parts = zip(("q_proj", "k_proj", "v_proj"), jnp.split(weight_OI, 3), strict=True)
        rename = partial(path.replace, "c_attn")
        return jnp.concatenate([_copying(key, D, rename(part), w) for part, w in parts])
    if name in ("q_proj", "k_proj") and layer >= SEEKS_FROM:
        return math.sqrt(SEEK) * q_or_k
    if name == "v_proj" and layer >= COPIES_FROM:
        return v
    if name in ("o_proj", "c_proj") and layer >= COPIES_FROM:
        return COPY * v.T
    return weight_OI


def learn(
    model: nn.Module,
    params: Params,
    tokenizer: Tokenizer,
    lesson: Lesson,
    seed: int,
    directory: Path | None = None,
) -> Params:
    """Run a lesson. directory: where its state is kept, from which the same goes on."""
    data = Told(tokenizer, lesson.phases, seed)
    weight_V = np.ones(model.config.vocab_size, np.float32)
    weight_V[demo_data.cast_ids(tokenizer)] = lesson.cast
    given = jnp.asarray(weight_V)
    setup = Setup(model, Weighted(), Mixed(len(data), lesson.warm, lesson.floor))
    plan = TrainPlan(steps=len(data), seed=seed)
    return train(params, data, setup, plan, extra_inputs=given, directory=directory).params


def perplexity(model: nn.Module, params: Params, held_out: list[Rows]) -> float:
    """exp(mean negative log-likelihood) of the stories in padded rows, in float32."""
    trained, rest = partition(params)
    setup = Setup(model, Weighted(), Mixed(1, 0, 1.0))
    given = jnp.ones(model.config.vocab_size)
    parts = [eval_step(trained, rest, given, r, jax.random.key(0), setup=setup) for r in held_out]
    return math.exp(sum(float(p.total) for p in parts) / sum(float(p.weight) for p in parts))


def held_out_rows(tokenizer: Tokenizer) -> list[Rows]:
    """Stories that nobody is trained on, eight rows a batch."""
    texts = list(stories(HELD_OUT, HELD_OUT_SEED))
    rows = demo_data.pad(demo_data.encode(tokenizer, texts), POSITIONS)
    return [demo_data.rows_of(part) for part in np.split(rows, range(8, len(rows), 8))]


def make_model(arch: str, out: Path, steps: int, seed: int) -> None:
    """Train one architecture, measure it as it will be saved, and save it to `out / arch`."""
    model = jaxllm.build(CONFIGS[arch])
    tokenizer = demo_data.train_tokenizer(stories(TOKENIZED, seed), VOCAB_SIZE)
    work = out / f".{arch}.training"
    params, seconds = init_params(model, jax.random.key(seed)), -time.process_time()
    for number, lesson in enumerate(lessons(steps)):
        params = learn(model, params, tokenizer, lesson, seed + number, work / str(number))
    seconds += time.process_time()
    finish(arch, params, tokenizer, out, steps, seed, seconds)
    shutil.rmtree(work)


def finish(
    arch: str,
    params: Params,
    tokenizer: Tokenizer,
    out: Path,
    steps: int,
    seed: int,
    seconds: float,
) -> None:
    """Measure a trained model as it will be saved, and save it to `out / arch`."""
    half = _half(params)
    measured = perplexity(jaxllm.build(CONFIGS[arch]), half, held_out_rows(tokenizer))
    phases = [phase for lesson in lessons(steps) for phase in lesson.phases]
    each = ", ".join(f"{p.steps:,} of {p.rows} x {p.width}" for p in phases)
    places = sum(p.steps * p.rows * p.width for p in phases)
    facts = {
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(half)):,}",
        "command": f"`python scripts/demo_models/train_demo.py --arch {arch}"
        f" --seed {seed} --steps {steps}`",
        "steps": f"{each} tokens, {places / 1e6:.1f} million in all",
        "held-out perplexity": f"{measured:.3f} a token, on {HELD_OUT} stories",
        "training time": f"{seconds / 60:.1f} minutes of one processor core",
    }
    save(out / arch, CONFIGS[arch], half, tokenizer, "")
    told = continued(jaxllm.load(out / arch), openings(MEASURED), 64)
    facts["names and pronouns kept"] = (
        f"in {100 * rate(told)[0]:.1f}% of {MEASURED} stories, greedily"
        " (scripts/demo_models/story_consistency.py)"
    )
    readme = README.format(arch=arch, facts=_table(facts))
    (out / arch / "README.md").write_text(readme, encoding="utf-8")
    print(f"{out / arch}: held-out perplexity {measured:.3f}, {seconds / 60:.1f} minutes")


def _half(params: Params) -> Params:
    return jaxllm.cast(params, jaxllm.Precision.uniform("float16"))


def _table(facts: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the demo models on generated stories; minutes on two CPU cores.",
        epilog="example: python scripts/demo_models/train_demo.py --arch llama --out jaxllm/demo",
    )
    parser.add_argument("--arch", choices=(*CONFIGS, "both"), default="both")
    parser.add_argument("--out", type=Path, default=Path("jaxllm/demo"), help="parent directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STORIES.steps, help="of whole stories")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    for arch in CONFIGS if options.arch == "both" else (options.arch,):
        make_model(arch, options.out, options.steps, options.seed)


if __name__ == "__main__":
    main()
