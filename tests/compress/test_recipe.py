"""Recipes: parsing, checks before any work, and results that load again exactly."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest

import jaxllm
from jaxllm.checkpoints.native import open_native
from jaxllm.compress.methods import rtn
from jaxllm.compress.pipeline import compress
from jaxllm.compress.recipe import (
    FORMAT,
    Fraction,
    ModelState,
    Options,
    RuleOptions,
    StepContext,
    StepSpec,
    check_repeats,
    parse_line,
    parse_lines,
    read_recipe,
)
from jaxllm.compress.registry import STEPS, find_steps
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.research.pruning.sparsity import PATTERN
from jaxllm.weights.formats import as_format, to_dense, weight_format
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Override, Precision, match_precision
from tests.compress.models import WrappedWeight, same, tiny
from tests.tiny_models import random_model


class Settings(RuleOptions, frozen=True):
    """Options of every supported type."""

    share: Fraction = 0.5
    strict: bool = False
    rounds: int = 3
    scale: float = 1.0


def unchanged(work: StepContext[Any]) -> ModelState:
    return work.state


TABLE = (
    StepSpec("prune", "much", unchanged, "zeros", PATTERN, Settings),
    StepSpec("prune", "little", unchanged, "fewer zeros"),
    StepSpec("store", "", unchanged, "another format", FORMAT, Options, False),
)


def test_recipe_file_parses_in_any_spelling(tmp_path: Path) -> None:
    """A recipe file holds one step per line, with comments and free spacing, and prints in a normal
    form that parses back.
    """
    file = tmp_path / "recipe.txt"
    file.write_text(
        "# how it was made\n\nprune:much   strict=true 2:4 on=layers\\..*  # all\nstore:  int8\n"
    )
    lines = read_recipe(file, TABLE)
    assert [str(line) for line in lines] == [
        r"prune: much 2:4 on=layers\..* strict=true",
        "store: int8",
    ]
    assert lines[0].options == Settings(strict=True, on=r"layers\..*")
    assert parse_lines(map(str, lines), TABLE) == lines


def test_recipe_text_omits_default_options() -> None:
    plain = parse_line("prune: much 25%", TABLE)
    assert plain == parse_line("prune: much 25% share=0.5 rounds=3 strict=false", TABLE)
    assert str(plain) == "prune: much 25%"
    assert parse_line("prune: much 25% share=0.25 rounds=4", TABLE).options.share == 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prune 2:4", "unknown verb 'prune 2'"),
        ("nonsense", "expected 'verb: method"),
        ("prune:", "expected 'verb: method"),
        ("prone: much 2:4", "did you mean prune?"),
        ("prune: mush 2:4", "did you mean much?"),
        ("prune: other 2:4", "expected one of much, little"),
        ("prune: much", "expected 'prune: much N:M"),
        ("prune: much 2:4 3:4", "expected 'prune: much N:M"),
        ("prune: little 2:4", "expected 'prune: little'"),
        ("prune: much 4:2", "0 < N < M"),
        ("prune: much 100%", "between 0 and 100%"),
        ("prune: much none", "N:M such as 2:4, or a share"),
        ("prune: much 2:4 shore=1", "no option 'shore': did you mean share?"),
        ("prune: little share=1", "it has none"),
        ("prune: much 2:4 share=2", "share must be a number <= 1"),
        ("prune: much 2:4 share=nan", "share must be a number >= 0.0, got 'nan'"),
        ("prune: much 2:4 scale=nan", "scale must be a number, got 'nan'"),
        ("prune: much 2:4 scale=inf", "scale must be a number, got 'inf'"),
        ("prune: much 2:4 share=x", "share must be a number, got 'x'"),
        ("prune: much 2:4 strict=maybe", "strict must be true or false, got 'maybe'"),
        ("prune: much 2:4 rounds=1.5", "rounds must be a whole number, got '1.5'"),
        ("prune: much 2:4 rounds=1 rounds=2", "rounds is given twice"),
        ("prune: much 2:4 on=(", "not a valid regex"),
        ("store: int9", "weight format must be one of"),
    ],
)
def test_invalid_recipe_line_is_refused(text: str, message: str) -> None:
    """An invalid line raises a one-line error that names its line number and the problem."""
    with pytest.raises(ConfigError) as caught:
        parse_lines(["# first", text], TABLE)
    assert message in str(caught.value)
    assert "the recipe, line 2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no step"):
        parse_lines(["", "# nothing"], TABLE)


def test_step_registry_is_consistent() -> None:
    """Step names are unique, each step has a help text, and its options have defaults."""
    steps = find_steps()
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert step.help
        assert msgspec.to_builtins(step.options()).keys() == set(step.options.__struct_fields__)
        assert step.usage.startswith(step.name)


def test_repeated_step_requires_again() -> None:
    lines = parse_lines(["prune: much 2:4 rounds=3", "prune: much 2:4 rounds=4"], TABLE)
    check_repeats(lines, ["prune: much 50%"])
    with pytest.raises(ConfigError, match=r"'prune: much 2:4' was already .*--again"):
        check_repeats(lines, ["prune: much 2:4"])
    with pytest.raises(ConfigError, match="twice: --again"):
        check_repeats((*lines, lines[0]), [])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("quantize: rtn int8", "a list of lines"),
        (["quantize: rtn int8 on=layers.9"], "matches no matrix of this model; one"),
        (["quantize: rtn int8", "quantize: rtn bfloat16"], "line 2.*store: bfloat16"),
        (["quantize: rtn int8", "quantize: rtn int8"], "twice"),
    ],
)
def test_impossible_recipe_is_refused_before_work(steps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compress(tiny("llama"), steps)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_rtn_step_equals_quantize(family: str) -> None:
    lm = tiny(family)
    made = compress(lm, ["quantize: rtn int4-g32"])
    same(made.params, jaxllm.quantize(lm.params, "int4-g32"))
    assert made.recipe == ("quantize: rtn int4-g32",)
    steps = [r"quantize: rtn int8 on=.*\.0\..*", r"store: bfloat16 on=.*\.1\..*"]
    made = compress(made, steps)
    formats = {path: (leaf.ndim, weight_format(leaf)) for path, leaf in flatten(made.params)}
    assert {f for p, (n, f) in formats.items() if n == 2 and ".0." in p} == {"int8"}
    assert {f for p, (n, f) in formats.items() if n == 2 and ".1." in p} == {"bfloat16"}
    assert made.recipe[1:] == tuple(steps)


def test_rtn_quantizes_inside_composite_weights() -> None:
    lm = tiny("llama")
    dense = lm.params["layers.0"]["mlp"]["up_proj"]["weight"]
    params = {"layers.0": {"mlp": {"up_proj": {"weight": WrappedWeight(dense)}}}}
    subject = ModelState(lm.config, params, Precision())
    step = parse_line("quantize: rtn int8", STEPS)
    made = step.step.run(StepContext(subject, "int8", step.options))
    leaf = made.params["layers.0"]["mlp"]["up_proj"]["weight"]
    assert isinstance(leaf, WrappedWeight)
    same({"weight": leaf.inner}, jaxllm.quantize({"weight": dense}, "int8"))


def test_integers_with_offsets_round_as_one_weight() -> None:
    """Rounding applies to the matrix that the weight represents, not to each of its arrays."""
    dense = tiny("llama").params["layers.0"]["mlp"]["up_proj"]["weight"]
    integers: Any = as_format(dense, "int4-g32-zp")
    weight = integers.replace(offset=integers.scale * 3)
    made = rtn.convert_inner(weight, "int4-g64")
    same({"weight": made}, {"weight": as_format(to_dense(weight), "int4-g64")})


def test_dynamic_activations_step_enables_int8_inputs() -> None:
    lm = tiny("llama")
    assert not lm.model.precision.int8_inputs
    assert compress(lm, ["activations: dynamic"]).model.precision.int8_inputs


def test_compressed_model_round_trips_with_recipe(tmp_path: Path) -> None:
    """A saved result loads bit for bit, with its recipe and precision, for any formats and any
    rules of the original.
    """
    first = Precision(
        weights="bfloat16",
        activations="bfloat16",
        quantize="int8",
        overrides=((r"layers\.1\.mlp", Override(weights="float16", activations="float32")),),
    )
    lm = tiny("llama", first)
    steps = ["store: float16 on=lm_head", r"quantize: rtn int4-g32-zp on=layers\.0\.mlp"]
    made = compress(lm, steps)
    made.save(tmp_path / "made")
    again = jaxllm.load(tmp_path / "made")
    same(again.params, made.params)
    assert again.recipe == tuple(steps)
    assert again.model.precision == made.model.precision
    assert again.model.precision.overrides == (
        (r"layers\.1\.mlp", Override(activations="float32")),
    )
    again.save(tmp_path / "again")
    assert open_native(tmp_path / "again").recipe == tuple(steps)
    with pytest.raises(ConfigError, match="was already applied to this model"):
        compress(again, steps[:1])
    assert compress(again, steps[:1], allow_repeat=True).recipe == (*steps, steps[0])


def test_match_precision_keeps_vector_formats() -> None:
    _, params = random_model("llama")
    params["norm"]["weight"] = params["norm"]["weight"].astype("bfloat16")
    found = match_precision(params, Precision())
    assert found.overrides == ((r"norm\.weight", Override(weights="bfloat16")),)
    assert found.quantize is None
    for path, leaf in flatten(params):
        assert found.param_format(path, leaf.shape) == weight_format(leaf)


def test_cast_keeps_weight_in_requested_format() -> None:
    """A weight that already has the format is returned unchanged, since making it again could
    differ.
    """
    packed = as_format(jnp.ones((8, 128), jnp.bfloat16), "bf16-packed")
    precision = Precision(weights="bfloat16", quantize="bf16-packed")
    assert precision.format_chain("weight", (256, 256)) == ("bfloat16", "bf16-packed")
    assert precision.cast("weight", packed) is packed


def test_match_precision_distinguishes_layers() -> None:
    """Rules derived from the parameters reproduce every weight's format, also if layers differ."""
    _, params = random_model("llama", num_hidden_layers=3)
    params = jaxllm.quantize(params, [(r"layers\.[02]\.mlp", "int8"), (".*attn", "int4-g32")])
    found = match_precision(params, Precision())
    for path, leaf in flatten(params):
        assert found.param_format(path, leaf.shape) == weight_format(leaf), path
    assert (r"layers\.\d+\.self_attn\.q_proj\.weight", "int4-g32") in (found.quantize or ())
    assert len(found.quantize or ()) == 4 + 2 * 3


def test_stored_recipe_is_validated(tmp_path: Path) -> None:
    lm = tiny("gpt2")
    lm.save(tmp_path / "plain")
    file = tmp_path / "plain" / "config.json"
    text = file.read_text()
    assert "recipe" not in text
    assert jaxllm.load(tmp_path / "plain").recipe == ()
    file.write_text(text.replace("{", '{"recipe": [1],', 1))
    with pytest.raises(CheckpointError, match=r"recipe.* must be a string"):
        jaxllm.load(tmp_path / "plain")


def test_compress_leaves_original_model_unchanged() -> None:
    lm = tiny("llama")
    before = jax.tree.map(lambda x: x.copy(), lm.params)
    compress(lm, ["quantize: rtn int8"])
    same(lm.params, before)
