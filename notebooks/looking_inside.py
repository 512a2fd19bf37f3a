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
# # Looking inside: where is the friend's name?
#
# The demo model tells stories about a hero and a friend. Many words after the friend is introduced,
# the name comes back, and the model is certain of it. Where is the name stored until then, what
# moves it, and how does the model tell the friend from the hero? This page finds out with patching:
# run one story with some numbers of another, and see what changes.
#
# In Colab, open it by *File*, *Open notebook*, *GitHub*, and first run
# `%pip install -q 'jaxllm[all]' matplotlib`. Elsewhere, `pip install 'jaxllm[notebooks]'`.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxllm
from jaxllm.inside import Set, attribute_patches, patch_paths, patch_sites

plt.rcParams["figure.dpi"] = 110

lm = jaxllm.load("demo:llama", dtype="float32")
model, params = lm.model, lm.params
LAYERS, HEADS = model.config.num_hidden_layers, model.config.num_attention_heads


def story(friend):
    return lm.encode(
        "Once upon a time there was an honest girl named Greta who lived in a narrow house at the"
        f" end of the lane. Next door lived her friend {friend}, a wise boy. The next day was"
    )


def word(ids):
    return lm.tokenizer.decode(np.atleast_1d(ids).tolist())


def show(values):
    return "  ".join(f"{x:.2f}" for x in np.round(values, 2) + 0.0)  # no -0.00


def guess(edits=None, friend="Milo"):
    """The next word and its probability."""
    logits = jaxllm.forward(model, params, None, [story(friend)], edits=edits).logits[0, -1]
    return f"{word(logits.argmax())} {jax.nn.softmax(logits).max():.0%}"


milo, toby = story("Milo"), story("Toby")
(NAME,) = np.flatnonzero(np.array(milo) != np.array(toby))
HERO, LAST = milo.index(lm.encode(" Greta")[-1]), len(milo) - 1
print("Milo's story:", guess(), "   Toby's story:", guess(friend="Toby"))
print(f"The stories differ in token {NAME} of {len(milo)}. The hero is token {HERO}.")

# %% [markdown]
# ## Where the name is
#
# The metric is the logit of Toby minus the logit of Milo. Each cell of the map is one run of Milo's
# story, with the residual stream of Toby's story at one layer and one token: 0 means that the model
# still says Milo, 1 that it says Toby as surely as in Toby's story. All cells run as rows of
# batches that share the tokens before.

# %%
MILO, TOBY = milo[NAME], toby[NAME]


def toby_minus_milo(logits):
    return logits[TOBY] - logits[MILO]


STORIES = (model, params, milo, toby, toby_minus_milo)
SINCE = range(NAME - 3, len(milo))  # before, the stories are the same
stream = patch_sites(*STORIES, "resid_post", positions=SINCE)
print(f"metric: {stream.base:.1f} in Milo's story, {stream.source:.1f} in Toby's")


def draw(effect, title):
    figure, axes = plt.subplots(figsize=(6.4, 2.1), layout="constrained")
    image = axes.imshow(effect, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(SINCE)), [word(milo[at]) for at in SINCE], rotation=60)
    axes.set_yticks(range(LAYERS), [f"layer {layer}" for layer in range(LAYERS)])
    axes.set_title(title, fontsize=10)
    figure.colorbar(image)
    plt.show()


draw(stream.effect, "the stream after each layer: what makes Milo into Toby")

# %% [markdown]
# After layer 0 the name is where it was written, and nowhere else. After layer 1 it is at the last
# token, and nothing at the old place matters any more. So layer 1 moves it. The tokens between take
# no part. By which of its parts?

# %%
for site in ("attn_out", "mlp_out"):
    parts = patch_sites(*STORIES, site, positions=[NAME, LAST])
    for row, place in enumerate(("the name", "the end")):
        print(f"{site:9} at {place}, layers 0 to 3: {show(parts.effect[:, row])}")

# %% [markdown]
# Attention of layer 1, at the end. (The MLP of layer 0 writes half of what identifies the name
# into the stream at its place.)
#
# ## The heads
#
# Now one head at a time: its output `attn.z` at the last token.

# %%
heads = patch_sites(*STORIES, "attn.z", positions=[LAST], heads=range(HEADS))
for layer in range(LAYERS):
    print(f"layer {layer}, heads 0 and 1: {show(heads.effect[layer, 0])}")

# %% [markdown]
# Both heads of layer 1 bring the name, and no other head does. What do they read it from? Queries,
# keys and values of these heads, patched at all tokens from the name to the end at once:

# %%
for site in ("attn.q", "attn.k", "attn.v"):
    effect = patch_sites(*STORIES, site, layers=[1], positions=[range(NAME, len(milo))]).effect
    print(f"{site}: {show(effect[0])}")

