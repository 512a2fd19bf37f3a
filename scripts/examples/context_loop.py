"""A loop that edits its own context: make a token, see what was attended to, cull and repair.

Step 0 builds or patches the cache, 1 makes a token, 2 scores brightness (the attention that each
token received), 3 decides what to cull and what to repair. One decision: only step 0 returns a
cache. Steps 1-3 read it, and at each iteration its bytes and addresses are compared to prove it.

    python scripts/examples/context_loop.py -p "Once upon a time" --steps 48 --keep 24 --out loop

Everything that the steps took and gave goes to `OUT/step_0007.safetensors`, under names that begin
with the step's number; what step 0 took is the end of the file before it. `OUT/brightness.png`
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
SPARE = 16  # slots beyond the budget: how many tokens are committed from one compaction to the next
PICTURE = "brightness.png"
Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many tokens the cache may hold, and which of them are never culled.

    keep: 0 for any number. sinks: the first positions, and recent: the last ones, are safe.
    repair: positions after a culled token that are run again without it. decay: of the moving
    average, 0 for only the newest token's attention.
    """

    keep: int = 24
    sinks: int = 2
    recent: int = 8
    repair: int = 4
    decay: float = 0.8

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
    """What the next step 0 is to do, in positions. repair: `start` to before `stop`, or None."""

    culled: tuple[int, ...] = ()
    repair: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One round: what each step took and gave. P counts the positions of the whole text.

    applied: the decision that step 0 carried out. cache: as it left it. share_P: of this round's
    attention, brightness_P: its moving average; both NaN where there is no token.
    """

    number: int
    applied: Decision
    cache: KVCache
    token_B: Array
    output: Output
    next_token_B: Array
    before_P: Array
    share_P: Array
    brightness_P: Array
    decision: Decision

    @property
    def repaired(self) -> Array:
        """The positions whose entries step 0 ran again."""
        start, stop = self.applied.repair or (0, 0)
        position_S = np.asarray(self.cache.position_BS)[0]
        return np.sort(position_S[(position_S >= start) & (position_S < stop)])


@dataclasses.dataclass(frozen=True)
class Imprint:
    """A cache's SHA-256 (names, formats, shapes and every bit) and where its arrays lie."""

    sha256: str
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, cache: KVCache) -> "Imprint":
        """Take it. Raises CacheMismatchError for a cache that was donated."""
        leaves = jax.tree.leaves(cache)
        if any(leaf.is_deleted() for leaf in leaves):
            raise errors.CacheMismatchError("the cache is gone: a step donated it")
        # An array keeps the host's copy of its bytes once that was made: only a new array reads the
        # device's again.
        sha256 = surgery.fingerprint({"cache": jax.tree.map(jnp.copy, cache)})
        return cls(sha256, tuple(leaf.unsafe_buffer_pointer() for leaf in leaves))


def check_unchanged(before: Imprint, cache: KVCache, number: int) -> None:
    """Raise CacheMismatchError unless the cache has the bytes and the addresses that it had."""
    after = Imprint.of(cache)
    if after != before:
        what = "bytes" if after.sha256 != before.sha256 else "addresses"
        raise errors.CacheMismatchError(f"iteration {number}: steps 1-3 changed the cache's {what}")


