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
# # The cache is a value
#
# In most libraries the key/value cache of a transformer is an object that every forward pass
# changes. In PyTorch, with transformers, `model(ids, past_key_values=cache)` leaves `cache` longer
# than it was, even where the caller wanted nothing but the logits; whoever needs the old one has
# to copy it first, and such a copy can be gigabytes.
#
# In jaxllm the cache is an immutable pytree. A step takes one and returns another, and the one
# that went in stays as it was. This tour shows what follows from that: looking without touching,
# branches that share their past, going back in time, seeing what is attended to, cutting tokens
# out, repairing what had read them, keeping a cache in int8 or in a file, and `vmap` and `grad`
# over all of it.
#
# It runs in less than a minute on a laptop's CPU. The model is a small one that the package brings
# with it: four layers, trained on children's stories from a grammar.
#
# In Colab, open it by *File*, *Open notebook*, *GitHub*, and first run
# `%pip install -q 'jaxllm[all]' matplotlib`. Elsewhere, `pip install 'jaxllm[notebooks]'`.

# %%
import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxllm
from jaxllm.cache import (
    branch,
    close_gaps,
    compact,
    drop_range,
    fork,
    keep,
    load_cache,
    merge_rows,
    rewind,
    save_cache,
)

plt.rcParams["figure.dpi"] = 110

lm = jaxllm.load("demo:llama", dtype="float32")
model, params, tokenizer = lm.model, lm.params, lm.tokenizer
print(lm)

# %% [markdown]
# ## A prompt and its cache
#
# `init_cache` makes room for 64 tokens, `prefill` runs the prompt. It returns the logits of the
# last token and a new cache; the empty one is still there, and still empty.

# %%
prompt = "Long ago, in a small cottage by the river, there lived a quiet girl"
ids = tokenizer.encode(prompt, bos=True)
words = ["<s>", *(tokenizer.decode([token]) for token in ids[1:])]

empty = jaxllm.init_cache(lm.config, batch=1, capacity=64)
logits, cache = jaxllm.prefill(model, params, empty, [ids])
print(empty)
print(cache)
print(cache.show(tokenizer))

# %% [markdown]
# Three short functions, used throughout: the tokens that logits favour, the probability of a
# token, and the largest difference between two arrays.


# %%
def favourites(logits_V, n=1):
    """The n likeliest tokens."""
    return np.argsort(-np.asarray(logits_V))[:n].tolist()


def probability(logits_V, token):
    """The probability of a token."""
    return float(jax.nn.softmax(logits_V)[token])


