"""A generation loop that edits its own context: it culls and repairs cache entries by attention.

Step 0 builds or patches the cache, step 1 generates a token, step 2 scores brightness (the
attention that each token received), step 3 decides what to cull and repair. One decision: only
step 0 returns a cache. Steps 1-3 read it; each iteration compares its bytes and addresses to prove
this.

    python scripts/examples/context_loop.py -p "Once upon a time" --steps 48 --keep 24 --out loop

All inputs and outputs of the steps are written to `OUT/step_0007.safetensors`, with names that
begin with the step's number; the inputs of step 0 are in the previous file. `OUT/brightness.png`
shows the brightness of every token over time.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import track

import jaxllm
from jaxllm import Delta, KVCache, Output, Sampler, cache as surgery, errors
from jaxllm.cli import run_command
from jaxllm.runtime import signals
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.weights.lazy import LazyTensor
from jaxllm.weights.safetensors import open_tensors, write_tensors

EXAMPLE = (
    "Example: python scripts/examples/context_loop.py -p 'One day' --steps 48 --keep 24 --out loop"
)
SPARE = 16  # slots beyond the budget: tokens between two compactions
PICTURE = "brightness.png"
Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of the cache, and how its tokens are scored and repaired."""

    keep: int = 24
    """Maximum number of tokens; 0 for no limit."""
    sinks: int = 2
    """First positions, never culled."""
    recent: int = 8
    """Last positions, never culled."""
    repair: int = 4
    """Positions after the first culled token that are recomputed without it."""
    decay: float = 0.8
    """Decay of the moving average of attention; 0 uses only the newest token's attention."""

    def __post_init__(self) -> None:
        if min(self.keep, self.sinks, self.repair) < 0 or self.recent < 1:
            raise errors.CapacityError(
                "--keep, --sinks and --repair must be at least 0 and --recent 1, got"
                f" {self.keep}, {self.sinks}, {self.repair} and {self.recent}"
            )
        if 0 < self.keep < self.sinks + self.recent:
            raise errors.CapacityError(
                f"--keep {self.keep} is less than --sinks {self.sinks} and --recent {self.recent},"
                " which are never culled"
            )
        if not 0 <= self.decay < 1:
            raise errors.ConfigError(f"--decay must be from 0 to below 1, got {self.decay}")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The positions that the next step 0 culls and repairs."""

    culled: tuple[int, ...] = ()
    repair: tuple[int, int] | None = None
    """`(start, stop)`, or None."""


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The inputs and outputs of each step of an iteration; P are the positions of the text."""

    number: int
    applied: Decision
    """The decision that step 0 applied."""
    cache: KVCache
    """The cache after step 0."""
    token_B: Array
    output: Output
    next_token_B: Array
    before_P: Array
    """Brightness before step 2."""
    share_P: Array
    """Share of this iteration's attention; NaN without a token."""
    brightness_P: Array
    """Moving average of the shares; NaN without a token."""
    decision: Decision

    @property
    def repaired(self) -> Array:
        """Positions whose entries step 0 recomputed."""
        start, stop = self.applied.repair or (0, 0)
        position_S = np.asarray(self.cache.position_BS)[0]
        return np.sort(position_S[(position_S >= start) & (position_S < stop)])


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A cache's SHA-256 (names, dtypes, shapes and every bit) and the addresses of its arrays."""

    sha256: str
    addresses: tuple[int, ...]

    @classmethod
    def compute(cls, cache: KVCache) -> "Fingerprint":
        """Compute a cache's fingerprint.

        Raises:
            CacheMismatchError: if the cache was donated.
        """
        leaves = jax.tree.leaves(cache)
        if any(leaf.is_deleted() for leaf in leaves):
            raise errors.CacheMismatchError("the cache was deleted: a step donated it")
        # An array caches the host copy of its bytes; only a new array reads the device again.
        sha256 = surgery.fingerprint({"cache": jax.tree.map(jnp.copy, cache)})
        return cls(sha256, tuple(leaf.unsafe_buffer_pointer() for leaf in leaves))


def check_unchanged(before: Fingerprint, cache: KVCache, number: int) -> None:
    """Raise CacheMismatchError if the cache's bytes or addresses have changed."""
    after = Fingerprint.compute(cache)
    if after != before:
        part = "bytes" if after.sha256 != before.sha256 else "addresses"
        raise errors.CacheMismatchError(f"iteration {number}: steps 1-3 changed the cache's {part}")