def build(
    model: Any, params: Any, prompt: list[int], steps: int, budget: Budget
) -> tuple[KVCache, Array]:
    """Step 0, the first time: all of the prompt but its last token, and its brightness.

    Raises CapacityError where the text would outgrow the model.
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
        # Early tokens were seen by more queries: what counts is the mean over those.
        readers_T = np.arange(len(read), 0, -1, dtype=np.float32)
        brightness_P[: len(read)] = mass_T / readers_T * (len(read) / mass_T.sum())
    return cache, brightness_P


def patch(model: Any, params: Any, cache: KVCache, delta: Delta, decision: Decision) -> KVCache:
    """Step 0: cull, free slots if there are none, commit the newest token, repair."""
    if decision.culled:
        cache = surgery.keep(cache, ~np.isin(np.asarray(cache.position_BS), decision.culled))
    if int(cache.cursor) == cache.capacity:
        cache = surgery.compact(cache)
    cache = jaxllm.commit(cache, delta)
    if decision.repair:
        cache = jaxllm.recompute(model, params, cache, *decision.repair)
    return cache


def make_token(
    model: Any, params: Any, cache: KVCache, token_B: Array, sampler: Sampler, key_B: jax.Array
) -> tuple[Output, Array]:
    """Step 1: run the newest token and choose the next, as `generate` would with this key.

    Raises NonFiniteError where the model returns NaN.
    """
    out = jaxllm.forward(model, params, cache, token_B[:, None], attention_mass=True)
    logits_BV = out.logits[:, 0]
    if not np.isfinite(logits_BV).all():
        raise errors.NonFiniteError("the model returned NaN or infinite logits")
    return out, np.asarray(_choose(logits_BV, out.delta.position_BS[:, 0] + 1, sampler, key_B))


@jax.jit
def _choose(
    logits_BV: jax.Array, position_B: jax.Array, sampler: Sampler, key_B: jax.Array
) -> jax.Array:
    own_B = jax.vmap(jax.random.fold_in)(key_B, position_B)
    return jaxllm.sample(own_B, logits_BV, sampler)


def score(before_P: Array, mass_S: Array, position_S: Array, decay: float) -> tuple[Array, Array]:
    """Step 2: each position's share of this round's attention, and the moving average of it.

    Keyed by position, so that it outlasts compaction; a token's average begins with its first
    share.
    """
    live_S = position_S >= 0
    share_P = np.full_like(before_P, np.nan)
    share_P[position_S[live_S]] = mass_S[live_S] / mass_S.sum()
    mean_P = decay * before_P + (1 - decay) * share_P
    return share_P, np.where(np.isnan(before_P), share_P, mean_P)


def decide(brightness_P: Array, budget: Budget) -> Decision:
    """Step 3: cull the dimmest tokens over the budget, repair what directly follows the first."""
    live = np.flatnonzero(~np.isnan(brightness_P))
    excess = len(live) - budget.keep if budget.keep else 0
    if excess <= 0:
        return Decision()
    old = live[(live >= budget.sinks) & (live <= live[-1] - budget.recent)]
    dimmest = old[np.argsort(brightness_P[old], kind="stable")]
    culled = tuple(sorted(dimmest[:excess].tolist()))
    start, stop = culled[0] + 1, min(culled[0] + 1 + budget.repair, brightness_P.size)
    left = set(live.tolist()) - set(culled)
    return Decision(culled, (start, stop) if left.intersection(range(start, stop)) else None)


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
    """The loop, a round at a time, until an end-of-text token or `steps` rounds.

    Raises what the steps raise, and CacheMismatchError where steps 1-3 changed the cache.
    """
    cache, brightness_P = build(model, params, prompt, steps, budget)
    token_B, applied, key_B = np.array(prompt[-1:], np.int32), Decision(), jaxllm.row_keys(seed, 1)
    for number in range(steps):
        before_P, imprint, old_S = brightness_P, Imprint.of(cache), cache.position_BS[0]
        out, next_token_B = make_token(model, params, cache, token_B, sampler, key_B)
        position_S = np.concatenate([old_S, out.delta.position_BS[0]])
        mass_S = np.asarray(out.attention_mass)[0]
        share_P, brightness_P = score(before_P, mass_S, position_S, budget.decay)
        decision = decide(brightness_P, budget)
        check_unchanged(imprint, cache, number)
        scored = (before_P, share_P, brightness_P)
        yield Iteration(number, applied, cache, token_B, out, next_token_B, *scored, decision)
        if next_token_B[0] in eos or number + 1 == steps:
            return
        cache = patch(model, params, cache, out.delta, decision)
        token_B, applied = next_token_B, decision


def tensors_of(it: Iteration) -> dict[str, Array]:
    """What a capture holds, by name: the number of the step, then what it took or gave."""
    named = {
        "0.repaired": it.repaired,
        **_leaves("0.cache", it.cache),
        "1.token_B": it.token_B,
        "1.logits_BV": it.output.logits[:, 0],
        "1.attention_mass_BS": it.output.attention_mass,
        **_leaves("1.delta", it.output.delta),
        "1.next_token_B": it.next_token_B,
        "2.before_P": it.before_P,
        "2.share_P": it.share_P,
        "2.brightness_P": it.brightness_P,
        "3.culled": np.array(it.decision.culled, np.int32),
        "3.repair": np.array(it.decision.repair or (), np.int32),
    }
    return {name: np.atleast_1d(np.asarray(array)) for name, array in named.items()}


def restored(path: Path, prefix: str, like: Any) -> Any:
    """A pytree from a capture: "0.cache" or "1.delta", in the form of `like`."""
    tensors = open_tensors(path)
    leaves = []
    for name, leaf in _leaves(prefix, like).items():
        array = tensors[name].read()
        leaves.append(jnp.asarray(array if leaf.ndim else array[0]))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaves(prefix: str, tree: Any) -> dict[str, Any]:
    """The arrays of a pytree, by the path to them."""
    return {
        f"{prefix}.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def write_capture(directory: Path, it: Iteration, metadata: dict[str, str]) -> None:
    """Write one round to `step_0007.safetensors`."""
    write_tensors(
        directory / f"step_{it.number:04}.safetensors",
        {name: LazyTensor.from_array(array) for name, array in tensors_of(it).items()},
        metadata={"format": "jaxllm-context-loop", "iteration": str(it.number), **metadata},
    )


Model = Annotated[
    str, typer.Option("--model", "-m", help="A directory, demo:llama, demo:gpt2, or hf:owner/name.")
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")]
Steps = Annotated[int, typer.Option("--steps", "-n", help="How many tokens to make at most.")]
Keep = Annotated[int, typer.Option(help="Tokens that the cache may hold; 0 culls none.")]
Sinks = Annotated[int, typer.Option(help="The first positions, never culled.")]
Recent = Annotated[int, typer.Option(help="The last positions, never culled.")]
Repair = Annotated[int, typer.Option(help="Positions after a culled one to run again.")]
Decay = Annotated[float, typer.Option(help="Of the moving average of brightness.")]
Temperature = Annotated[float | None, typer.Option(help="Sample at it; by default greedy.")]
Seed = Annotated[int, typer.Option(help="The same seed, the same text.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Directory for captures and the picture.")]


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
    """Continue a text while culling and repairing the cache by what was attended to.

    The text goes to stdout, a summary to stderr; every step's inputs and outputs go to --out, with
    a heatmap of brightness over time.
    """
    budget = Budget(keep, sinks, recent, repair, decay)
    if steps < 1:
        raise errors.ConfigError(f"--steps must be at least 1, got {steps}")
    greedy = temperature is None
    sampler = jaxllm.GREEDY if greedy else jaxllm.make_sampler(temperature=temperature)
    jaxllm.row_keys(seed, 1)  # refuses a seed out of range before anything is loaded
    check_free(out)
    draw = _drawing()
    lm = jaxllm.load(model)
    if lm.tokenizer is None:
        raise errors.TokenError(f"{model} has no tokenizer, and the loop begins with a text")
    ids = lm.tokenizer.encode(prompt, bos=lm.tokenizer.adds_bos or not prompt)
    eos = lm.generation.get("eos_token_id")
    stops = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    settings: dict[str, Any] = {"steps": steps, "budget": budget, "sampler": sampler, "seed": seed}
    facts = {"model": model, "prompt": prompt, "budget": json.dumps(dataclasses.asdict(budget))}
    facts |= {"seed": str(seed), "temperature": "greedy" if greedy else str(temperature)}
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    hidden = not console.is_terminal
    rounds = track(
        run_loop(lm.model, lm.params, ids, eos=stops, **settings),
        "making tokens",
        steps,
        console=console,
        transient=True,
        disable=hidden,
    )
    story, text, tokens, done = Detokenizer(lm.tokenizer, prompt=ids), "", list(ids), 0
    shares: list[Array] = []
    repairs: list[Array] = []
    culled: set[int] = set()
    try:
        for done, it in enumerate(rounds, 1):
            if done == 1:  # by now the prompt has been checked too
                out.mkdir(parents=True, exist_ok=True)
            tokens += it.next_token_B.tolist()
            text += story.push(tokens[-1])
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
            f"Brightness over time: {model}, {_described(budget)}",
        )
    except OSError as error:
        raise errors.CheckpointError(f"{out}: cannot be written: {error.strerror}") from None
    print(text + story.flush())
    console.print(
        f"{done} tokens made, {len(culled)} culled, {np.sum(repairs)} entries repaired\n"
        f"steps 1-3 left the cache's bytes and addresses alone in {done} of {done} iterations\n"
        f"captures and {PICTURE} are in {out}",
        markup=False,
    )


def check_free(directory: Path) -> None:
    """Raise CheckpointError where a loop has been before, or where there is no directory to be."""
    if directory.exists() and not directory.is_dir():
        raise errors.CheckpointError(f"{directory} is not a directory; name another with --out")
    if directory.is_dir() and (any(directory.glob("step_*")) or (directory / PICTURE).exists()):
        raise errors.CheckpointError(
            f"{directory} holds the captures of another loop; name another --out"
        )


def _drawing() -> Any:
    """What draws the picture. Raises ConfigError where matplotlib is missing."""
    try:
        from scripts.examples.context_heatmap import draw
    except ModuleNotFoundError as error:
        raise errors.ConfigError(
            f"{error.name} is missing: pip install 'jaxllm[notebooks]'"
        ) from None
    return draw


def _described(budget: Budget) -> str:
    if not budget.keep:
        return "nothing culled"
    return f"the {budget.keep} brightest kept ({budget.sinks} sinks, {budget.recent} recent)"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `scripts` is
    signals.setup_process()
    run_command(context_loop, "python scripts/examples/context_loop.py", EXAMPLE)