name = "blocks.1.attn.pattern"
pattern = jaxllm.forward(model, params, None, [milo], read=[name]).sites[name][0, :, LAST]
figure, axes = plt.subplots(figsize=(6.4, 2.3), layout="constrained")
for head in range(HEADS):
    axes.plot(pattern[head], ".-", label=f"head {head}")
axes.set_xticks(range(len(milo)), [word(i) for i in milo], rotation=75, fontsize=6)
axes.set_title("layer 1: what the last token looks at", fontsize=10)
axes.legend()
plt.show()
print("at the friend's name:", *(f"{x:.0%}" for x in pattern[:, NAME]))

# %% [markdown]
# So the name is in the *values*. Queries and keys, which decide where the heads look, are the same
# for both names.
#
# ## The paths
#
# Do the heads write the answer themselves, or through later layers? With everything else frozen,
# only the direct path from a head to the final norm carries the change.

# %%
last_token = {"layers": [1], "positions": [LAST], "heads": range(HEADS)}
direct = patch_paths(*STORIES, "attn.z", {"final_norm": None}, **last_token)
mlps = patch_paths(*STORIES, "attn.z", {"final_norm": None}, freeze=("attn.z",), **last_token)
print("heads 0 and 1, directly:          ", show(direct.effect[0, 0]))
print("heads 0 and 1, also through MLPs: ", show(mlps.effect[0, 0]))
print("heads 0 and 1, in all:            ", show(heads.effect[1, 0]))

# %% [markdown]
# Three quarters directly, the rest by way of MLPs, nothing by other heads.
#
# ## All of it by one gradient
#
# `attribute_patches` estimates every cell of the map at once: the gradient of the metric times the
# difference of the two stories. It finds the same places. The numbers are only roughly right, since
# this change is not small.

# %%
estimate = attribute_patches(*STORIES, "resid_post")
draw(estimate.effect[:, SINCE], "the same map, estimated by one gradient")
for at, place in ((NAME, "the name"), (LAST, "the end")):
    print(f"at {place}, layers 0 to 3: patched {show(stream.effect[:, SINCE.index(at)])}")
    print(f"at {place}, layers 0 to 3: estimate {show(estimate.effect[:, at])}")

# %% [markdown]
# ## An edit that changes the name
#
# If all of this is right, the values of layer 1 at one token suffice to make any friend another:
# 128 numbers.

# %%
VALUE, KEY = "blocks.1.attn.v", "blocks.1.attn.k"


def read(site, friend):
    return jaxllm.forward(model, params, None, [story(friend)], read=[site]).sites[site]


NAMES = ["Milo", "Toby", "Finn", "Hugo", "Tom", "Ravi", "Ben", "Leo", "Sam", "Max", "Theo"]
rename = {n: {VALUE: Set(read(VALUE, n)[:, NAME : NAME + 1], positions=[NAME])} for n in NAMES}
pairs = [(a, b) for a in NAMES for b in NAMES if a != b]
hits = sum(guess(rename[b], friend=a).split()[0] == b for a, b in pairs)
print(f"{hits} of {len(pairs)} pairs: the story of one friend goes on with the other")


def tell(edits=None):
    out = jaxllm.generate(model, params, [milo], max_new_tokens=48, edits=edits)
    print("...", word(milo[NAME + 1 :]) + word(out.token_BT[0]), "\n")


tell()
tell(rename["Toby"])

# %% [markdown]
# ## What makes it the friend's
#
# The story has two names. The keys of layer 1 must say which of them is the friend's. If so,
# exchanging the keys of the two tokens, and nothing else, makes the hero the friend.

# %%
key = read(KEY, "Milo")
swap = {
    KEY: [
        Set(key[:, NAME : NAME + 1], positions=[HERO]),
        Set(key[:, HERO : HERO + 1], positions=[NAME]),
    ]
}
print("next word:", guess(), "   with exchanged keys:", guess(swap))
tell(swap)

# %% [markdown]
# It does: now it is Greta's birthday, Milo has no money, and *he* goes on. The key got its mark
# from layer 0, where head 1 looks at the words before the name:

# %%
name = "blocks.0.attn.pattern"
pattern = jaxllm.forward(model, params, None, [milo], read=[name]).sites[name][0, 1, NAME]
best = np.argsort(-np.asarray(pattern))[:3]
print("layer 0, head 1 at the name looks at:", *(f"{word(milo[i])} {pattern[i]:.0%}" for i in best))

# %% [markdown]
# So the whole way is: layer 0 marks a name as the friend's by the words before it; in layer 1, the
# token before the name is needed looks for the mark, and copies the name from there to the end.
