"""Training MoE models: auxiliary loss, capacity and adapters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import jaxllm
from jaxllm.adapters import LoraConfig
from jaxllm.errors import ConfigError
from jaxllm.lm import LM
from jaxllm.train import jobs
from jaxllm.train.moe_losses import BalancedLoss, add_router_loss, router_loss
from jaxllm.train.optimizer import Optimizer
from jaxllm.train.partition import combine, partition
from jaxllm.train.step import Setup, init_state, train_step
from jaxllm.weights.quantize import quantize
from tests.tiny_models import Twin, make_twin, random_model
from tests.train.test_step import BATCHES, KEY, stacked

OPTIMIZER = Optimizer(steps=2, lr=1e-3)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp("mixtral"), "mixtral")


def lm_of(model: Any, params: Any) -> LM:
    return LM(model.config, model, params, None, {}, Path("mixture"))


def scores(layers: int = 3) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    real_BT = np.arange(7)[None] >= [[0], [3]]  # padding on the left, as in generation
    return [rng.normal(0, 2, (2, 7, 5)).astype(np.float32) for _ in range(layers)], real_BT


def theirs(each: list[np.ndarray], real_BT: np.ndarray | None) -> float:
    mask = None if real_BT is None else torch.tensor(real_BT.astype(np.int64))
    gates = tuple(torch.tensor(x.reshape(-1, 5)) for x in each)
    return float(load_balancing_loss_func(gates, 5, 2, mask))


def test_router_loss_equals_transformers_and_ignores_padding() -> None:
    each, real_BT = scores()
    ours = [jnp.asarray(x) for x in each]
    for real in (real_BT, np.ones_like(real_BT)):
        found = float(router_loss(ours, jnp.asarray(real), 2))
        assert found == pytest.approx(theirs(each, real), rel=1e-5)
    assert float(router_loss(ours, jnp.ones((2, 7), bool), 2)) == pytest.approx(
        theirs(each, None), rel=1e-5
    )
    single_expert = [theirs([x], real_BT) for x in each]
    by_layer = float(router_loss(ours, jnp.asarray(real_BT), 2, by_layer=True))
    assert by_layer == pytest.approx(np.mean(single_expert), rel=1e-5)


def test_balanced_loss_gradient_equals_torch(twin: Twin) -> None:
    rows = BATCHES[0]
    ids = torch.tensor(np.asarray(rows.token_BT, np.int64))
    real = torch.tensor(np.asarray(rows.position_BT >= 0).astype(np.int64))
    labels = torch.tensor(np.asarray(rows.label_BT, np.int64))
    twin.torch_model.zero_grad()
    out = twin.torch_model(ids, attention_mask=real, output_router_logits=True)
    text = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    loss = text + 0.5 * out.aux_loss
    loss.backward()
    trained, rest = partition(twin.params)
    setup = Setup(twin.model, BalancedLoss(0.5), OPTIMIZER)

    def ours(trained: Any) -> jax.Array:
        measured = setup.objective(twin.model, combine(trained, rest), None, rows, KEY)
        return measured.total / measured.weight

    value, gradients = jax.jit(jax.value_and_grad(ours))(trained)
    assert float(value) == pytest.approx(loss.item(), rel=1e-5)
    named = dict(twin.torch_model.named_parameters())
    expected = {
        "layers.0.mlp.gate.weight": named["model.layers.0.mlp.gate.weight"].grad,
        "layers.0.mlp.experts.gate_proj.weight": named[
            "model.layers.0.mlp.experts.gate_up_proj"
        ].grad[:, :56],
        "layers.0.mlp.experts.down_proj.weight": named["model.layers.0.mlp.experts.down_proj"].grad,
        "layers.0.self_attn.q_proj.weight": named["model.layers.0.self_attn.q_proj.weight"].grad,
    }
    for path, gradient in expected.items():
        size = gradient.abs().max().item()
        np.testing.assert_allclose(gradients[path], gradient, atol=2e-5 * size + 1e-7, err_msg=path)
    np.testing.assert_allclose(
        np.sqrt(sum(float((g**2).sum()) for g in gradients.values())),
        torch.nn.utils.get_total_norm([p.grad for p in named.values()]).item(),
        rtol=1e-4,
    )


def one_step(job: jobs.TrainJob) -> dict[str, np.ndarray]:
    trained, rest = partition(job.params, job.rules, job.compute_params)
    setup = Setup(job.model, job.objective, OPTIMIZER)
    state, metrics = train_step(
        init_state(trained, setup), rest, job.extra_inputs, stacked(BATCHES[0]), KEY, setup=setup
    )
    assert bool(metrics.finite) and float(metrics.grad_norm) > 0
    assert ("router" in metrics.extras) == isinstance(job.objective, BalancedLoss)
    return {path: np.asarray(x) for path, x in state.trained.items()}


@pytest.mark.full
def test_lora_trains_attention_over_quantized_experts(twin: Twin) -> None:
    """all-linear adapts only the attention projections of a mixture, and a step changes them."""
    small = quantize(twin.params, "int8")
    lm = lm_of(twin.model, small)
    config = LoraConfig(r=2, target_modules="all-linear")
    job = add_router_loss(jobs.lora(lm, config), 0.01, capacity=1.0)
    before, after = partition(job.params, job.rules)[0], one_step(job)
    assert {path.split(".")[3] for path in after} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert any((after[path] != np.asarray(before[path])).any() for path in after)


def test_lora_refuses_experts_and_routers(twin: Twin) -> None:
    lm = lm_of(twin.model, twin.params)
    for name in ("w1", "gate", "experts", "gate_proj"):
        with pytest.raises(ConfigError, match="experts and routers cannot have"):
            jobs.lora(lm, LoraConfig(r=2, target_modules=(name,)))


def test_add_router_loss_needs_experts_and_keeps_config(twin: Twin) -> None:
    """Capacity and router loss change only the training job, not the saved config, and are refused
    for dense models.
    """
    job = jobs.full_finetune(lm_of(twin.model, twin.params))
    bound = add_router_loss(job, capacity=1.25)
    assert (bound.model.config.capacity_factor, bound.lm.config) == (1.25, twin.config)
    assert add_router_loss(job) is job
    model, params = random_model("llama", num_hidden_layers=1)
    for options in ({"factor": 0.1}, {"capacity": 2.0}):
        with pytest.raises(ConfigError, match="this llama has no experts"):
            add_router_loss(jobs.full_finetune(lm_of(model, params)), **options)
    with pytest.raises(ConfigError, match="finite and >= 0"):
        add_router_loss(job, -1.0)


@pytest.mark.full
@pytest.mark.usefixtures("demo_names")
def test_train_command_trains_mixture_with_router_loss(run: Any, tmp_path: Path) -> None:
    mixture, tuned, text = (tmp_path / name for name in ("made", "tuned", "story.txt"))
    text.write_text("Once upon a time there was a girl who had a red ball.\n" * 12)
    assert run("upcycle", "demo:llama", mixture, "--experts", 3)[0] == 0
    arguments = ("train", "full", mixture, tuned, "--data", text, "--length", 32, "--batch-size", 2)
    more = ("--steps", 1, "--router-loss", 0.01, "--router-loss-by-layer", "--eval-split", 0)
    status, _, err = run(*arguments, *more, "--capacity-factor", 2)
    assert status == 0, err
    assert jaxllm.load(tuned).config == jaxllm.load(mixture).config
