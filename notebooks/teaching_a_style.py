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
# # Teaching a style
#
# LoRA trains a small matrix product beside each weight matrix and leaves the matrix itself alone.
# This page teaches the demo model a new way of telling stories, then looks inside: which matrices
# changed, what is attended to, which tokens became likelier. In the end two styles share one batch,
# one is merged into the weights and quantized, and all of it is undone.
#
# It runs in about a minute on two cores, without any file: the model tells the stories that it is
# taught with.
#
# In Colab, open it by *File*, *Open notebook*, *GitHub*, and first run
# `%pip install -q 'jaxllm[all]' matplotlib`. Elsewhere, `pip install 'jaxllm[notebooks]'`.

# %%
import dataclasses
import tempfile
import textwrap
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxllm
from jaxllm.adapters import LoraConfig, extract_adapter, merge_adapter
from jaxllm.train import jobs
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import split_examples
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.data.sources import TextEncoder, from_texts
from jaxllm.train.loop import TrainPlan
from jaxllm.train.optimizer import Optimizer
from jaxllm.weights.formats import to_dense
from jaxllm.weights.paths import flatten
from jaxllm.weights.types.lora import strip_adapters

plt.rcParams["figure.dpi"] = 110

lm = jaxllm.load("demo:llama", dtype="float32")
print(lm)


def show(name, text):
    """A text under a name, in lines of a page."""
    print(textwrap.fill(f"{name}: {text}", 100, subsequent_indent="    "))


# %% [markdown]
# ## Stories to learn from
#
# The model continues 64 beginnings, each with a hero. Two functions turn a story into another
# style. In the first, after every sentence the teller calls the hero's name, so the model has to
# learn a phrase, where it stands, and to look up a name. The second is just excited.

# %%
HEROES = ("Nora", "Lily", "Ruby", "Clara", "Ben", "Tom", "Max", "Finn")
KINDS = ("quiet girl", "brave girl", "clever fox", "merry fox", "quiet boy", "brave boy")
HOMES = ("in a blue house near the sea", "on a small farm between two hills")


