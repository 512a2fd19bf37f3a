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
# # Number formats, bit by bit
#
# A model's weights can be float32, bfloat16, float16, or integers with scales. This page takes
# numbers apart into their bits, shows where each format loses what, and ends with the weights of
# the small demo model in every format that jaxllm has. Whatever is claimed here is asserted in the
# cell below or above it, so this page cannot be wrong and still run.
#
# In Colab, open it by *File*, *Open notebook*, *GitHub*, and first run
# `%pip install -q 'jaxllm[all]' matplotlib`. Elsewhere, `pip install 'jaxllm[notebooks]'`.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxllm
from jaxllm.compress.calibration import from_samples
from jaxllm.compress.pipeline import compress, initial_state
from jaxllm.compress.report import StepEvaluator
from jaxllm.evaluate.likelihood.data import loader
from jaxllm.research.static_inputs.observers import (
    QRange,
    fake_quantize,
    find_qparams,
    min_max,
    observe,
    quantize,
)
from jaxllm.weights.formats import as_format, to_dense

plt.rcParams["figure.dpi"] = 110
BFLOAT16 = np.dtype(jnp.bfloat16)
FLOATS = {  # dtype, bits of the exponent, bits of the mantissa
    "float32": (np.dtype(np.float32), 8, 23),
    "bfloat16": (BFLOAT16, 8, 7),
    "float16": (np.dtype(np.float16), 5, 10),
}

# %% [markdown]
# ## Sign, exponent, mantissa
#
# A floating-point number is a sign bit, some bits of exponent and some of mantissa. With E bits of
# exponent the bias is `2**(E-1) - 1`, and with M bits of mantissa the number is
#
# * `(-1)**s * 2**(e - bias) * (1 + m / 2**M)` for an exponent field e above 0: normal numbers,
# * `(-1)**s * 2**(1 - bias) * m / 2**M` where e is 0: subnormal numbers, and zero,
# * infinity (m = 0) or NaN where all bits of e are set.


# %%
def bits(x, name):
    """The pattern of a number in a format, as a whole number."""
    dtype, *_ = FLOATS[name]
    return int(np.asarray(x, np.float32).astype(dtype).view(f"u{dtype.itemsize}"))


def fields(pattern, name):
    """Sign, exponent and mantissa of a pattern, as whole numbers."""
    _, E, M = FLOATS[name]
    return pattern >> (E + M), (pattern >> M) % (1 << E), pattern % (1 << M)


def value(pattern, name):
    """What a pattern means, by the formula above, in float64."""
    _, E, M = FLOATS[name]
    sign, exponent, mantissa = fields(pattern, name)
    bias = (1 << (E - 1)) - 1
    if exponent == (1 << E) - 1:
        return float("nan") if mantissa else float("-inf" if sign else "inf")
    if exponent == 0:
        return (-1) ** sign * 2.0 ** (1 - bias) * mantissa / (1 << M)
    return (-1) ** sign * 2.0 ** (exponent - bias) * (1 + mantissa / (1 << M))


def show(x, name):
    """One line on a number in a format."""
    _, E, M = FLOATS[name]
    pattern = bits(x, name)
    sign, exponent, mantissa = fields(pattern, name)
    digits = f"{sign} {exponent:0{E}b} {mantissa:0{M}b}"
    hexadecimal = f"0x{pattern:0{(1 + E + M) // 4}X}"
    print(f"{x:>9} {name:>8} {hexadecimal:>10} = {digits:<34} = {value(pattern, name)!r}")


for x in (3.14, 420.89938):
    for name in FLOATS:
        show(x, name)

assert bits(3.14, "float32") == 0x4048F5C3
assert fields(0x4048F5C3, "float32") == (0, 0b10000000, 0b10010001111010111000011)
assert bits(420.89938, "float32") == 0x43D2731F
assert value(0x43D2731F, "float32") == 420.8993835449219

# %% [markdown]
# The formula is right for every pattern of 16 bits there is, in both formats.

# %%
for name in ("bfloat16", "float16"):
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # some patterns are signalling NaN
        theirs = every.view(FLOATS[name][0]).astype(np.float64)
    ours = np.array([value(int(pattern), name) for pattern in every])
    assert np.array_equal(ours, theirs, equal_nan=True)
    print(f"{name}: 65536 patterns, all as the formula says")