def build(
    model: Any, params: Any, prompt: list[int], steps: int, budget: Budget
) -> tuple[KVCache, Array]:
    """Step 0, first iteration: prefill all prompt tokens but the last, and score their brightness.

    Raises:
        CapacityError: if the prompt and the steps exceed the model's context.
    """
    total, limit = len(prompt) + steps, model.config.context_length
    if total > limit:
        raise errors.CapacityError(
            f"a prompt of {len(prompt)} tokens and {steps} steps exceed the model's context"
            f" of {limit}. Shorten the prompt or --steps"
        )
    slots = min(total, max(len(prompt), budget.keep) + SPARE) if budget.keep else total
    cache = jaxllm.init_cache(model.config, 1, slots, dtype=model.precision.cache)
    brightness_P = np.full(total, np.nan, np.float32)
    if read := prompt[:-1]:
        tokens_BT = np.array([read])
        out = jaxllm.prefill(model, params, cache, tokens_BT, attention_mass=True)
        cache, mass_T = out.cache, np.asarray(out.attention_mass)[0, : len(read)]
        # More queries attend to early tokens, so brightness is the mean over the queries.
        readers_T = np.arange(len(read), 0, -1, dtype=np.float32)
        brightness_P[: len(read)] = mass_T / readers_T * (len(read) / mass_T.sum())
    return cache, brightness_P


def patch(model: Any, params: Any, cache: KVCache, delta: Delta, decision: Decision) -> KVCache:
    """Step 0: cull, compact the cache if it is full, commit the newest token, repair."""
    if decision.culled:
        cache = surgery.keep(cache, ~np.isin(np.asarray(cache.position_BS), decision.culled))
    if int(cache.cursor) == cache.capacity:
        cache = surgery.compact(cache)
    cache = jaxllm.commit(cache, delta)
    if decision.repair:
        cache = jaxllm.recompute(model, params, cache, *decision.repair)
    return cache


def generate_token(
    model: Any, params: Any, cache: KVCache, token_B: Array, sampler: Sampler, key_B: jax.Array
) -> tuple[Output, Array]:
    """Step 1: run the newest token and sample the next one, as `generate` does with this key.

    Raises:
        NonFiniteError: if the logits are not finite.
    """
    out = jaxllm.forward(model, params, cache, token_B[:, None], attention_mass=True)
    logits_BV = out.logits[:, 0]
    if not np.isfinite(logits_BV).all():
        raise errors.NonFiniteError("the model returned NaN or infinite logits")
    return out, np.asarray(_sample(logits_BV, out.delta.position_BS[:, 0] + 1, sampler, key_B))


@jax.jit
def _sample(
    logits_BV: jax.Array, position_B: jax.Array, sampler: Sampler, key_B: jax.Array
) -> jax.Array:
    position_key_B = jax.vmap(jax.random.fold_in)(key_B, position_B)
    return jaxllm.sample(position_key_B, logits_BV, sampler)


def score(before_P: Array, mass_S: Array, position_S: Array, decay: float) -> tuple[Array, Array]:
    """Step 2: return each position's share of this iteration's attention, and its moving average.

    Scores are indexed by position, so that they survive compaction. A token's average begins with
    its first share.
    """
    live_S = position_S >= 0
    share_P = np.full_like(before_P, np.nan)
    share_P[position_S[live_S]] = mass_S[live_S] / mass_S.sum()
    mean_P = decay * before_P + (1 - decay) * share_P
    return share_P, np.where(np.isnan(before_P), share_P, mean_P)


def decide(brightness_P: Array, budget: Budget) -> Decision:
    """Step 3: cull the dimmest tokens beyond the budget; repair those right after the first."""
    live = np.flatnonzero(~np.isnan(brightness_P))
    excess = len(live) - budget.keep if budget.keep else 0
    if excess <= 0:
        return Decision()
    old = live[(live >= budget.sinks) & (live <= live[-1] - budget.recent)]
    dimmest = old[np.argsort(brightness_P[old], kind="stable")]
    culled = tuple(sorted(dimmest[:excess].tolist()))
    start, stop = culled[0] + 1, min(culled[0] + 1 + budget.repair, brightness_P.size)
    remaining = set(live.tolist()) - set(culled)
    return Decision(culled, (start, stop) if remaining.intersection(range(start, stop)) else None)


