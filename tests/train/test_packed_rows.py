"""Packed rows equal separate documents: losses and gradients of torch; rematerialization."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxllm import steps
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import build_examples
from jaxllm.train.data.rows import IGNORED, Example, Rows
from jaxllm.weights.paths import Params, flatten
from tests.tiny_models import Twin, assert_close, make_twin, our_arrays, random_model, tokens

LENGTHS = (6, 9, 3, 7)  # two rows of 12 columns with padding in both
WIDTH = 12


def examples() -> list[Example]:
    """Return documents with ignored first labels; the third has one label only."""
    read = (1, 4, 2, 1)
    return [
        Example(ids.astype(np.int32), np.arange(len(ids)) >= n)
        for n, ids in zip(read, np.split(tokens(1, sum(LENGTHS))[0], np.cumsum(LENGTHS)[:-1]),
                          strict=True)
    ]  # fmt: skip


def logits(model: Any, params: Params, rows: Rows) -> jax.Array:
    trace, _, _ = steps.run_model(
        model,
        params,
        (),
        jnp.asarray(rows.token_BT),
        jnp.asarray(rows.position_BT),
        document_BT=jnp.asarray(rows.document_BT),
    )
    return trace.logits


def loss(params: Params, model: Any, rows: Rows) -> jax.Array:
    """Return the sum of the losses of all counted labels."""
    label_BT = jnp.asarray(rows.label_BT)
    logprob_BTV = jax.nn.log_softmax(logits(model, params, rows))
    chosen = jnp.take_along_axis(logprob_BTV, jnp.maximum(label_BT, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(label_BT == IGNORED, 0.0, chosen).sum()


def torch_loss(twin: Twin, example: Example) -> Any:
    ids = torch.tensor(example.token_T[None].astype(np.int64))
    out = twin.torch_model(ids).logits[0, :-1]
    label = torch.where(torch.tensor(example.loss_mask_T[1:]), ids[0, 1:], IGNORED)
    return torch.nn.functional.cross_entropy(out, label, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_packed_loss_and_gradients_equal_separate_documents(family: str, tmp_path: Path) -> None:
    """mistral is a llama with a sliding window, which starts anew in each document."""
    changes = {} if family == "gpt2" else {"sliding_window": 3}
    twin, documents = make_twin(tmp_path, family, **changes), examples()
    data = Dataset(build_examples([example] for example in documents), width=WIDTH, batch_size=2)
    rows = data.batch(0)
    assert len(data) == 1
    assert (rows.position_BT < 0).any(axis=1).all()
    total = sum(torch_loss(twin, example) for example in documents)
    total.backward()
    ours, gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)(
        twin.params, twin.model, rows
    )
    assert_close(ours, total.detach().numpy())
    named = twin.torch_model.named_parameters()
    theirs = our_arrays(twin, {name: parameter.grad for name, parameter in named})
    found = dict(flatten(gradients))
    assert found.keys() == theirs.keys()
    for path, gradient in found.items():
        assert_close(gradient, theirs[path])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_remat_gradients_equal_plain(family: str) -> None:
    model, params = random_model(family)
    rows = Dataset(
        build_examples([example] for example in examples()), width=WIDTH, batch_size=2
    ).batch(0)
    plain, remat = (
        jax.jit(jax.grad(loss), static_argnums=1)(params, model.clone(remat=on), rows)
        for on in (False, True)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, remat)