def difference(a, b):
    """The largest difference between two arrays."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


for token in favourites(logits[0], 4):
    print(f"{tokenizer.decode([token])!r:>10}  logit {logits[0, token]:4.1f}")
print(f"probability of the first: {probability(logits[0], favourites(logits[0])[0]):.2f}")

# %% [markdown]
# The model is sure of what comes next. Which words of the prompt make it so sure is a question
# that the rest of this page answers in several ways.
#
# ## Peek
#
# What would the model say after each of several next tokens? `forward` reads the cache and
# returns logits, and beside them a *delta*: the new token's keys and values. The cache is not
# written, and it is not copied for protection either. We take the address and the contents of
# every buffer before and after.


# %%
def state(cache):
    """Address and contents of every array of a cache."""
    return [(x.unsafe_buffer_pointer(), np.asarray(x).tobytes()) for x in jax.tree.leaves(cache)]


before = state(cache)
print("if the next token is   then the one after it is")
for token in favourites(logits[0], 4):
    out = jaxllm.forward(model, params, cache, [[token]])
    (follower,) = favourites(out.logits[0, -1])
    sure = probability(out.logits[0, -1], follower)
    print(f"{tokenizer.decode([token])!r:>20}   {tokenizer.decode([follower])!r:<9} {sure:.2f}")
print("the same buffers with the same bytes:", state(cache) == before)
print("tokens in the cache:", int(cache.length_B[0]), "of", len(ids))

# %% [markdown]
# There is nothing to change it with. A field cannot be assigned, and the arrays are JAX's.
# Growing is a separate, explicit step: `commit(cache, out.delta)` returns the longer cache, and
# `decode_step` is `forward` and `commit` in one.

# %%
try:
    cache.cursor = 0
except dataclasses.FrozenInstanceError as error:
    print("FrozenInstanceError:", error)

longer = jaxllm.commit(cache, out.delta)
print(longer)
print(cache)

# %% [markdown]
# ## Branch
#
# `fork` makes many continuations of one text. They share the prefix by reference, and each has a
# small tail of its own. Here are three rows that begin with different tokens and are decoded as
# one batch.

# %%
forks = fork(cache, 3, capacity=16)
print("the prefix is the same array:", forks.frozen[0].k[0] is cache.tail.k[0])

named, whose, who = (tokenizer.encode(word)[0] for word in (" named", " whose", " who"))
story = jaxllm.generate(model, params, [[named], [whose], [who]], max_new_tokens=10, cache=forks)
print(story.cache)
for row in range(3):
    print("...", tokenizer.decode(story.cache.tokens(row)[len(ids) - 1 :]))

# %% [markdown]
# `nbytes` counts what is shared once, so it tells what branches really cost.

# %%
for rows in (1, 8, 64):
    kilobytes = fork(cache, rows, capacity=4).nbytes / 1000
    print(f"{rows:>3} branches {kilobytes:5.0f} kB, as copies {rows * cache.nbytes / 1000:6.0f} kB")

# %% [markdown]
# `branch` takes one row out as a cache of its own, and `merge_rows` puts caches together to be
# decoded as one batch, whatever their lengths. What they share stays shared.

# %%
third = branch(story.cache, 2)
first = rewind(branch(story.cache, 0), 6)
both = merge_rows([third, first])
print(both)
print(both.show(tokenizer))
print("the prefix is still the same array:", both.frozen[0].k[0] is cache.tail.k[0])

# %% [markdown]
# ## A grammar beside a branch
#
# A grammar says which texts a row may write. Its `Matcher` is a value, like the cache: `take`
# returns the next one and changes nothing, so a branch of the text has a branch of the matcher.
# Here a girl has one of two names, or a hat. The bars are what the model thinks of the tokens that
# each branch allows, renormalized; all others are out.

# %%
grammar = jaxllm.Grammar.regex(" (named (Lily|Rosa)|whose (hat|coat) was (red|blue))\\.")
matcher = grammar.matcher(tokenizer, vocab_size=lm.config.vocab_size)
out = jaxllm.forward(model, params, forks, [[named], [whose], [who]])
places = {"": (matcher, logits[0])}
for row, token in enumerate((named, whose)):
    places[tokenizer.decode([token])] = (matcher.take(token), out.logits[row, -1])

figure, axes = plt.subplots(1, len(places), figsize=(9, 2.4), layout="constrained")
for ax, (text, (place, logits_V)) in zip(axes, places.items(), strict=True):
    share_V = np.asarray(jax.nn.softmax(jnp.where(place.allowed(), logits_V, -jnp.inf)))
    best = [token for token in favourites(share_V, 5) if place.allowed()[token]]
    labels = [repr(tokenizer.decode([token])) for token in best]
    ax.barh(labels[::-1], share_V[best][::-1], color="#4477aa")
    ax.set_title(f"girl{text} ...", loc="left", fontsize=10)
    ax.set_xlim(0, 1)
    ax.spines[["top", "right"]].set_visible(False)
    print(f"girl{text}: {int(place.allowed().sum())} tokens allowed, best {labels[0]}")
plt.show()

told = lm.generate(ids, grammar=grammar, max_new_tokens=16)
print(told.text, "| complete:", told.grammar_complete)

# %% [markdown]
# ## Go back in time
#
# Every earlier cache that still has a name still works. Below, one variable is kept for each
# moment, and the oldest gives the same logits, bit for bit, as before the story went on. Where
# nobody kept the old value, `rewind` makes it: it marks later slots as empty and shares the
# arrays.


# %%
def peek(cache):
    """Logits after one more token, here always the same."""
    return jaxllm.forward(model, params, cache, [[named]]).logits[0, -1]


def greedy(cache, token, steps):
    """The caches after each of some greedy steps, the one it starts from first."""
    moments = [cache]
    for _ in range(steps):
        logits, later = jaxllm.decode_step(model, params, moments[-1], np.array([token]))
        moments.append(later)
        (token,) = favourites(logits[0])
    return moments


was = peek(cache)
moments = greedy(cache, named, 8)
print(moments[-1].show(tokenizer))

back = rewind(moments[-1], to=len(ids))
print(back.show(tokenizer))
print("keys and values are shared:", back.tail.k[0] is moments[-1].tail.k[0])
print("the oldest gives the same logits, bit for bit:", np.array_equal(peek(moments[0]), was))
print("and so does the newest, rewound:", np.array_equal(peek(back), was))

# %% [markdown]
# ## Brightness
#
# `attention_mass` asks a step how much attention each slot received. `"layers"` keeps the layers
# apart; a layer's mass sums to the number of heads times the number of new tokens. Nothing is
# computed where it is not asked for.
#
# We go back by one token and run the last one, "girl", again: from here the next token is
# predicted, so this is where the model has to look.

# %%
earlier = rewind(cache, 1)
out = jaxllm.decode_step(model, params, earlier, np.array(ids[-1:]), attention_mass="layers")
heads = lm.config.num_attention_heads
bright_LT = np.asarray(out.attention_mass)[:, 0, : len(ids)] / heads
print("every layer hands out one unit a head:", np.allclose(bright_LT.sum(axis=1), 1))


def heatmap(values_LT, title, label):
    """Layers by tokens."""
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    image = axes.imshow(values_LT, cmap="magma", aspect="auto", vmin=0)
    axes.set_xticks(range(len(words)), [w.strip() for w in words], rotation=45, ha="right")
    plt.setp(axes.get_xticklabels(), rotation_mode="anchor")
    axes.set_yticks(range(len(values_LT)), [str(layer + 1) for layer in range(len(values_LT))])
    axes.set_ylabel("layer")
    axes.set_title(title, loc="left", fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label=label, pad=0.01)
    plt.show()


heatmap(bright_LT, 'What "girl" attends to', "share of attention")

# %% [markdown]
# From the second layer on one word stands out: "there". The grammar of these stories explains it: a
# girl who *there lived* is *named*, a girl who just *lived* is one *whose name was*. But attention
# is where a model looks, which need not be what it uses. To know that, take the word away.
#
# ## Cull
#
# `drop_range` removes tokens by position, `keep` by a mask over the slots. Both change a few
# integers and share all keys and values. `show` marks what is gone.

# %%
at = words.index(" there")
culled = drop_range(cache, at, at + 1)
print(culled.show(tokenizer))
print(culled)
print("keys and values are shared:", culled.tail.k[0] is cache.tail.k[0])


def ask_again(cache):
    """Logits after the prompt's last token, run again against what the cache has before it."""
    return jaxllm.decode_step(model, params, rewind(cache, 1), np.array(ids[-1:])).logits[0]