def run_loop(
    model: Any,
    params: Any,
    prompt: list[int],
    *,
    steps: int,
    budget: Budget,
    sampler: Sampler = jaxllm.GREEDY,
    seed: int = 0,
    eos: tuple[int, ...] = (),
) -> Iterator[Iteration]:
    """Yield iterations until an end-of-text token or `steps` iterations.

    Raises:
        CacheMismatchError: if steps 1-3 changed the cache.
    """
    cache, brightness_P = build(model, params, prompt, steps, budget)
    token_B, applied, key_B = np.array(prompt[-1:], np.int32), Decision(), jaxllm.row_keys(seed, 1)
    for number in range(steps):
        before_P, old_S = brightness_P, cache.position_BS[0]
        fingerprint = Fingerprint.compute(cache)
        out, next_token_B = generate_token(model, params, cache, token_B, sampler, key_B)
        position_S = np.concatenate([old_S, out.delta.position_BS[0]])
        mass_S = np.asarray(out.attention_mass)[0]
        share_P, brightness_P = score(before_P, mass_S, position_S, budget.decay)
        decision = decide(brightness_P, budget)
        check_unchanged(fingerprint, cache, number)
        scores = (before_P, share_P, brightness_P)
        yield Iteration(number, applied, cache, token_B, out, next_token_B, *scores, decision)
        if next_token_B[0] in eos or number + 1 == steps:
            return
        cache = patch(model, params, cache, out.delta, decision)
        token_B, applied = next_token_B, decision


def collect_tensors(it: Iteration) -> dict[str, Array]:
    """Return a capture's tensors by name; names begin with the step's number."""
    tensors = {
        "0.repaired": it.repaired,
        **_name_leaves("0.cache", it.cache),
        "1.token_B": it.token_B,
        "1.logits_BV": it.output.logits[:, 0],
        "1.attention_mass_BS": it.output.attention_mass,
        **_name_leaves("1.delta", it.output.delta),
        "1.next_token_B": it.next_token_B,
        "2.before_P": it.before_P,
        "2.share_P": it.share_P,
        "2.brightness_P": it.brightness_P,
        "3.culled": np.array(it.decision.culled, np.int32),
        "3.repair": np.array(it.decision.repair or (), np.int32),
    }
    return {name: np.atleast_1d(np.asarray(array)) for name, array in tensors.items()}


