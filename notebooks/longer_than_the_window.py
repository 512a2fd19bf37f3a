# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Longer than the window
#
# A cache has a slot for every token, and a long text has many tokens. There are three ways out:
# forget some of them (a *policy* over an ordinary model's cache), read at coarser positions
# (Self-Extend), or train a model whose attention is another one to begin with (LongNet's dilated
# attention, Infini-attention). This page reads the same story in all of these ways, and asks at its
# end who was met at its begin, in its middle and at its end.
#
# Two small models come with the package for this: a dense one and one with a memory, of one size,
# trained on the same texts by `scripts/demo_models/train_long.py`, none of them longer than 512
# tokens. They know who was met, and nothing else. The dilated model is the dense one's weights
# under another attention, which they were never trained for: every token sees its segment of 64,
# and of the 512 before it those that are an even number of tokens away, in one of the two heads.
#
# In Colab, open it by *File*, *Open notebook*, *GitHub*, and first run
# `%pip install -q 'jaxllm[all]' matplotlib`. Elsewhere, `pip install 'jaxllm[notebooks]'`.

# %%
import dataclasses
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxllm
from jaxllm.research.long_attention.settings import LongAttention
from jaxllm.research.needle.grid import POLICIES, recall
from jaxllm.research.needle.haystack import make_probe
from jaxllm.research.needle.prefill import prefill_texts
from jaxllm.research.self_extend import SelfExtend

plt.rcParams["figure.dpi"] = 110

dense, infini = (jaxllm.load(f"demo:long-{kind}", dtype="float32") for kind in ("dense", "infini"))
pairs = {"segment_lengths": (64, 512), "dilated_ratios": (1, 2), "dedupe": True}
config = dataclasses.replace(dense.config, attention=LongAttention(kind="dilated", **pairs))
dilated = dataclasses.replace(dense, config=config, model=jaxllm.build(config))
for lm in (dense, dilated, infini):
    size = sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    print(f"{size:,} numbers, attention: {lm.config.attention and lm.config.attention.to_dict()}")

# %% [markdown]
# ## The story
#
# Nine animals are met, each with a name of its own; most sentences say nothing. The question is
# about one of them, here the one of the first sentences. Guessing among all 24 names is right in 4
# texts of 100, guessing among the nine that were met in 11.

# %%
TOKENS = 480
story = make_probe(dense.encode, "meetings", length=TOKENS, depth=0.0, seed=1)
text = dense.tokenizer.decode(story.tokens[1:])
print(text[:270], "...", text[-150:], sep="\n")
print("answer:", dense.tokenizer.decode(story.answers[story.right]))

# %% [markdown]
# ## What each still knows
#
# Four such stories of 480 tokens, each with the fact at its begin, in its middle and at its end.
# The policies have 128 slots, about a quarter of what the text would take. The Infini model has 128
# too, two segments of 64, beside a memory that is as large after a million tokens. The dilated
# model has a slot for every token, but reads few of them.

# %%
SLOTS, DEPTHS, TRIES = 128, (0.0, 0.5, 1.0), 4
WAYS = {
    "full": (dense, "full"),
    "window": (dense, "window"),
    "sinks": (dense, "sinks"),
    "heavy hitters": (dense, "heavy"),
    "pooled": (dense, "pooled"),
    "dilated": (dilated, "full"),
    "Infini": (infini, "segments"),
}


def known(lm, policy, length=TOKENS, depths=DEPTHS, slots=SLOTS, extended=None):
    """How many of the stories are answered rightly, by depth."""
    cells = recall(
        lm.model,
        lm.params,
        lm.encode,
        style="meetings",
        lengths=[length],
        depths=depths,
        policies=[policy],
        slots=slots,
        tries=TRIES,
        extended_model=extended and extended.model,
        show_progress=False,
    )
    return [cell.right for cell in cells]


def kilobytes(lm, policy):
    """What one text takes while it is read: keys, values, and the memory where there is one."""
    cache = lm.init_cache(batch=1, capacity=TOKENS if policy == "full" else SLOTS)
    return sum(x.nbytes for x in jax.tree.leaves(cache)) / 1024


right = {way: known(*how) for way, how in WAYS.items()}
print(f"right of {TRIES}      begin  middle  end      KB")
for way, counts in right.items():
    shown = "".join(f"{count:7}" for count in counts)
    print(f"{way:14}{shown}   {kilobytes(*WAYS[way]):7.0f}")

# %%
share = np.array(list(right.values())) / TRIES
figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
axes.imshow(share, vmin=0, vmax=1, cmap="cividis", aspect="auto")
for (row, column), value in np.ndenumerate(share):
    ink = "black" if value > 0.5 else "white"  # the map grows lighter
    axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8, color=ink)
axes.set_yticks(range(len(right)), [f"{way}, {kilobytes(*WAYS[way]):.0f} KB" for way in right])
axes.set_xticks(range(len(DEPTHS)), ["begin", "middle", "end"])
axes.set_title(f"right answers, {TOKENS} tokens", fontsize=10)
plt.show()

# %% [markdown]
# ## Beyond what was learned from
#
# No text of the training was longer than 512 tokens, and the question now comes after 720. The
# dense model's angles are of distances that it has never seen. Self-Extend counts them by groups,
# so that none is new, and nothing is trained. The memory has no length. (In a dilated model no
# information would cross a multiple of its longest segment, 512.)

# %%
LONG = 720
extended = dense.with_attention(SelfExtend(group_size=4, neighbor_window=64))
farther = {
    "full": known(dense, "full", LONG, DEPTHS[:1]),
    "Self-Extend": known(dense, "self-extend", LONG, DEPTHS[:1], extended=extended),
    "Infini": known(infini, "segments", LONG, DEPTHS[:1]),
}
print(f"right of {TRIES}      begin")
for way, (count,) in farther.items():
    print(f"{way:14}{count:7}")

# %% [markdown]
# ## What a token costs
#
# Milliseconds for one more token of each of the four stories, all read. Times are this machine's,
# and therefore in a picture: the page's numbers are the same wherever it runs. At 480 tokens the
# models are too small to tell a slot from the rest of a step; BENCHMARKS.md has what a token costs
# with 65,536 in the cache.

# %%
stories = [
    make_probe(dense.encode, "meetings", length=TOKENS, depth=0.0, seed=s).tokens
    for s in range(TRIES)
]


def milliseconds(lm, policy):
    """The median time of a step after all stories."""
    cache = prefill_texts(lm.model, lm.params, stories, policy=POLICIES[policy], slots=SLOTS).cache
    taken = []
    for _ in range(12):
        began = time.perf_counter()
        jaxllm.forward(lm.model, lm.params, cache, TRIES * [[5]]).logits.block_until_ready()
        taken.append(1000 * (time.perf_counter() - began))
    return float(np.median(taken))


TIMED = {way: WAYS[way] for way in ("full", "dilated", "Infini")}
figure, axes = plt.subplots(figsize=(4.6, 2.2), layout="constrained")
axes.barh(list(TIMED), [milliseconds(*how) for how in TIMED.values()], height=0.6)
axes.invert_yaxis()
axes.set_xlabel(f"ms a step, after {TOKENS} tokens")
plt.show()