for name, which in (("whole", cache), ("culled", culled)):
    (token,) = favourites(ask_again(which))
    print(f"{name:>8}: {tokenizer.decode([token])!r} {probability(ask_again(which), token):.2f}")

# %% [markdown]
# The one word decides. The culled slot is still taken; `compact` gathers what is left and frees it.
# Attention does not notice, because a slot is known by its position and not by its place in the
# array.

# %%
dense = compact(culled)
print(dense)
print("masked equals compacted, < 1e-4:", difference(ask_again(dense), ask_again(culled)) < 1e-4)

# %% [markdown]
# Because forks share what they have in common, every token can be culled in turn in a single
# batch: row *i* is the prompt without token *i*, and the keys and values are stored once. The bars
# show how much log-probability "named" loses.

# %%
tokens_T = np.arange(len(ids) - 1)
rows = fork(rewind(cache, 1), len(tokens_T), capacity=1)
rows = keep(rows, np.asarray(rows.position_BS) != tokens_T[:, None])
without_BV, _ = jaxllm.decode_step(model, params, rows, np.full(len(tokens_T), ids[-1]))
loss_T = jax.nn.log_softmax(logits[0])[named] - jax.nn.log_softmax(without_BV)[:, named]


def bars(values_T, title, label):
    """One bar a token."""
    _, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
    axes.bar(range(len(values_T)), values_T, color="#b5367a", width=0.7)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(values_T)), [w.strip() for w in words[: len(values_T)]])
    plt.setp(axes.get_xticklabels(), rotation=45, ha="right", rotation_mode="anchor")
    axes.set_ylabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    plt.show()