def restore_tree(path: Path, prefix: str, like: Any) -> Any:
    """Read a pytree from a capture ("0.cache" or "1.delta"), with the structure of `like`."""
    tensors = open_tensors(path)
    leaves = []
    for name, leaf in _name_leaves(prefix, like).items():
        array = tensors[name].read()
        leaves.append(jnp.asarray(array if leaf.ndim else array[0]))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _name_leaves(prefix: str, tree: Any) -> dict[str, Any]:
    """Return the arrays of a pytree by their paths."""
    return {
        f"{prefix}.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def write_capture(directory: Path, it: Iteration, metadata: dict[str, str]) -> None:
    """Write an iteration to `step_0007.safetensors`."""
    write_tensors(
        directory / f"step_{it.number:04}.safetensors",
        {name: LazyTensor.from_array(array) for name, array in collect_tensors(it).items()},
        metadata={"format": "jaxllm-context-loop", "iteration": str(it.number), **metadata},
    )


Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Model directory, demo:llama, demo:gpt2, or hf:owner/name."),
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.")]
Steps = Annotated[int, typer.Option("--steps", "-n", help="Maximum number of new tokens.")]
Keep = Annotated[int, typer.Option(help="Maximum number of tokens in the cache; 0 culls none.")]
Sinks = Annotated[int, typer.Option(help="First positions, never culled.")]
Recent = Annotated[int, typer.Option(help="Last positions, never culled.")]
Repair = Annotated[int, typer.Option(help="Positions to recompute after a culled one.")]
Decay = Annotated[float, typer.Option(help="Decay of the moving average of brightness.")]
Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; greedy decoding by default.")
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory for captures and the heatmap.")]


def context_loop(
    model: Model = "demo:llama",
    prompt: Prompt = "Once upon a time",
    steps: Steps = 48,
    keep: Keep = Budget.keep,
    sinks: Sinks = Budget.sinks,
    recent: Recent = Budget.recent,
    repair: Repair = Budget.repair,
    decay: Decay = Budget.decay,
    temperature: Temperature = None,
    seed: Seed = 0,
    out: Out = Path("context_loop"),
) -> None:
    """Continue a text while culling and repairing the cache by attention.

    The text goes to stdout, a summary to stderr. The inputs and outputs of every step go to --out,
    with a heatmap of brightness over time.
    """
    budget = Budget(keep, sinks, recent, repair, decay)
    if steps < 1:
        raise errors.ConfigError(f"--steps must be at least 1, got {steps}")
    greedy = temperature is None
    sampler = jaxllm.GREEDY if greedy else jaxllm.make_sampler(temperature=temperature)
    jaxllm.row_keys(seed, 1)  # raises for a seed out of range before the model loads
    check_free(out)
    draw = _import_draw()
    lm = jaxllm.load(model)
    if lm.tokenizer is None:
        raise errors.TokenError(f"{model} has no tokenizer, which the loop requires")
    ids = lm.tokenizer.encode(prompt, bos=lm.tokenizer.adds_bos or not prompt)
    eos = lm.generation.get("eos_token_id")
    stops = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    loop_options: dict[str, Any] = {
        "steps": steps,
        "budget": budget,
        "sampler": sampler,
        "seed": seed,
    }
    facts = {"model": model, "prompt": prompt, "budget": json.dumps(dataclasses.asdict(budget))}
    facts |= {"seed": str(seed), "temperature": "greedy" if greedy else str(temperature)}
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    hidden = not console.is_terminal
    iterations = track(
        run_loop(lm.model, lm.params, ids, eos=stops, **loop_options),
        "generating tokens",
        steps,
        console=console,
        transient=True,
        disable=hidden,
    )
    detokenizer, text, tokens, done = Detokenizer(lm.tokenizer, prompt=ids), "", list(ids), 0
    shares: list[Array] = []
    repairs: list[Array] = []
    culled: set[int] = set()
    try:
        for done, it in enumerate(iterations, 1):
            if done == 1:  # now the prompt is checked too
                out.mkdir(parents=True, exist_ok=True)
            tokens += it.next_token_B.tolist()
            text += detokenizer.push(tokens[-1])
            write_capture(out, it, {**facts, "text": text})
            shares.append(it.share_P)
            repairs.append(np.isin(np.arange(it.share_P.size), it.repaired))
            culled.update(it.applied.culled)
        pieces = Detokenizer(lm.tokenizer, skip_special=False)
        draw(
            out / PICTURE,
            np.stack(shares, axis=1),
            np.stack(repairs, axis=1),
            [pieces.push(token) for token in tokens[:-1]],
            f"Brightness over time: {model}, {_describe(budget)}",
        )
    except OSError as error:
        raise errors.CheckpointError(f"{out}: cannot be written: {error.strerror}") from None
    print(text + detokenizer.flush())
    console.print(
        f"{done} tokens generated, {len(culled)} culled, {np.sum(repairs)} entries repaired\n"
        f"steps 1-3 did not change the cache's bytes and addresses in {done} of {done} iterations\n"
        f"captures and {PICTURE} are in {out}",
        markup=False,
    )


def check_free(directory: Path) -> None:
    """Raise CheckpointError if the directory has captures, or is not a directory."""
    if directory.exists() and not directory.is_dir():
        raise errors.CheckpointError(f"{directory} is not a directory; choose another --out")
    if directory.is_dir() and (any(directory.glob("step_*")) or (directory / PICTURE).exists()):
        raise errors.CheckpointError(
            f"{directory} has the captures of another loop; choose another --out"
        )


def _import_draw() -> Any:
    """Return the function that draws the heatmap.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    try:
        from scripts.examples.context_heatmap import draw
    except ModuleNotFoundError as error:
        raise errors.ConfigError(
            f"{error.name} is not installed: pip install 'jaxllm[notebooks]'"
        ) from None
    return draw


def _describe(budget: Budget) -> str:
    if not budget.keep:
        return "nothing culled"
    return f"at most {budget.keep} tokens ({budget.sinks} sinks, {budget.recent} recent)"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
    signals.setup_process()
    run_command(context_loop, "python scripts/examples/context_loop.py", EXAMPLE)
