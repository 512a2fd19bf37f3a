"""Training after a frozen prefix and of prompts, against torch: losses, gradients, texts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jaxllm
from jaxllm.cache.files import load_cache, save_cache
from jaxllm.decode.loops.generate import generate
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.data.rows import Rows
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.prefix import (
    PROMPT_RULES,
    AfterPrefix,
    check_room,
    prompt_cache,
    run_prefix,
    segments_of,
    with_soft_prompt,
    with_trained_prefix,
    without_prompt,
)
from jaxllm.train.step import Setup, start, train_step
from jaxllm.train.trained import Trained, join, split
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision
from tests.twins import Twin, assert_close, load_twin, random_model, save_random, tokens

KEY = jax.random.key(0)
PREFIX = tokens(1, 7, seed=9)[0]
TEXTS = [tokens(1, n, seed=n)[0] for n in (5, 8, 4)]  # two rows of 8 columns, one is packed
CONTEXT = 97


def rows() -> Rows:
    data = Dataset(from_ids(TEXTS), width=8, batch_size=2)
    assert len(data) == 1
    return data.batch(0)


def make_twin(directory: Path, family: str, layers: int) -> Twin:
    name = {"llama": "num_hidden_layers", "gpt2": "n_layer"}[family]
    save_random(directory, family, **{name: layers})
    return load_twin(directory)


def loss_and_gradient(model: Any, params: Params, rules: Any, given: Any) -> tuple[Any, Trained]:
    trained, rest = split(params, rules)

    def loss(trained: Trained, rest: Params, given: Any) -> jax.Array:
        measured = AfterPrefix()(model, join(trained, rest), given, rows(), KEY)
        return measured.total / measured.weight

    found: tuple[Any, Trained] = jax.jit(jax.value_and_grad(loss))(trained, rest, given)
    return found


def torch_loss(run: Any) -> torch.Tensor:
    """The mean over all labels; run: the logits of a text's tokens, `[T, V]`."""
    total = torch.zeros(())
    for text in TEXTS:
        label = torch.tensor(text[1:])
        total = total + torch.nn.functional.cross_entropy(run(text)[:-1], label, reduction="sum")
    return total / sum(len(text) - 1 for text in TEXTS)


def ids(*parts: Any) -> torch.Tensor:
    return torch.tensor(np.concatenate(parts)[None].astype(np.int64))


def test_a_frozen_prefix_is_the_full_run_where_nothing_trained_touches_it(tmp_path: Path) -> None:
    """The last layer's MLP changes no keys and values. The first layer's does: then the gradient
    is that of torch with the prefix run under no_grad, and another than the full run's.
    """
    twin = make_twin(tmp_path, "llama", 2)
    rules = ((r"layers\.\d\.mlp\.down_proj", True),)
    given = run_prefix(twin.model, twin.params, PREFIX.tolist())
    loss, gradient = loss_and_gradient(twin.model, twin.params, rules, given)
    first, last = (gradient[f"layers.{i}.mlp.down_proj.weight"] for i in (0, 1))

    def gradients(run: Any) -> tuple[float, list[np.ndarray]]:
        twin.torch_model.zero_grad()
        found = torch_loss(run)
        found.backward()
        weights = [twin.torch_model.model.layers[i].mlp.down_proj.weight for i in (0, 1)]
        return float(found.detach()), [w.grad.numpy().copy() for w in weights]

    def full(text: np.ndarray) -> torch.Tensor:
        return twin.torch_model(ids(PREFIX, text)).logits[0, len(PREFIX) :]

    def frozen(text: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            past = twin.torch_model(ids(PREFIX), use_cache=True).past_key_values
        return twin.torch_model(ids(text), past_key_values=past).logits[0]

    value, (whole_first, whole_last) = gradients(full)
    assert float(loss) == pytest.approx(value, rel=1e-5)
    assert_close(last, whole_last)
    value, (frozen_first, frozen_last) = gradients(frozen)
    assert float(loss) == pytest.approx(value, rel=1e-5)
    assert_close(last, frozen_last)
    assert_close(first, frozen_first)
    apart = np.linalg.norm(whole_first - first) / np.linalg.norm(whole_first)
    assert apart > 0.05  # what flows through the prefix


def test_a_soft_prompt_is_trained_saved_and_generated_from(tmp_path: Path) -> None:
    twin = make_twin(tmp_path, "gpt2", 1)
    params = with_soft_prompt(twin.model, twin.params, PREFIX.tolist())
    table = twin.torch_model.get_input_embeddings()

    def run(prompt: torch.Tensor, text: np.ndarray) -> torch.Tensor:
        embedded = torch.cat([prompt[None], table(ids(text))], dim=1)
        return twin.torch_model(inputs_embeds=embedded).logits[0, len(prompt) :]

    loss, gradient = loss_and_gradient(twin.model, params, PROMPT_RULES, None)
    assert list(gradient) == ["prompt.embeddings"]
    prompt = table(torch.tensor(PREFIX)).detach().requires_grad_()
    expected = torch_loss(lambda text: run(prompt, text))
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_close(gradient["prompt.embeddings"], prompt.grad.numpy())

    trained, rest = split(params, PROMPT_RULES)
    optimizer = Optimizer(steps=8, rate=0.1, warmup=0.0, decay=0.0)
    setup = Setup(twin.model, AfterPrefix(), optimizer)
    state, losses = start(trained, setup), []
    batch = jax.tree.map(lambda x: x[None], rows())
    for _ in range(8):
        state, metrics = train_step(state, rest, None, batch, KEY, setup=setup)
        losses.append(float(metrics.loss))
    assert losses[0] == pytest.approx(float(loss), rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]

    params = join(state.trained, rest)
    base = without_prompt(params)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (base, twin.params)), strict=True))
    made = prompt_cache(twin.model, params, capacity=20)
    assert made.tokens() == PREFIX.tolist()
    assert np.asarray(made.patched_BS)[0, :7].all()
    save_cache(tmp_path / "prompt", made, twin.model, base)
    cache = load_cache(tmp_path / "prompt", twin.model, base)
    learned = torch.tensor(np.asarray(params["prompt"]["embeddings"]))
    text = TEXTS[0]
    with torch.no_grad():
        assert_close(
            jaxllm.forward(twin.model, base, cache, text[None]).logits[0],
            run(learned, text).numpy(),
        )
        for _ in range(4):
            text = np.append(text, int(run(learned, text)[-1].argmax()))
    said = generate(twin.model, base, TEXTS[0][None], max_new_tokens=4, cache=cache)
    assert np.asarray(said.token_BT)[0].tolist() == text[-4:].tolist()