bars(loss_T, 'What "named" loses without each token', "nats")
top = int(np.argmax(loss_T))
print(
    f"{words[top]!r} is worth {loss_T[top]:.0f} nats; one array of keys:", rows.frozen[0].k[0].shape
)

# %% [markdown]
# ## Patch
#
# Culling is not the same as never having read. The tokens after "there" ran when it was still
# there, and their keys and values have absorbed something of it. `recompute` runs a range of
# positions again, against what the cache has now, and patches the new entries in. `show` marks
# them.

# %%
repaired = jaxllm.recompute(model, params, culled, at + 1, len(ids))
print(repaired.show(tokenizer))


def untouched(a, b):
    """Whether all entries before the culled token are the same, bit for bit."""
    pairs = zip((*a.tail.k, *a.tail.v), (*b.tail.k, *b.tail.v), strict=True)
    return all(np.array_equal(x[:, :at], y[:, :at]) for x, y in pairs)


print("what came before it is untouched:", untouched(repaired, culled))

# %% [markdown]
# The difference between the entries before and after the repair is what each later token had
# absorbed. In the first layer that is nothing: there a token's keys and values depend on the token
# alone. From the second layer on, "there" had spread.

# %%
pairs = list(zip(culled.tail.v, repaired.tail.v, strict=True))
absorbed_LT = [
    np.linalg.norm(old[0, : len(ids)] - new[0, : len(ids)], axis=(1, 2))
    / np.linalg.norm(old[0, : len(ids)], axis=(1, 2))
    for old, new in pairs
]
heatmap(absorbed_LT, 'How much of "there" the values had absorbed', "relative change")
print("first layer unchanged, < 1e-4:", bool(np.max(absorbed_LT[0]) < 1e-4))
print("deeper layers unchanged, < 1e-4:", bool(np.max(absorbed_LT[1:]) < 1e-4))

# %% [markdown]
# The repaired text still has a hole where "there" stood. `close_gaps` numbers the tokens 0, 1,
# 2 ... and rotates their keys accordingly. Closing the gap first and recomputing then gives what a
# fresh run of the shorter text gives.

# %%
shorter = [*ids[:at], *ids[at + 1 :]]
fresh_logits, _ = jaxllm.prefill(
    model, params, jaxllm.init_cache(lm.config, batch=1, capacity=64), [shorter]
)
closed = close_gaps(culled)
closed_and_repaired = jaxllm.recompute(model, params, closed, at, len(shorter))
print(closed_and_repaired.show(tokenizer))

for name, which in (
    ("culled", culled),
    ("culled, gap closed", closed),
    ("culled, recomputed", repaired),
    ("culled, gap closed, recomputed", closed_and_repaired),
):
    same = difference(ask_again(which), fresh_logits[0]) < 1e-4
    print(f"{name:>30} equals a fresh run, < 1e-4: {same}")