# %% [markdown]
# ## bfloat16: the first half of a float32, rounded
#
# A bfloat16 has float32's exponent and the first 7 bits of its mantissa. It is often said that one
# gets it by keeping the first 16 bits. That is *truncation*. JAX and the hardware do something
# else: they *round* to the nearest, and to the even one of two that are equally near. 3.14 is a
# number for which it matters.


# %%
def truncated(x):
    """The first 16 bits of float32."""
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


def nearest(x):
    """To nearest, ties to even: add half a last place, a little less if that is even, and cut."""
    pattern = np.asarray(x, np.float32).view(np.uint32)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16).view(BFLOAT16)


for how in (truncated, nearest):
    print(f"{how.__name__:>9}: 0x{int(how(3.14).view(np.uint16)):04X} = {float(how(3.14))}")

assert truncated(3.14).view(np.uint16) == 0x4048 and float(truncated(3.14)) == 3.125
assert nearest(3.14).view(np.uint16) == 0x4049 and float(nearest(3.14)) == 3.140625
assert f"{fields(0x4048, 'bfloat16')[2]:07b}" == "1001000"  # and not 0101000, as is found too

numbers = np.random.default_rng(0).uniform(0, 1, 100_000).astype(np.float32)
assert np.array_equal(nearest(numbers), jnp.asarray(numbers).astype(jnp.bfloat16))
assert np.array_equal(nearest(numbers), numbers.astype(BFLOAT16))

# %% [markdown]
# Truncation is not only twice as bad at its worst. All its errors go the same way, towards zero, so
# that they add up where rounding errors cancel. The sum of a hundred thousand positive numbers
# shows it.

# %%
total = numbers.sum(dtype=np.float64)
off = {}
for how in (truncated, nearest):
    kept = how(numbers).astype(np.float64)
    off[how] = kept.sum() / total - 1
    worst = np.max(np.abs(kept - numbers) / numbers)
    print(f"{how.__name__:>9}: worst {worst:.3%} of a number, sum off by {off[how]:+.4%}")
    assert worst < (2**-7 if how is truncated else 2**-8)

assert off[truncated] < -0.002
assert abs(off[nearest]) < 0.00005

# %% [markdown]
# ## float16: more digits, less room
#
# float16 has three more bits of mantissa than bfloat16 and three fewer of exponent. Between 256 and
# 512 its numbers are 0.25 apart and bfloat16's are 2 apart. So 420 is exact in both, and 420.89938
# becomes 421.0 in the one and 420 in the other.

# %%
show(3.14, "float16")
assert bits(3.14, "float16") == 0x4248
assert fields(0x4248, "float16") == (0, 0b10000, 0b1001001000)  # ten bits, and these ten

for x in (420.0, 420.89938):
    print(f"{x}: float16 {float(np.float16(x))}, bfloat16 {float(nearest(x))}")
assert np.float16(420) == 420 and np.float16(420.89938) == 421
assert np.spacing(np.float16(420)) == 0.25
assert float(nearest(420.89938)) == 420 and value(bits(420, "bfloat16") + 1, "bfloat16") == 422

# %% [markdown]
# An exponent field of 5 bits goes from 0 to 31, but 31 means infinity and NaN, and 0 means
# subnormal. Normal numbers therefore reach from 2\*\*-14 to 65504, subnormal ones, with fewer and
# fewer digits, down to 2\*\*-24. Below half of that there is zero, from 65520 on infinity.

# %%
largest, least = value(0x7BFF, "float16"), value(1, "float16")
print(f"float16: {least} to {largest}, normal from {value(0x0400, 'float16')}")
assert largest == 65504 == np.finfo(np.float16).max
assert value(0x0400, "float16") == 2**-14 == np.finfo(np.float16).smallest_normal
assert least == 2**-24 == np.finfo(np.float16).smallest_subnormal
assert np.isinf(value(0x7C00, "float16")) and np.isnan(value(0x7C01, "float16"))