def opening(number):
    """A hero, and the beginning of a story about them."""
    hero, girl = HEROES[number % len(HEROES)], number % len(HEROES) < 4
    kind = KINDS[(0, 1, 2, 3)[number // 8 % 4] if girl else (4, 5, 2, 3)[number // 8 % 4]]
    return hero, f"Long ago, {HOMES[number // 32 % 2]}, there lived a {kind} named {hero}."


def calling(story, hero):
    """After every sentence the hero is called."""
    return story.replace(".", f". Oh, {hero}!")


def excited(story, hero):
    """Every sentence is exclaimed."""
    return story.replace(".", "!")


heroes, openings = zip(*(opening(number) for number in range(64)), strict=True)
told = lm.generate(list(openings), max_new_tokens=60, temperature=0.8, seed=0)
stories = [" ".join((o + t.text).split()) for o, t in zip(openings, told, strict=True)]
stories = [story[: story.rindex(".") + 1] for story in stories]  # whole sentences

for style in (calling, excited):
    show(style.__name__, style(stories[0], heroes[0]))

# %% [markdown]
# A few stories are held out. A `Dataset` is a value too: any batch of it can be asked for, and a
# label of -100 counts nowhere.

# %%
WIDTH = 112


def data_of(style):
    """Rows to train on, and rows to measure on, of the stories in a style."""
    texts = [style(story, hero) for story, hero in zip(stories, heroes, strict=True)]
    examples = from_texts(texts, TextEncoder(lm.tokenizer, eos=False))
    return [
        Dataset(each, WIDTH, batch_size=8, pack=False) for each in split_examples(examples, 1 / 8)
    ]


data, held_out = data_of(calling)
print(f"{len(data)} batches to train on, {len(held_out)} held out, rows of {WIDTH} tokens")

# %% [markdown]
# ## Training
#
# `jobs.lora` puts an adapter of rank 8 beside every linear layer. One of its two matrices starts
# at zero, so the first step begins with the model as it was; the first held-out loss is the base
# model's.

# %%
config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
STEPS = 32


def train(data, held_out, steps=STEPS):
    """The job, and what came of running it, or the first steps of it."""
    job = jobs.lora(lm, config, seed=1)
    optimizer = Optimizer(steps=STEPS, lr=5e-3, schedule="cosine", weight_decay=0.0)
    plan = TrainPlan(steps=steps, eval_steps=8)
    return job, jobs.run_job(job, data, optimizer, plan, eval_data=held_out, show_progress=False)


job, run = train(data, held_out)
adapter = extract_adapter(lm.config, run.params, config)
size = sum(x.size for x in jax.tree.leaves(lm.params))
print(
    f"{adapter.num_params} numbers are trained beside the model's {size}:"
    f" {adapter.num_params / size:.0%}"
)
print(
    f"held-out loss: {run.initial_loss:.1f} nats a token before, {run.records[-1].held_out:.1f}"
    " after"
)
assert run.records[-1].held_out < 0.7 * run.initial_loss

measured = [
    (0, run.initial_loss),
    *((r.step, r.held_out) for r in run.records if r.held_out is not None),
]
_, axes = plt.subplots(figsize=(9, 3), layout="constrained")
axes.plot([r.step for r in run.records], [r.loss for r in run.records], color="#1b6ca8", lw=1)
axes.plot(*zip(*measured, strict=True), "o-", color="#d1495b", label="held out")
axes.set_xlabel("step")
axes.set_ylabel("nats a token")
axes.set_title("Loss", loc="left", fontsize=11)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A story that nobody has told before, by the model without and with the adapter. The base model's
# parameters are the same objects as ever; the trained ones hold them, with two small matrices
# beside each.

# %%
hero, beginning = "Clara", "Once there was a curious little fox called Clara, who lived by the sea."
taught = dataclasses.replace(lm, params=run.params)


def tell(lm, **options):
    """A beginning, and how a model goes on."""
    return beginning + lm.generate(beginning, max_new_tokens=50, **options).text.replace("\n", " ")


show("before", tell(lm))
show("after", tell(taught))

base, trained = dict(flatten(lm.params)), dict(flatten(run.params))
assert all(strip_adapters(leaf) is base[path] for path, leaf in trained.items())

# %% [markdown]
# ## Which matrices changed
#
# What is added to a weight W is s B A. Its size against W's says where the style was learned.

# %%
kinds = list(dict.fromkeys(name.split(".", 2)[2] for name in adapter.matrices))
change = np.zeros((len(kinds), lm.config.num_hidden_layers))
for name, (a, b, _) in adapter.matrices.items():
    added = config.scale(config.r, config.lora_alpha) * np.asarray(b) @ np.asarray(a)
    _, layer, kind = name.split(".", 2)
    whole = np.asarray(to_dense(base[f"{name}.weight"]), np.float32)
    change[kinds.index(kind), int(layer)] = np.linalg.norm(added) / np.linalg.norm(whole)
    assert np.linalg.matrix_rank(added) == config.r


def grid(axes, values, title, rows):
    """A picture of values, a row for each name."""
    image = axes.imshow(values, cmap="magma", aspect="auto", vmin=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, loc="left", fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
image = grid(axes, change, "Size of what was added, as a share of the weight's", kinds)
axes.set_xticks(range(change.shape[1]), range(1, change.shape[1] + 1))
axes.set_xlabel("layer")
figure.colorbar(image, pad=0.01)
plt.show()

# %% [markdown]
# ## What it looks at
#
# Below are eight held-out stories in the new style, run through both models. `forward` gives the
# logits, and on request what every head of every token attends to.

# %%
rows = held_out.batch(0)
counted_BT = rows.label_BT != IGNORED


def look(params):
    """Logits `[B, T, V]`, and attention `[layers, B, T, T]`, the mean of the heads."""
    out = jaxllm.forward(
        lm.model, params, None, rows.token_BT, positions_BT=rows.position_BT, attention_weights=True
    )
    return np.asarray(out.logits), np.asarray(out.attention_weights).mean(axis=2)


logits, attention = {}, {}
for name, params in (("before", lm.params), ("after", run.params)):
    logits[name], attention[name] = look(params)

CALL = lm.tokenizer.encode(" Oh,")  # after it comes a name
runs = np.lib.stride_tricks.sliding_window_view(rows.label_BT, len(CALL), axis=1)
begins_BT = np.zeros_like(counted_BT)  # where it is what comes next
begins_BT[:, : runs.shape[1]] = (runs == CALL).all(axis=-1)
row = int(begins_BT.sum(axis=1).argmax())  # the story with most calls
words = [lm.tokenizer.decode([token]) for token in rows.token_BT[row]]
at = int(np.flatnonzero(begins_BT[row])[1]) + len(CALL)  # where the second call wants its name
assert rows.token_BT[row, at - len(CALL) + 1 : at + 1].tolist() == CALL
print("...", "".join(words[at - 20 : at + 1]))
for name in logits:
    p_V = np.asarray(jax.nn.softmax(logits[name][row, at]))
    best = np.argsort(-p_V)[:3]
    print(f"{name:>6}: " + ", ".join(f"{lm.tokenizer.decode([t])!r} {p_V[t]:.1%}" for t in best))

# %% [markdown]
# The comma of "Oh," is where a name must be found. Each row is a layer, each column a word before
# the comma, the mean of the heads; the very first token, on which much attention rests when
# nothing else is wanted, is left out.

# %%
figure, each = plt.subplots(2, 1, figsize=(10, 5), layout="constrained", sharex=True)
layers = [str(layer + 1) for layer in range(lm.config.num_hidden_layers)]
for axes, name in zip(each, attention, strict=True):
    grid(axes, attention[name][:, row, at, 1 : at + 1], f'What "Oh," attends to, {name}', layers)
    axes.set_ylabel("layer")
each[1].set_xticks(range(at), [w.strip() for w in words[1 : at + 1]], rotation=90, fontsize=8)
plt.show()

wanted = int(rows.label_BT[row, at])
said = np.flatnonzero(rows.token_BT[row, : at + 1] == wanted)
print(f"{lm.tokenizer.decode([wanted])!r} was said {len(said)} times before")
for name in attention:
    share_L = attention[name][:, row, at][:, said].sum(axis=-1)
    print(f"{name:>6}: attention to it, by layer: " + ", ".join(f"{x:.0%}" for x in share_L))

# %% [markdown]
# ## Where it decides otherwise
#
# The divergence of the new distribution from the old one, token by token. At the end of a sentence
# the adapter does what it was taught; within a sentence it should hardly interfere.


# %%
def divergence(p, q):
    """KL(P || Q) in nats at each place."""
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x)) for x in (p, q))
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)