# %% [markdown]
# ## A quarter of the bytes
#
# `init_cache(dtype="int8")` keeps keys and values in eight bits, with one float32 scale for each
# token and head. Steps and surgery take such a cache like any other. Whether the precision is
# enough is a question to measure; here is a beginning.

# %%
small = jaxllm.init_cache(lm.config, batch=1, capacity=64, dtype="int8")
small_logits, small = jaxllm.prefill(model, params, small, [ids])
print(small)
print(f"float32 takes {cache.nbytes / small.nbytes:.1f} times the bytes")
print("logits the same, < 1e-4:", difference(small_logits, logits) < 1e-4)
print("logits the same, < 0.5:", difference(small_logits, logits) < 0.5)

small_story = greedy(small, named, 8)[-1]
print(small_story.show(tokenizer))
print("the same greedy continuation:", small_story.tokens() == moments[-1].tokens())

# %% [markdown]
# ## On disk
#
# `save_cache` writes one file, which knows its text, the model's configuration and precision, and
# a fingerprint of the weights. `load_cache` refuses what does not belong together: another
# architecture, or the same one with a single number changed.

# %%
other = jaxllm.load("demo:gpt2")
nudged = {**params, "norm": jax.tree.map(lambda x: x.at[0].add(0.01), params["norm"])}

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "girl.cache"
    save_cache(path, repaired, model, params)
    loaded = load_cache(path, model, params)
    print(loaded.show(tokenizer))
    print("the same logits, bit for bit:", np.array_equal(peek(loaded), peek(repaired)))
    for its_model, its_params in ((other.model, other.params), (model, nudged)):
        try:
            load_cache(path, its_model, its_params)
        except jaxllm.errors.CacheMismatchError as error:
            print("refused:", str(error).replace(f"{folder}/", ""))

# %% [markdown]
# ## vmap and grad
#
# A cache is a pytree and every step a pure function, so JAX's transformations apply. First
# `vmap`: turn the values of "there" down in several degrees, all in one call, and see the lead of
# "named" melt. (The attention that it gets stays as it is, so 0 is not the same as culled, where
# "whose" was ahead.)


# %%
def with_values(v):
    """Logits after the prompt, with these values in the cache."""
    changed = earlier.replace(tail=earlier.tail.replace(v=v))
    return jaxllm.forward(model, params, changed, [ids[-1:]]).logits[0, -1]


def dimmed(factor):
    """How far "named" is ahead of "whose", with the values of "there" scaled."""
    logits_V = with_values(tuple(v.at[0, at].multiply(factor) for v in earlier.tail.v))
    return logits_V[named] - logits_V[whose]


factors = jnp.linspace(0, 1, 6)
for factor, ahead in zip(factors, jax.vmap(dimmed)(factors), strict=True):
    print(f"{factor:.1f}  {ahead:+5.1f}  {'named' if ahead > 0 else 'whose'}")

# %% [markdown]
# Then `grad`: the gradient of that lead with respect to every cached value. Multiplied by the
# values themselves and summed over layers, heads and dimensions, it is a first-order estimate of
# what each token's values contribute.


# %%
def lead(v):
    """How far "named" is ahead of "whose"."""
    logits_V = with_values(v)
    return logits_V[named] - logits_V[whose]


gradient = jax.grad(lead)(earlier.tail.v)
worth_S = sum((g * v)[0].sum((1, 2)) for g, v in zip(gradient, earlier.tail.v, strict=True))
bars(worth_S[: len(ids) - 1], 'What each token says for "named", against "whose"', "logits")
print(f"most for it: {words[int(np.argmax(worth_S))]!r}")
print(f"most against it: {words[int(np.argmin(worth_S))]!r}")

# %% [markdown]
# And after all of this, the cache from the first section is what it was.

# %%
print(cache.show(tokenizer))
print("the same buffers with the same bytes:", state(cache) == before)
