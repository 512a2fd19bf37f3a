"""Training after a frozen prefix, and prompt and prefix tuning, compared with torch."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

import jaxllm
from jaxllm.adapters import LoraConfig, attach_adapter, read_adapter
from jaxllm.cache.files import load_cache, save_cache
from jaxllm.errors import CacheMismatchError, CapacityError, ConfigError, TokenError
from jaxllm.train import jobs
from jaxllm.train.data.dataset import Dataset
from jaxllm.train.data.examples import from_ids
from jaxllm.train.data.rows import Rows
from jaxllm.train.frozen_prefix import (
    PROMPT_KINDS,
    PROMPT_RULES,
    PrefixLoss,
    check_context,
    prompt_cache,
    prompt_tuning,
    remove_prompt,
    run_prefix,
    to_segments,
    with_prefix,
    with_soft_prompt,
    with_trained_prefix,
)
from jaxllm.train.partition import TrainedParams, combine, partition
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.paths import Params
from jaxllm.weights.precision import Precision
from tests.tiny_models import assert_close, make_twin, random_model, tokens
from tests.train.test_constraints import Descent

KEY = jax.random.key(0)
PREFIX = tokens(1, 7, seed=9)[0]
TEXTS = [tokens(1, n, seed=n)[0] for n in (5, 8, 4)]  # two rows of 8 columns, one of them packed
CONTEXT = 97
FIRST, RATE = "layers.0.mlp.down_proj.weight.b", 0.05


def rows() -> Rows:
    data = Dataset(from_ids(TEXTS), width=8, batch_size=2)
    assert len(data) == 1
    return data.batch(0)


def compiled_loss(model: Any) -> Any:
    """Return a compiled function for the mean loss after a prefix and its gradient."""

    def loss(trained: TrainedParams, rest: Params, given: Any) -> jax.Array:
        measured = PrefixLoss()(model, combine(trained, rest), given, rows(), KEY)
        return measured.total / measured.weight

    return jax.jit(jax.value_and_grad(loss))


def torch_loss(run: Any) -> torch.Tensor:
    """Return the mean loss over all labels; `run` returns the logits `[T, V]` of a text."""
    total = torch.zeros(())
    for text in TEXTS:
        label = torch.tensor(text[1:])
        total = total + torch.nn.functional.cross_entropy(run(text)[:-1], label, reduction="sum")
    return total / sum(len(text) - 1 for text in TEXTS)


def ids(*parts: Any) -> torch.Tensor:
    return torch.tensor(np.concatenate(parts)[None].astype(np.int64))


def test_frozen_prefix_loss_and_gradients_equal_peft(tmp_path: Path) -> None:
    """An adapter of the last MLP gives the full run; one of an earlier layer gives PEFT with the
    adapter disabled for the prefix.
    """
    twin = make_twin(tmp_path, "llama", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora_config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["down_proj"])
        theirs = peft.get_peft_model(twin.torch_model, lora_config)
        torch.manual_seed(0)
        lora = {n: p for n, p in theirs.named_parameters() if "lora_" in n}
        with torch.no_grad():
            for parameter in lora.values():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        theirs.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", twin.config)
    params = attach_adapter(twin.config, twin.params, adapter)
    given = run_prefix(twin.model, twin.params, PREFIX.tolist())  # the model without the adapter
    trained, rest = partition(params, ((r".*\.(a|b)", True),))
    assert len(trained) == len(lora) == 4

    def full(text: np.ndarray) -> torch.Tensor:
        return theirs(input_ids=ids(PREFIX, text)).logits[0, len(PREFIX) :]

    def frozen(text: np.ndarray) -> torch.Tensor:
        with torch.no_grad(), theirs.disable_adapter():
            past = theirs(input_ids=ids(PREFIX), use_cache=True).past_key_values
        return theirs(input_ids=ids(text), past_key_values=past).logits[0]

    def expected(run: Any) -> tuple[float, dict[str, np.ndarray]]:
        theirs.zero_grad()
        loss = torch_loss(run)
        loss.backward()
        found = {}
        for name, parameter in lora.items():
            layer, side = name.split("layers.")[1][0], name.split("lora_")[1][0].lower()
            path = f"layers.{layer}.mlp.down_proj.weight.{side}"
            found[path] = parameter.grad.numpy().copy()
        return float(loss.detach()), found

    loss_of = compiled_loss(twin.model)
    loss, gradient = loss_of(trained, rest, given)
    value, target = expected(frozen)
    assert float(loss) == pytest.approx(value, rel=1e-5)
    for path, array in target.items():
        assert_close(gradient[path], array)
    value, target = expected(full)
    assert abs(value - float(loss)) > 1e-3
    assert np.abs(target[FIRST] - gradient[FIRST]).max() > 0.05 * np.abs(target[FIRST]).max()

    off = {**trained, FIRST: jnp.zeros_like(trained[FIRST])}  # disables the first layer's adapter
    with torch.no_grad():
        next(p for n, p in lora.items() if "layers.0" in n and "lora_B" in n).zero_()
    loss, gradient = loss_of(off, rest, given)
    value, target = expected(full)
    assert float(loss) == pytest.approx(value, rel=1e-5)
    for path in (p for p in target if p.startswith("layers.1")):
        assert_close(gradient[path], target[path])


def test_soft_prompt_training_equals_torch_and_saves_cache(tmp_path: Path) -> None:
    """A soft prompt after a frozen prefix has the loss and gradient of torch, and its saved cache
    gives the logits of torch.
    """
    twin = make_twin(tmp_path, "gpt2")
    before, prompt_ids = PREFIX[:3], PREFIX[3:]
    params = with_soft_prompt(twin.model, twin.params, prompt_ids.tolist())
    trained, rest = partition(params, PROMPT_RULES)
    assert list(trained) == ["prompt.embeddings"]
    cache = jaxllm.init_cache(twin.model, 1, 20)
    _, cache = jaxllm.prefill(twin.model, twin.params, cache, before[None])
    given = to_segments(cache)
    setup = Setup(twin.model, PrefixLoss(), Descent(RATE))
    state, losses, states = init_state(trained, setup), [], []
    batch = jax.tree.map(lambda x: x[None], rows())
    for _ in range(4):
        states.append(np.array(state.trained["prompt.embeddings"]))
        state, metrics = train_step(state, rest, given, batch, KEY, setup=setup)
        losses.append(float(metrics.loss))
    assert losses == sorted(losses, reverse=True)

    table = twin.torch_model.get_input_embeddings()

    def run(prompt: torch.Tensor, text: np.ndarray) -> torch.Tensor:
        embedded = torch.cat([table(ids(before)), prompt[None], table(ids(text))], dim=1)
        return twin.torch_model(inputs_embeds=embedded).logits[0, len(PREFIX) :]

    prompt = table(torch.tensor(prompt_ids)).detach().requires_grad_()
    expected = torch_loss(lambda text: run(prompt, text))
    expected.backward()
    assert losses[0] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_close((states[0] - states[1]) / RATE, prompt.grad.numpy())

    params = combine(state.trained, rest)
    base = remove_prompt(params)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (base, twin.params)), strict=True))
    saved = prompt_cache(twin.model, params, capacity=20, prefix=cache)
    assert saved.tokens() == PREFIX.tolist()
    assert np.asarray(saved.patched_BS)[0, :7].tolist() == [False] * 3 + [True] * 4
    save_cache(tmp_path / "prompt", saved, twin.model, base)
    again = load_cache(tmp_path / "prompt", twin.model, base)
    learned = torch.tensor(np.asarray(params["prompt"]["embeddings"]))
    logits = jaxllm.forward(twin.model, base, again, TEXTS[0][None]).logits[0]
    with torch.no_grad():
        assert_close(logits, run(learned, TEXTS[0]).numpy())


def test_prefix_tuning_gradients_equal_torch(tmp_path: Path) -> None:
    """Trained keys and values start as those of a text, so that the first loss is that of the text
    as a prefix.
    """
    twin = make_twin(tmp_path, "llama")
    params = with_trained_prefix(twin.model, twin.params, PREFIX.tolist())
    trained, rest = partition(params, PROMPT_RULES)
    assert trained.keys() == {"prompt.k.0", "prompt.v.0"}
    loss, gradient = compiled_loss(twin.model)(trained, rest, None)
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
    assert cache.tokens() == PREFIX.tolist()
    for ours, theirs in ((cache.tail.k, k), (cache.tail.v, v)):
        assert_close(ours[0][0, :7], theirs[0].detach().transpose(0, 1).numpy())


def test_prefix_training_refuses_invalid_input() -> None:
    model, params = random_model("llama", num_hidden_layers=1)
    int8 = model.clone(precision=Precision(cache="int8"))
    two = jaxllm.init_cache(model, 2, 4)
    for make, error, message in (
        (lambda: run_prefix(model, params, []), TokenError, "a prefix must be a list"),
        (lambda: run_prefix(model, params, [131]), TokenError, "the prefix: token id 131"),
        (lambda: to_segments(two), CacheMismatchError, "a cache of one row that is not empty"),
        (lambda: check_context(model, 90, 8), CapacityError, "a prefix of 90 tokens and rows of 8"),
        (lambda: prompt_cache(model, params, capacity=4), ConfigError, "no trained prompt"),
        (
            lambda: PrefixLoss()(int8, params, None, rows(), KEY),
            ConfigError,
            "int8 cache has no gradient",
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)
    check_context(model, 90, CONTEXT - 90)


@pytest.fixture(scope="module")
def lm(shallow: Callable[[str], Path]) -> jaxllm.LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


def encode(lm: jaxllm.LM, text: str, bos: bool = False) -> list[int]:
    assert lm.tokenizer is not None
    return lm.tokenizer.encode(text, bos=bos)


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_untrained_prompt_cache_equals_its_text(lm: jaxllm.LM, kind: str, tmp_path: Path) -> None:
    """The cache file of an untrained prompt generates like its text, also after a frozen prefix."""
    begin, rest = encode(lm, "One day, Lily", bos=True), encode(lm, " went to the")
    expected = lm.generate([*begin, *rest], max_new_tokens=5)
    job = prompt_tuning(lm, begin, kind=kind)
    job.finish(job.params, tmp_path / "prompt.cache")
    cache = load_cache(tmp_path / "prompt.cache", lm.model, lm.params)
    assert cache.tokens() == begin
    found = lm.generate([*begin, *rest], max_new_tokens=5, cache=cache)
    assert found.tokens == expected.tokens
    after_prefix = prompt_tuning(lm, rest, kind="embeddings", prefix=cache)
    after_prefix.finish(after_prefix.params, tmp_path / "both.cache")
    both = load_cache(tmp_path / "both.cache", lm.model, lm.params)
    assert both.tokens() == [*begin, *rest]


def test_with_prefix_wraps_training_job(lm: jaxllm.LM) -> None:
    """with_prefix adds the prefix to a LoRA job; a job without the next-token loss and unknown
    prompt kinds are refused.
    """
    job = jobs.lora(lm, LoraConfig(r=2, target_modules=("q_proj",)))
    begin = encode(lm, "One day, Lily", bos=True)
    found = with_prefix(job, begin)
    assert found.objective == PrefixLoss()
    assert [s.token_BS.tolist() for s in found.extra_inputs] == [[begin]]
    assert found.params is job.params
    with pytest.raises(ConfigError, match="needs the next-token loss"):
        with_prefix(found, begin)
    with pytest.raises(ConfigError, match="must be embeddings or entries, got 'words'"):
        prompt_tuning(lm, begin, kind="words")