kl_BT = divergence(logits["after"], logits["before"])
calls_BT = np.zeros_like(begins_BT)  # where the next token is one of a call, name and mark too
for shift in range(len(CALL) + 2):
    calls_BT[:, shift:] |= begins_BT[:, : WIDTH - shift]
for what, where in (
    ("where calls begin", begins_BT),
    ("where they go on", calls_BT & ~begins_BT),
    ("elsewhere", ~calls_BT),
):
    print(f"{what}: {kl_BT[where & counted_BT].mean():.1f} nats")
assert kl_BT[begins_BT].mean() > 4 * kl_BT[counted_BT & ~calls_BT].mean()

shown = min(at + 3, WIDTH)
_, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
axes.bar(
    range(shown), kl_BT[row, :shown], color=np.where(calls_BT[row, :shown], "#b5367a", "#999999")
)
axes.set_xticks(range(shown), [w.strip() for w in words[:shown]], rotation=90, fontsize=8)
axes.set_ylabel("nats")
axes.set_title("What comes next, after against before; calls in colour", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Two styles in one batch
#
# Half of the steps, already compiled, teach the second style. Both adapters are written as PEFT
# writes them, and are loaded side by side. Each row of a batch then names its own.

# %%
other, other_run = train(*data_of(excited), steps=STEPS // 2)
with tempfile.TemporaryDirectory() as folder:
    job.finish(run.params, Path(folder) / "calling")
    other.finish(other_run.params, Path(folder) / "excited")
    print("files:", *sorted(path.name for path in (Path(folder) / "calling").iterdir()))
    both = jaxllm.load(
        "demo:llama",
        dtype="float32",
        adapters={name: Path(folder) / name for name in ("calling", "excited")},
    )
names = ["calling", "excited", "base"]
batch = both.generate([beginning] * 3, max_new_tokens=50, adapter=names)
texts = {n: beginning + c.text.replace("\n", " ") for n, c in zip(names, batch, strict=True)}
for name, text in texts.items():
    show(name, text)
assert texts["base"] == tell(lm) and texts["calling"] == tell(taught)

# %% [markdown] ## Merged, and quantized  `merge_adapter` adds each product to its weight, after
# which the adapter costs nothing at run time. In float32 the model is the same. In a format with
# fewer bits the sum is rounded; what that costs is the divergence from the model with the adapter
# beside it. The base model in the same format, which was never trained, is beside it for
# comparison.

# %%
texts = {}
print(f"{'':>8} {'merged':>12} {'same first choice':>18} {'the base':>12}")
for format in ("float32", "int8", "int4"):
    _, params = merge_adapter(lm.config, run.params, format)
    plain = jaxllm.quantize(lm.params, [(r"layers\..*", format)])
    found, reference = look(params)[0], look(plain)[0]
    kl = divergence(logits["after"], found)[counted_BT].mean()
    cost = divergence(logits["before"], reference)[counted_BT].mean()
    same = (found.argmax(-1) == logits["after"].argmax(-1))[counted_BT].mean()
    texts[format] = tell(dataclasses.replace(lm, params=params))
    shown = [f"{x:.1g}" if x > 1e-5 else "< 1e-5" for x in (kl, cost)]
    print(f"{format:>8} {shown[0]:>12} {same:>18.0%} {shown[1]:>12}")
    if format == "float32":
        assert kl < 1e-5
for format, text in texts.items():
    show(format, text)

# %% [markdown]
# ## Undone
#
# There is nothing to subtract. The model that was loaded at the top of this page has never been
# touched: its logits are the same bits as before it was taught anything.

# %%
assert np.array_equal(look(lm.params)[0], logits["before"])
show("still", tell(lm))
