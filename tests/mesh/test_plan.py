"""A plan's bytes and collectives are those of the arrays and programs that then run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.cache.kv import init_cache
from jaxllm.checkpoint import Checkpoint
from jaxllm.errors import ConfigError
from jaxllm.mesh.axes import Axes
from jaxllm.mesh.counts import counts
from jaxllm.mesh.placing import per_device
from jaxllm.plan.estimate import Asked, Plan, plan
from jaxllm.plan.hardware import HARDWARE, hardware
from jaxllm.plan.propose import proposals
from jaxllm.plan.traffic import Collective, rows_of, step
from jaxllm.steps import _decode_step, _prefill
from jaxllm.weights.precision import Precision
from tests.mesh.made import FAMILIES, WIDE, one, spread

pytestmark = pytest.mark.devices
FULL = pytest.mark.full
ROWS, SLOTS, CHUNK = 4, 32, 8
CASES = [
    ("llama", "tensor=2", None, False),
    ("gpt2", "data=2,stage=2,tensor=2", None, False),
    ("mixtral", "expert=2,tensor=2", None, False),
    pytest.param("gpt2", "data=2,tensor=2", None, False, marks=FULL),
    pytest.param("llama", "data=2,tensor=2:tokens", None, False, marks=FULL),
    pytest.param("mixtral", "data=2,expert=2,tensor=2", None, False, marks=FULL),
    *(pytest.param(f, m, None, False, marks=FULL) for f in FAMILIES
      for m in ("tensor=2", "data=2,tensor=4", "tensor=8")),
    *(pytest.param(f, m, None, True, marks=FULL) for f in ("llama", "gpt2")
      for m in ("tensor=2", "data=2,tensor=4")),
    *(pytest.param("llama", "tensor=2", q, False, marks=FULL) for q in ("int8", "int4")),
]  # fmt: skip


def asked(model: Any, axes: Axes = Axes(), exact: bool = False) -> Asked:  # noqa: B008
    opened = Checkpoint(Path("random"), model.config, {}, {}, model.precision)
    return Asked(opened, model.precision, HARDWARE["h100"], axes, ROWS, SLOTS, exact)


def in_all(found: list[Collective]) -> dict[str, tuple[int, int]]:
    kinds = {c.kind: [o for o in found if o.kind == c.kind] for c in found}
    return {
        kind: (sum(c.count for c in some), sum(c.count * c.bytes for c in some))
        for kind, some in kinds.items()
    }


@pytest.mark.parametrize(("family", "mesh", "quantize", "exact"), CASES)
def test_bytes_and_collectives_are_the_programs_own(
    family: str, mesh: str, quantize: str | None, exact: bool
) -> None:
    precision = Precision(quantize=quantize)
    changes = WIDE.get(family, {}) if quantize else {}
    if "expert" in mesh:
        changes = {"num_local_experts": 8}
    model, params = one(family, precision, **changes)
    over, shared = spread(model, params, mesh, exact=exact)
    found = plan(asked(over, over.axes, exact))
    assert max(per_device(shared).values()) == found.weights.held
    cache = init_cache(over, ROWS, SLOTS)
    scalars = 4 * (1 + rows_of(over.axes, ROWS))  # the cursor, and each row's next position
    assert max(per_device(cache).values()) == found.cache + scalars
    for tokens in (1, CHUNK):
        ran = collectives(over, shared, cache, tokens)
        wanted = in_all(step(over.config, precision, over.axes, ROWS, tokens, exact=exact))
        if over.axes.expert > 1:  # buffers of two sizes, for even and for uneven routes
            (calls, size), (planned, bytes_) = ran.pop("all-to-all"), wanted.pop("all-to-all")
            assert calls in (planned, 2 * planned)
            assert size >= bytes_
            # As many sums, and more of them, are in the program for what is less even.
            assert ran.pop("all-reduce") >= wanted.pop("all-reduce")
            assert ran == wanted
            continue
        # Whether rows have tokens is a few bytes, which all must know. XLA makes one sum of two
        # that are added (GPT-NeoX's), or that stand side by side (of OLMo 2's norms).
        calls, size = ran.pop("all-reduce", (0, 0))
        sums, summed = wanted.pop("all-reduce", (0, 0))
        merged = over.config.num_hidden_layers * (family in ("gpt_neox", "olmo2"))
        assert sums - merged <= calls <= sums + 2
        assert size <= summed + 16
        assert family == "gpt_neox" or size >= summed
        assert ran == wanted


@pytest.mark.parametrize("mesh", ["sequence=4", pytest.param("sequence=2:heads", marks=FULL)])
def test_a_token_beside_a_split_text(mesh: str) -> None:
    over, shared = spread(*one("llama"), mesh)
    cache = init_cache(over, ROWS, SLOTS)
    found = plan(asked(over, over.axes))
    assert max(per_device(cache).values()) == found.cache + 4 * (1 + ROWS)
    assert max(per_device(shared).values()) == found.weights.held
    ran = collectives(over, shared, cache, 1)
    assert ran == in_all(step(over.config, over.precision, over.axes, ROWS, 1))


def collectives(model: Any, params: Any, cache: Any, tokens: int) -> dict[str, tuple[int, int]]:
    """Those of a step of so many tokens a row, compiled: how many of a kind, and their bytes."""
    token_BT = jnp.zeros((ROWS, tokens), jnp.int32)
    given: Any = (cache, (), model, params, token_BT, token_BT, False)
    if tokens == 1:
        lowered = jax.jit(_decode_step, static_argnums=(2, 6)).lower(*given)
    else:
        lowered = jax.jit(_prefill, static_argnums=(2, 6, 7)).lower(*given, tokens)
    found = counts(lowered.compile().as_text())
    return {kind: (c.calls, c.bytes) for kind, c in found.items()}


def test_more_rows_and_tokens_fit_until_they_do_not() -> None:
    model, _ = one("llama")
    small = dataclasses.replace(HARDWARE["h100"], memory=4e6)
    first = plan(dataclasses.replace(asked(model), hardware=small))

    def at(**changes: int) -> Plan:
        return plan(dataclasses.replace(first.asked, **changes))

    assert at(batch=first.most_batch).fits
    assert not at(batch=first.most_batch + 1).fits
    assert at(context=first.most_context).fits
    assert not at(context=first.most_context + 1).fits


def test_idle_shares_are_those_of_the_schedule() -> None:
    """Of 4 stages with 1, 4 and 16 microbatches: 75 %, 42.86 % and 15.8 % of all ticks."""
    model, _ = one("llama", num_hidden_layers=4)
    for groups, idle in ((1, 3 / 4), (4, 3 / 7), (16, 3 / 19)):
        some = dataclasses.replace(asked(model, Axes(stage=4)), batch=16, groups=groups)
        found = plan(some)
        assert (found.idle, found.overhead) == (idle, 3 / groups)
    with pytest.raises(ConfigError, match=r"16 rows .* do not divide into 5 microbatches"):
        plan(dataclasses.replace(asked(model, Axes(stage=4)), batch=16, groups=5))


def test_meshes_are_proposed_that_divide_the_model_the_best_first() -> None:
    model, _ = one("llama")  # 2 layers, 2 key/value heads of 8 query heads
    found = proposals(asked(model), 8)
    meshes = [str(p.asked.axes) for p in found]
    assert set(meshes) == {
        "tensor=8", "data=2,tensor=4", "data=4,tensor=2", "stage=2,tensor=4",
        "data=2,stage=2,tensor=2", "data=4,stage=2",
    }  # fmt: skip
    assert [p.token_time for p in found] == sorted(p.token_time for p in found)
    tight = dataclasses.replace(HARDWARE["h100"], memory=found[0].total / 0.9 - 1)
    again = proposals(dataclasses.replace(asked(model), hardware=tight), 8)
    assert sorted(p.fits for p in again) == [p.fits for p in again][::-1]
    with pytest.raises(ConfigError, match="no mesh of 7 devices divides"):
        proposals(asked(model), 7)


def test_hardware_is_a_name_or_numbers() -> None:
    assert hardware("H100") == HARDWARE["h100"]
    assert hardware("h100,memory=94g").memory == 94e9
    made = hardware("flops=1.5t,memory=16gb,bandwidth=20g,link=1e10,node=2")
    assert (made.flops, made.memory, made.link, made.node) == (1.5e12, 16e9, 1e10, 2)
    for text, said in (
        ("h900", "known: a100, h100"),
        ("flops=1t", "memory, bandwidth, link must be given"),
        ("h100,memory=lots", "NAME=NUMBER"),
        ("h100,speed=1g", "NAME=NUMBER with a name of flops"),
        ("h100,memory=0", "memory must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            hardware(text)