def kept(x, name):
    """Numbers as a format keeps them, in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(FLOATS[name][0]).astype(np.float64)


for x in (65519.0, 65520.0, 2.0**-24, 2.0**-25, 257.0, 2049.0):
    print(f"{x:>12.6g}: " + ", ".join(f"{name} {kept(x, name):.6g}" for name in FLOATS))
assert kept(65519, "float16") == 65504 and kept(65520, "float16") == np.inf
assert kept(2.0**-24, "float16") == 2**-24 and kept(2.0**-25, "float16") == 0

# %% [markdown]
# The last two lines are about whole numbers. bfloat16 has all of them up to 256, float16 up to
# 2048, float32 up to 16777216. This is why jaxllm computes positions and rotary angles in float32
# whatever the weights are: in bfloat16, position 257 is 256.

# %%
for name, (_, _, M) in FLOATS.items():
    exact = 2 ** (M + 1)
    assert kept(exact, name) == exact and kept(exact - 1, name) == exact - 1
    assert kept(exact + 1, name) == exact
    print(f"{name} has every whole number up to {exact}, and not {exact + 1}")

# %% [markdown]
# ## Integers: 256 levels and a scale
#
# An int8 weight is a whole number q from -128 to 127 and stands for `(q - zero) * scale`. The scale
# belongs to many weights: to all of a tensor, to a row, or to a group in a row. For weights from 0
# to 3 there are 255 steps, so the scale is 3 / 255.
#
# The obvious code divides by the scale, rounds and casts. But the steps run from 0 to 255, and int8
# ends at 127: the cast wraps around, and the two largest weights come back negative. (The cast
# below goes through int32, which wraps on every machine. Straight from a float, C leaves open what
# happens: some processors wrap, others stop at 127.)

# %%
weights = np.array([0, 0.5, 1, 2, 3])
scale = (weights.max() - weights.min()) / 255
careless = np.round((weights - weights.min()) / scale).astype(np.int32).astype(np.int8)
came_back = careless * scale + weights.min()
print("codes:", careless.tolist())
print("stand for:", [round(x, 4) for x in came_back.tolist()])
assert careless.tolist() == [0, 42, 85, -86, -1]
assert np.allclose(came_back, [0, 0.4941, 1, -1.0118, -0.0118], atol=5e-5)

# %% [markdown]
# What is right is a zero point of -128, the code that means 0, and clipping instead of wrapping.
# jaxllm's observers find the range, and `find_qparams` the scale and the zero point.

# %%
x = jnp.array(weights, jnp.float32)
to = QRange(-128, 127)
affine = find_qparams(observe(min_max(), x).range(), to, symmetric=False)
stand_for = fake_quantize(x, affine, to)
print(f"scale {float(affine.scale):.6f}, zero point {int(affine.zero)}, {to}")
print("codes:", quantize(x, affine, to).tolist())
print("stand for:", [round(x, 4) for x in stand_for.tolist()])
assert int(affine.zero) == -128
assert quantize(x, affine, to).tolist() == [-128, -86, -43, 42, 127]
assert np.allclose(stand_for, [0, 0.4941, 1, 2, 3], atol=5e-5)

# %% [markdown]
# *Symmetric* integers have no zero point and as many levels below zero as above. They make the
# product simpler, and cost half of the levels where all numbers have one sign: the steps are twice
# as large.

# %%
to_symmetric = QRange(-127, 127)
symmetric = find_qparams(observe(min_max(), x).range(), to_symmetric, symmetric=True)
ratio = float(symmetric.scale / affine.scale)
print(f"{to_symmetric}: a step of {float(symmetric.scale):.5f}, {ratio:.3f} times the affine one")
assert abs(ratio - 255 / 127) < 1e-4

# %% [markdown]
# ## Where each format loses what
#
# A floating-point format keeps a number of *digits*: its error is a share of the number, the same
# at every magnitude, until the exponent ends. Integers with a scale keep a number of *places*:
# their error is a share of the largest number that the scale is made for, the same for a large and
# a small weight. Below are random numbers of all magnitudes in each format, and the int8 and int4
# scales are made for numbers up to 1.

# %%
magnitude = np.exp2(np.random.default_rng(1).uniform(-28, 18, 6000))
INTEGERS = {"int8": 1 / 127, "int4": 1 / 7}  # the step where the largest number is 1


def stepped(x, step, most):
    """Symmetric integers of a given step, and what they stand for."""
    return np.clip(np.round(x / step), -most, most) * step


error = {name: np.abs(kept(magnitude, name) - magnitude) / magnitude for name in FLOATS}
for name, step in INTEGERS.items():
    error[name] = np.abs(stepped(magnitude, step, round(1 / step)) - magnitude) / magnitude
COLOURS = dict(zip(error, ("#1b6ca8", "#d1495b", "#3a7d44", "#7b4fa3", "#e08e1d"), strict=True))

figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
for name, relative in error.items():
    seen = np.isfinite(relative) & (relative > 0)
    axes.loglog(magnitude[seen], relative[seen], ".", ms=2, color=COLOURS[name], label=name)
axes.axhline(1, color="black", linewidth=0.6)
axes.text(2**-28, 1.3, "all is lost", fontsize=9)
axes.set_ylim(1e-12, 10)
axes.set_xlabel("number")
axes.set_ylabel("error, as a share of it")
axes.set_title("Error against magnitude", loc="left", fontsize=11)
axes.legend(markerscale=6, loc="lower left", ncols=5, frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

normal = (magnitude >= 2**-14) & (magnitude <= 65504)
assert error["float32"].max() < 2**-24 and error["bfloat16"].max() < 2**-8
assert error["float16"][normal].max() < 2**-11 < error["float16"][magnitude < 2**-14].max()
assert np.isinf(error["float16"][magnitude >= 65520]).all()
assert (error["float16"][magnitude < 2**-25] == 1).all()
for name, step in INTEGERS.items():
    within = magnitude <= 1
    assert (error[name] * magnitude)[within].max() <= step / 2 * (1 + 1e-6)
    assert (error[name][magnitude < step * 0.49] == 1).all()

# %% [markdown]
# The same seen from the other side: how far apart neighbouring numbers are. float32's spacing is
# 2\*\*16 times finer than bfloat16's everywhere. Where a number is between 1/2 and 1, int8 is as
# coarse as bfloat16 is for a number between 1 and 2; for smaller ones it does not get finer.

# %%
power = np.arange(-28, 18)
spacing = {}
for name, (dtype, _, M) in FLOATS.items():
    lowest = kept(np.exp2(power), name)
    next_pattern = lowest.astype(dtype).view(f"u{dtype.itemsize}") + 1
    with np.errstate(invalid="ignore"):  # above infinity is NaN
        apart = next_pattern.view(dtype).astype(np.float64) - lowest
    spacing[name] = np.where((lowest > 0) & np.isfinite(apart), apart, np.nan)
    fine = spacing[name][power > -14][:29]  # normal numbers of all three
    assert np.array_equal(fine, np.exp2(power[power > -14][:29] - M))
for name, step in INTEGERS.items():
    spacing[name] = np.where(power <= 0, step, np.nan)

figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
for name, apart in spacing.items():
    axes.step(np.exp2(power), apart, where="post", color=COLOURS[name], label=name)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xlabel("number")
axes.set_ylabel("to the next one")
axes.set_title("Spacing", loc="left", fontsize=11)
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

assert np.nanmax(np.abs(spacing["bfloat16"] / spacing["float32"] - 2**16)) == 0
assert abs(INTEGERS["int8"] / spacing["bfloat16"][power == 0] - 1) < 0.01

# %% [markdown]
# ## The weights of a model
#
# Here are real weights: the down projections of all four layers of the demo model, one below the
# other. Its checkpoint is in float16, so float16 loses nothing of it. jaxllm keeps a matrix as a
# *leaf*; `as_format` makes one of any format, and `to_dense` gives back the numbers that it stands
# for.

# %%
lm = jaxllm.load("demo:llama", dtype="float32")
layers = [lm.params[f"layers.{n}"] for n in range(lm.config.num_hidden_layers)]
down_OI = jnp.concatenate([layer["mlp"]["down_proj"]["weight"] for layer in layers])
spread = float(down_OI.std())
print(f"{down_OI.shape[0]} rows of {down_OI.shape[1]} weights, standard deviation {spread:.4f}")

NAMES = (
    "float32",
    "float16",
    "bfloat16",
    "bf16-packed",
    "int8",
    "int8-g64",
    "int4-g32",
    "int4-g64",
)
leaves, loss = {}, {}
for name in NAMES:
    given = leaves["bfloat16"] if name == "bf16-packed" else down_OI
    leaves[name] = as_format(given, name)
    found_OI = to_dense(leaves[name]).astype(jnp.float32)
    loss[name] = float(jnp.sqrt(jnp.mean((found_OI - down_OI) ** 2))) / spread
    print(f"{name:>12}: {leaves[name].nbytes * 8 / down_OI.size:5.2f} bits, error {loss[name]:.3%}")

assert loss["float16"] == 0 == loss["float32"]
assert 0 < loss["bfloat16"] < loss["int8-g64"] < loss["int8"] < loss["int4-g32"] < loss["int4-g64"]
assert np.array_equal(to_dense(leaves["bf16-packed"]), leaves["bfloat16"])  # 12 bits, nothing lost
assert leaves["bf16-packed"].nbytes < 0.8 * leaves["bfloat16"].nbytes
assert 8 < loss["int4-g64"] / loss["int8-g64"] < 24  # four bits are a factor of about 16

# %% [markdown]
# Error here is the root mean square of what a weight is off by, over the standard deviation of the
# weights. int8 loses more than bfloat16 although it has as many bits of precision near the largest
# weight of a row, because most weights are far smaller than that. Groups help: the smaller the
# group, the closer its scale is to its weights, and the more bits the scales take.
#
# The picture shows the weights' histogram and, below, the numbers that each format has for them: of
# int8 those of one row, of int4 those of the row's first 64 columns. (Near zero the other two have
# more than can be drawn.)

# %%
row = 5
data = np.asarray(leaves["int8"].data[row], np.int32)
eight = np.arange(-127, 128) * float(leaves["int8"].scale[row, 0])
four = np.arange(-8, 8) * float(leaves["int4-g64"].scale[row, 0])
finite = np.arange(1 << 16, dtype=np.uint16)
finite = finite[finite % 0x8000 < 0x7C00]  # of float16; of bfloat16 more than enough
LEVELS = {
    "float16": finite.view(np.float16).astype(np.float64),
    "bfloat16": finite.view(BFLOAT16).astype(np.float64),
    "int8": eight,
    "int4-g64": four,
}

reach = 0.33
figure, (top, below) = plt.subplots(
    2, 1, figsize=(9, 4.6), sharex=True, height_ratios=(3, 2), layout="constrained"
)
top.hist(np.asarray(down_OI).ravel(), 300, range=(-reach, reach), color="#8a8f98")
top.set_ylabel("weights")
top.set_title("A model's weights, and the numbers there are for them", loc="left", fontsize=11)
for place, (name, level) in enumerate(LEVELS.items()):
    dense_there = (np.abs(level) < 2**-9) & (len(level) > 256)
    shown = level[(np.abs(level) < reach) & ~dense_there]
    colour = COLOURS[name.split("-")[0]]
    below.eventplot(shown, lineoffsets=-place, linelengths=0.7, linewidths=0.4, colors=colour)
below.set_yticks(range(0, -len(LEVELS), -1), LEVELS)
below.set_xlabel("weight")
for axes in (top, below):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

q8_I, q4_I = to_dense(leaves["int8"])[row], to_dense(leaves["int4-g64"])[row, :64]
assert np.isin(np.asarray(q8_I), eight.astype(np.float32)).all()
assert np.isin(np.asarray(q4_I), four.astype(np.float32)).all()
assert np.abs(data).max() == 127  # the largest weight of a row is 127 steps

# %% [markdown]
# A single weight that is far larger than the others takes the levels away from all that share its
# scale. With one scale a row it spoils the row, with groups only its group.

# %%
outlier_OI = down_OI.at[row, 0].set(20 * float(jnp.abs(down_OI[row]).max()))
for name in ("bfloat16", "int8", "int8-g64"):
    found_OI = to_dense(as_format(outlier_OI, name)).astype(jnp.float32)
    off_I = jnp.abs(found_OI - outlier_OI)[row, 1:]
    before_I = jnp.abs(to_dense(leaves[name]).astype(jnp.float32) - down_OI)[row, 1:]
    in_group, others = (float(off_I[part].mean() / before_I[part].mean()) for part in
                        (slice(0, 63), slice(63, None)))  # fmt: skip
    print(f"{name:>8}: errors grow {in_group:4.1f} times in its group, {others:4.1f} outside")
    assert (in_group > 5) == (name != "bfloat16")
    assert (others > 5) == (name == "int8")

# %% [markdown]
# ## Fewer numbers instead of smaller ones
#
# A matrix of rank 1 is a column times a row: 4 x 4 numbers are then 4 + 4 (and one singular value,
# 9 in all) and nothing is lost. Of other matrices something is, and it is known how much: the
# singular values that are left out. A factorization of rank k has k (m + n) numbers, so it is
# smaller than an m x n matrix only for k < m n / (m + n), which for 4 x 4 is 2.

# %%
rng = np.random.default_rng(2)
column, line = rng.normal(size=(4, 1)), rng.normal(size=(1, 4))
for name, matrix in (("rank 1", column @ line), ("any", rng.normal(size=(4, 4)))):
    u, s, v = np.linalg.svd(matrix)
    left_out = np.sqrt(np.sum(s[1:] ** 2))
    off_by = np.linalg.norm(matrix - s[0] * u[:, :1] @ v[:1])
    print(f"{name:>6}: as 4 + 1 + 4 numbers off by {off_by / np.linalg.norm(matrix):.0%}")
    assert abs(off_by - left_out) < 1e-12
    assert (off_by < 1e-12) == (name == "rank 1")
assert [k for k in range(1, 5) if k * (4 + 4) < 4 * 4] == [1]

# %% [markdown]
# ## One model through several recipes
#
# A format says how a number is stored, a method which number is stored. The demo model is told to
# calibrate on what it says by itself, and is measured on other texts of its own: how far its
# predictions move (the mean KL divergence) when each recipe has made it smaller.

# %%
bos = lm.generation["bos_token_id"]
said, other = (
    from_samples(lm.model, lm.params, bos_id=bos, rows=32, width=64, seed=seed, show_progress=False)
    for seed in (1, 2)
)
scale = StepEvaluator(lm, loader(other.token_NT.tolist(), window=64, batch=32), False, False)
ON = r" on=.*(q_proj|o_proj)"  # two matrices a layer, so that it does not take long
recipes = {
    "int8": ["quantize: rtn int8"],
    "int4, to nearest": ["quantize: rtn int4-g64"],
    "int4, GPTQ": ["quantize: gptq int4-g64"],
    "2:4, magnitude": ["prune: magnitude 2:4", "store: float32-2:4"],
    "2:4, SparseGPT": ["prune: sparsegpt 2:4", "store: float32-2:4"],
    "rank, SVD": ["factor: svd 55%"],
    "rank, SVD-LLM": ["factor: svdllm 55%"],
}
rows = []
for name, steps in recipes.items():
    made = compress(lm, [step + ON for step in steps], calibration=said, show_progress=False)
    rows.append(scale.measure(name, initial_state(made)))
print("\n".join(f"{row.step:>17}: {row.bytes / 1e6:.2f} MB" for row in rows))

# %% [markdown]
# At equal bytes, looking at the inputs pays: what is rounded, left out or cut off can be made up
# for by what remains, if it is known what the inputs are like.

# %%
by = {row.step: row for row in rows}
for plain, better in (
    ("int4, to nearest", "int4, GPTQ"),
    ("2:4, magnitude", "2:4, SparseGPT"),
    ("rank, SVD", "rank, SVD-LLM"),
):
    assert by[better].bytes == by[plain].bytes and by[better].kl < by[plain].kl

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name in recipes:
    row = by[name]
    axes.plot(row.bytes / 1e6, row.kl, "o", color="tab:blue")
    axes.annotate(name, (row.bytes / 1e6, row.kl), (5, 0), textcoords="offset points", fontsize=8)
axes.set(yscale="log", xlabel="MB of parameters", ylabel="mean KL divergence (nats a token)")
axes.margins(x=0.25)
plt.show()