def test_trained_keys_and_values_have_torchs_gradients(tmp_path: Path) -> None:
    """At first they are those of a text: the loss is that of the text before each row."""
    twin = make_twin(tmp_path, "llama", 1)
    params = with_trained_prefix(twin.model, twin.params, PREFIX.tolist())
    loss, gradient = loss_and_gradient(twin.model, params, PROMPT_RULES, None)
    assert list(gradient) == ["prompt.k.0", "prompt.v.0"]
    with torch.no_grad():
        past = twin.torch_model(ids(PREFIX), use_cache=True).past_key_values
    k, v = (x.detach().requires_grad_() for x in (past.layers[0].keys, past.layers[0].values))

    def run(text: np.ndarray) -> torch.Tensor:
        cache = transformers.DynamicCache()
        cache.update(k, v, 0)
        return twin.torch_model(ids(text), past_key_values=cache).logits[0]

    expected = torch_loss(run)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, tensor in (("k", k), ("v", v)):
        assert_close(gradient[f"prompt.{name}.0"], tensor.grad[0].transpose(0, 1).numpy())
    cache = prompt_cache(twin.model, params, capacity=16)
    logits = jaxllm.forward(twin.model, twin.params, cache, TEXTS[0][None]).logits[0]
    with torch.no_grad():
        assert_close(logits, run(TEXTS[0]).numpy())


def test_a_prompt_may_come_after_a_frozen_prefix() -> None:
    """Of the embeddings of a text: the same as that text after the prefix."""
    model, params = random_model("llama", num_hidden_layers=1)
    middle = TEXTS[1][:3].tolist()
    before = run_prefix(model, params, PREFIX.tolist())
    whole = run_prefix(model, params, [*PREFIX.tolist(), *middle])
    measure = jax.jit(lambda p, given: AfterPrefix()(model, p, given, rows(), KEY).total)
    ours = measure(with_soft_prompt(model, params, middle), before)
    assert float(ours) == pytest.approx(float(measure(params, whole)), rel=1e-5)
    cache = jaxllm.init_cache(model, 1, 16)
    _, cache = jaxllm.prefill(model, params, cache, PREFIX[None])
    made = prompt_cache(model, with_soft_prompt(model, params, middle), capacity=16, prefix=cache)
    assert made.tokens() == [*PREFIX.tolist(), *middle]
    np.testing.assert_allclose(segments_of(made)[0].k[0], whole[0].k[0], atol=1e-5)


def test_bad_input_is_one_clear_line() -> None:
    model, params = random_model("llama", num_hidden_layers=1)
    int8 = model.clone(precision=Precision(cache="int8"))
    two = jaxllm.init_cache(model, 2, 4)
    for make, error, said in (
        (lambda: run_prefix(model, params, []), TokenError, "a prefix is a list of at least one"),
        (lambda: run_prefix(model, params, [131]), TokenError, "the prefix: token id 131"),
        (lambda: segments_of(two), CacheMismatchError, "a cache of one row with a text in it"),
        (lambda: check_room(model, 90, 8), CapacityError, "a prefix of 90 tokens and rows of 8"),
        (lambda: prompt_cache(model, params, capacity=4), ConfigError, "no trained prompt"),
        (
            lambda: AfterPrefix()(int8, params, None, rows(), KEY),
            ConfigError,
            "rounded to int8 has no gradient",
        ),
    ):
        with pytest.raises(error, match=said) as caught:
            make()
        assert "\n" not in str(caught.value)
    check_room(model, 90, CONTEXT - 90)
    assert jnp.isfinite(jnp.asarray(params["norm"]["weight"])).all()
