"""A recipe says what is done, and what it gets wrong is refused before anything is."""

import dataclasses
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
    PATTERN,
    Fraction,
    ModelState,
    Options,
    RuleOptions,
    Step,
    check_repeats,
    parse_line,
    parse_lines,
    read_recipe,
)
from jaxllm.compress.registry import STEPS
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.weights.formats import as_format, to_dense, weight_format
from jaxllm.weights.paths import flatten
from jaxllm.weights.precision import Override, Precision, match_precision
from tests.compress.models import Whole, same, tiny
from tests.twins import random_model


class Settings(RuleOptions, frozen=True):
    """Of every type that an option has."""

    share: Fraction = 0.5
    strict: bool = False
    rounds: int = 3
    scale: float = 1.0


def unchanged(subject: ModelState, argument: str, options: Any, work: Any) -> ModelState:
    return subject


TABLE = (
    Step("prune", "much", unchanged, "zeros", PATTERN, Settings),
    Step("prune", "little", unchanged, "fewer zeros"),
    Step("store", "", unchanged, "another format", FORMAT, Options, False),
)


def test_a_file_has_a_step_a_line_in_any_spelling(tmp_path: Path) -> None:
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


def test_what_is_the_default_is_not_said_again() -> None:
    plain = parse_line("prune: much 25%", TABLE)
    assert plain == parse_line("prune: much 25% share=0.5 rounds=3 strict=false", TABLE)
    assert str(plain) == "prune: much 25%"
    assert parse_line("prune: much 25% share=0.25 rounds=4", TABLE).options.share == 0.25


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_line_that_is_none_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lines(["# first", text], TABLE)
    assert said in str(caught.value)
    assert "the recipe, line 2: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_has_a_step() -> None:
    with pytest.raises(ConfigError, match="has no step"):
        parse_lines(["", "# nothing"], TABLE)


def test_every_step_of_the_table_can_be_read_as_it_is_listed() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert step.help
        assert msgspec.to_builtins(step.options()).keys() == set(step.options.__struct_fields__)
        assert step.usage.startswith(step.name)


def test_a_step_is_not_done_twice_by_mistake() -> None:
    lines = parse_lines(["prune: much 2:4 rounds=3", "prune: much 2:4 rounds=4"], TABLE)
    check_repeats(lines, ["prune: much 50%"])
    with pytest.raises(ConfigError, match=r"'prune: much 2:4' was already .*--again"):
        check_repeats(lines, ["prune: much 2:4"])
    with pytest.raises(ConfigError, match="twice: --again"):
        check_repeats((*lines, lines[0]), [])


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("quantize: rtn int8", "a list of lines"),
        (["quantize: rtn int8 on=layers.9"], "matches no matrix of this model; one"),
        (["quantize: rtn int8", "quantize: rtn bfloat16"], "line 2.*store: bfloat16"),
        (["quantize: rtn int8", "quantize: rtn int8"], "twice"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(steps: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compress(tiny("llama"), steps)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_rounding_to_nearest_is_quantizing(family: str) -> None:
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


def test_rounding_reaches_what_a_weight_is_composed_of() -> None:
    lm = tiny("llama")
    dense = lm.params["layers.0"]["mlp"]["up_proj"]["weight"]
    params = {"layers.0": {"mlp": {"up_proj": {"weight": Whole(dense)}}}}
    subject = ModelState(lm.config, params, Precision())
    step = parse_line("quantize: rtn int8", STEPS)
    made = step.step.run(subject, "int8", step.options, None)  # type: ignore[arg-type]
    leaf = made.params["layers.0"]["mlp"]["up_proj"]["weight"]
    assert isinstance(leaf, Whole)
    same({"weight": leaf.whole}, jaxllm.quantize({"weight": dense}, "int8"))


@pytest.mark.parametrize("kind", ["offset", "static"])
def test_integers_with_more_than_scales_are_rounded_as_one_weight(kind: str) -> None:
    """What is rounded is the matrix that they stand for, not each of their arrays."""
    dense = tiny("llama").params["layers.0"]["mlp"]["up_proj"]["weight"]
    integers: Any = as_format(dense, "int4-g32-zp" if kind == "offset" else "int8")
    offset = integers.replace(offset=integers.scale * 3)
    weight = offset if kind == "offset" else integers.with_input_grid(0.1, 3)
    made = rtn.convert_inner(weight, "int4-g64")
    same({"weight": made}, {"weight": as_format(to_dense(weight), "int4-g64")})


def test_dynamic_inputs_are_a_step() -> None:
    lm = tiny("llama")
    assert not lm.model.precision.int8_inputs
    assert compress(lm, ["activations: dynamic"]).model.precision.int8_inputs


def test_a_result_is_loaded_bit_for_bit_and_remembers(tmp_path: Path) -> None:
    """Whatever the formats of its leaves, and whatever rules the original had."""
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


def test_vectors_keep_the_format_that_they_have() -> None:
    _, params = random_model("llama")
    params["norm"]["weight"] = params["norm"]["weight"].astype("bfloat16")
    found = match_precision(params, Precision())
    assert found.overrides == ((r"norm\.weight", Override(weights="bfloat16")),)
    assert found.quantize is None
    for path, leaf in flatten(params):
        assert found.param_format(path, leaf.ndim) == weight_format(leaf)


def test_a_weight_that_has_its_format_is_not_made_again() -> None:
    """Of one that is composed, or has lost what its format cannot hold, another would come out."""
    packed = as_format(jnp.ones((8, 128), jnp.bfloat16), "bf16-packed")
    precision = Precision(weights="bfloat16", quantize="bf16-packed")
    assert precision.format_chain("weight", 2) == ("bfloat16", "bf16-packed")
    assert precision.cast("weight", packed) is packed


def test_layers_that_differ_have_rules_of_their_own() -> None:
    _, params = random_model("llama", num_hidden_layers=3)
    params = jaxllm.quantize(params, [(r"layers\.[02]\.mlp", "int8"), (".*attn", "int4-g32")])
    found = match_precision(params, Precision())
    for path, leaf in flatten(params):
        assert found.param_format(path, leaf.ndim) == weight_format(leaf), path
    assert (r"layers\.\d+\.self_attn\.q_proj\.weight", "int4-g32") in (found.quantize or ())
    assert len(found.quantize or ()) == 4 + 2 * 3


def test_a_recipe_in_a_file_is_checked(tmp_path: Path) -> None:
    lm = tiny("gpt2")
    lm.save(tmp_path / "plain")
    file = tmp_path / "plain" / "config.json"
    text = file.read_text()
    assert "recipe" not in text
    assert jaxllm.load(tmp_path / "plain").recipe == ()
    file.write_text(text.replace("{", '{"recipe": [1],', 1))
    with pytest.raises(CheckpointError, match=r"recipe.* must be a string"):
        jaxllm.load(tmp_path / "plain")


def test_a_copy_of_the_model_is_what_changes() -> None:
    lm = tiny("llama")
    before = jax.tree.map(lambda x: x.copy(), lm.params)
    made = compress(lm, ["quantize: rtn int8"])
    same(lm.params, before)
    assert dataclasses.replace(made, recipe=()) != lm
