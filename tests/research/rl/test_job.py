"""Reinforcement learning as a job: exact ratios, a torch loop beside it, resuming, bad input."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxllm
from jaxllm.errors import CapacityError, ConfigError, JaxllmError, SamplingError, TokenError
from jaxllm.generation.loops.generate import generate
from jaxllm.generation.sampling.options import make_sampler
from jaxllm.generation.sampling.sampler import GREEDY
from jaxllm.lm import LM
from jaxllm.models import FAMILIES
from jaxllm.models.invariance import has_invariant_rows
from jaxllm.ops import native
from jaxllm.research.rl.answers import AnswerSampler
from jaxllm.research.rl.job import Reinforcement, reinforce
from jaxllm.research.rl.losses import AnswerRows, answer_logprobs
from jaxllm.research.rl.prompts import (
    Prompt,
    Prompts,
    load_reward,
    read_prompts,
    read_scored,
    score_answer,
)
from jaxllm.train import jobs, loop
from jaxllm.train.data.rows import IGNORED
from jaxllm.train.jobs import TrainJob
from jaxllm.train.loop import TrainPlan, TrainResult
from jaxllm.train.optimizer import Optimizer
from jaxllm.weights.paths import flatten
from tests.tiny_models import INVARIANT, RECURRENT, load_twin, marks_of, save_random

TEXTS = ("Once upon a time there was a", "One day", "The dog saw a big red ball and said:")
SMALL = {"group_size": 4, "max_new_tokens": 6}


def count_words(prompt: str, answer: str, line: Any) -> float:
    return len(answer.split()) + 0.1 * len(answer)


@pytest.fixture(scope="module")
def lm(shallow: Callable[[str], Path]) -> LM:
    return jaxllm.load(shallow("llama"), dtype="float32")


def make_prompts(lm: LM, batch: int = 2) -> Prompts:
    return Prompts([Prompt(text, lm.encode(text), {"n": n}) for n, text in enumerate(TEXTS)], batch)


def make_job(lm: LM, reward: Any = count_words, **options: Any) -> TrainJob:
    base = jobs.full_finetune(lm)
    return reinforce(base, make_prompts(lm), reward, Reinforcement(**{**SMALL, **options}))


def run(job: TrainJob, steps: int, lr: float = 1e-3, **options: Any) -> TrainResult:
    plan = TrainPlan(steps=steps, **options.pop("plan", {}))
    optimizer = Optimizer(
        steps=steps, lr=lr, warmup=0.0, schedule="constant", weight_decay=0.0, max_grad_norm=None,
        eps=1e-3,
    )  # fmt: skip
    data: Any = job.data
    return jobs.run_job(job, data, optimizer, plan, show_progress=False, **options)


def keep_rows(job: TrainJob) -> tuple[TrainJob, list[AnswerRows]]:
    """Return the job, and a list that its rows are added to."""
    found: list[AnswerRows] = []

    def prepare(*args: Any) -> AnswerRows:
        assert job.prepare is not None
        rows = job.prepare(*args)
        assert isinstance(rows, AnswerRows)
        found.append(rows)
        return rows

    return dataclasses.replace(job, prepare=prepare), found


@pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=marks_of(family, "llama"))
        for family, dtype in zip(FAMILIES, itertools.cycle(["bfloat16", "float32"]))
        # no promise: exact GELU, LongRoPE, and recurrent layers
        if family not in ("gpt_neox", "phi3", *RECURRENT)
    ],
)
def test_first_ratios_are_exactly_one(family: str, dtype: str, tmp_path: Path) -> None:
    """In the compiled step, with its gradient, every token of a step on new answers has the
    log-probability that sampling used; in the second step on them, not.
    """
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    save_random(tmp_path, family, spread=0.1, **{layers: 2}, **INVARIANT.get(family, {}))
    lm = jaxllm.load(tmp_path, dtype="float32")
    ids = np.random.default_rng(0).integers(3, 131, (3, 9))
    prompts = Prompts([Prompt("", x[: 4 + 2 * n].tolist(), {}) for n, x in enumerate(ids)], 2)
    options = Reinforcement(
        group_size=3, max_new_tokens=12, sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    )
    rewards = iter(np.random.default_rng(1).normal(size=200))
    job = reinforce(
        jobs.full_finetune(lm, dtype), prompts, lambda *_: float(next(rewards)), options
    )
    assert has_invariant_rows(job.lm.model, job.params)
    found = run(job, 4, plan={"num_iterations": 2, "gradient_accumulation_steps": 2})
    drifts = [record.also["drift"] for record in found.records]
    assert drifts[0] == drifts[2] == 0.0
    assert drifts[1] > 0
    assert drifts[3] > 0


@pytest.mark.skipif(not native.is_enabled(), reason="no native kernels")
def test_replayed_logprobs_are_those_of_generate(lm: LM) -> None:
    """Both log-probabilities of a training pass have the bits of `generate`: raw, and after
    processors that depend on the text, truncate, and follow a grammar.
    """
    lm = dataclasses.replace(lm, model=jaxllm.load(lm.path, dtype="float32", invariant=True).model)
    sampling = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2, "regex": "[a-z ,]+"}
    job = make_job(lm, max_new_tokens=10, sampling=sampling)
    assert isinstance(job.prepare, AnswerSampler) and job.data is not None
    batch: Any = jax.tree.map(lambda x: x[None], job.data.batch(0))
    rows = jax.tree.map(lambda x: x[0], job.prepare(lm.params, batch, jax.random.key(5)))
    compiled = jax.jit(answer_logprobs, static_argnums=(0, 4))
    raw_BN, processed_BN = compiled(job.lm.model, lm.params, rows, job.prepare.sampler, 10)
    np.testing.assert_array_equal(processed_BN, rows.logprob_BN)
    assert not np.array_equal(raw_BN, processed_BN)
    one = rows.position_BT[0] >= 0
    begin = int(np.argmax(rows.label_BT[0] != IGNORED))
    prompt, answer = rows.token_BT[0][: begin + 1], rows.label_BT[0][one][begin:]
    forced = make_sampler(logits_processor=[], temperature=0.8)
    found = generate(job.lm.model, lm.params, prompt[None], max_new_tokens=1, sampler=forced,
                     seed=1, processed_logprobs=True)  # fmt: skip
    assert found.processed_logprob_BT is not None
    logits = jaxllm.forward(job.lm.model, lm.params, None, prompt[None]).logits[0, -1]
    token = int(found.token_BT[0, 0])
    expected = jax.nn.log_softmax(logits / 0.8)[token]
    np.testing.assert_allclose(found.processed_logprob_BT[0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(raw_BN[0, 0], jax.nn.log_softmax(logits)[answer[0]], rtol=1e-5)


def test_plain_generation_has_equal_logprobs(lm: LM) -> None:
    """Without processors both log-probabilities are the same; unless asked, one is None."""
    prompt = np.array([lm.encode("One day")])
    options: Any = {"max_new_tokens": 4, "sampler": GREEDY}
    found = generate(lm.model, lm.params, prompt, processed_logprobs=True, **options)
    np.testing.assert_array_equal(found.processed_logprob_BT, found.logprob_BT)
    assert generate(lm.model, lm.params, prompt, **options).processed_logprob_BT is None


@pytest.mark.parametrize(
    ("form", "beta"), [("grpo", 0.1), ("dr-grpo", 0.0), ("dapo", 0.1)],
)  # fmt: skip
def test_ten_steps_equal_torch_loop(form: str, beta: float, lm: LM) -> None:
    """Ten steps, two on each set of answers, have the losses of a torch loop that gets the same
    answers and computes everything else itself.
    """
    options = {"loss": form, "beta": beta, "sampling": {"temperature": 0.8}, "group_size": 4}
    job, sampled = keep_rows(make_job(lm, **options))
    found = run(job, 10, lr=1e-4, plan={"num_iterations": 2})
    model = load_twin(lm.path).torch_model
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-3, weight_decay=0.0)
    losses, high = [], 0.28 if form == "dapo" else 0.2
    for rows in sampled:
        ids, labels, reward = (
            torch.tensor(np.asarray(x[0])) for x in (rows.token_BT, rows.label_BT, rows.reward_B)
        )
        mask, labels = (labels != IGNORED).float(), labels.clamp(min=0).long()
        group = reward.double().view(-1, 4)
        advantage = group - group.mean(1, keepdim=True)
        if form != "dr-grpo":
            advantage = advantage / (group.std(1, keepdim=True) + 1e-4)

        def logprobs(network: Any, temperature: float) -> torch.Tensor:
            scores = (network(ids.long()).logits / temperature).log_softmax(-1)  # noqa: B023
            return scores.gather(2, labels[..., None])[..., 0]  # noqa: B023

        old = logprobs(model, 0.8).detach()
        for _ in range(2):
            ratio, a = torch.exp(logprobs(model, 0.8) - old), advantage.float().view(-1, 1)
            each = -torch.min(ratio * a, ratio.clamp(1 - 0.2, 1 + high) * a)
            d = logprobs(reference, 1.0).detach() - logprobs(model, 1.0)
            each = (each + beta * (torch.exp(d) - d - 1)) * mask
            if form == "grpo":
                loss = (each.sum(1) / mask.sum(1)).mean()
            else:
                loss = each.sum() / (mask.sum() if form == "dapo" else len(mask) * 6)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            losses.append(loss.item())
    assert len(losses) == 10
    ours = [record.loss for record in found.records]
    np.testing.assert_allclose(ours, losses, atol=2e-6, rtol=1e-5)
    assert np.ptp(losses) > 1e-3


def test_interrupted_run_repeats_bits(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed between and within sets of answers ends as an undisturbed one."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_FACTOR", 0.0)
    plan = {"num_iterations": 2, "eval_steps": 1}
    whole = run(make_job(lm, beta=0.1), 6, plan=plan)
    ends = {"step 4", "reward 27"}  # the second step on the second set; within the third set
    messages, calls = list[str](), [0]

    def end_at(place: str) -> None:
        if place in ends:
            ends.remove(place)
            raise KeyboardInterrupt

    def fail(prompt: str, answer: str, line: Any) -> float:
        calls[0] += 1
        end_at(f"reward {calls[0]}")
        return count_words(prompt, answer, line)

    def log(message: str) -> None:
        messages.append(message)
        end_at(message.partition(":")[0])

    def resume() -> TrainResult:
        return run(make_job(lm, fail, beta=0.1), 6, plan=plan, directory=tmp_path, log=log)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            resume()
    again = resume()
    resumed = [message for message in messages if message.startswith("resuming")]
    assert resumed == ["resuming after step 2 of 6", "resuming after step 4 of 6"]
    assert again.records == whole.records
    bits = [{p: np.asarray(x).tobytes() for p, x in flatten(r.params)} for r in (again, whole)]
    assert bits[0] == bits[1]


def test_rewards_rise(lm: LM) -> None:
    """Answers with one wanted token become likelier."""
    job = make_job(lm, lambda _, answer, __: float(answer.count("a")), group_size=8)
    found = run(job, 12, lr=3e-3)
    rewards = [record.also["reward"] for record in found.records]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.5


def test_scored_answers_train_offline(lm: LM, tmp_path: Path) -> None:
    """Equal prompts of a file are a group; the answers' own tokens train, with ratios of 1.

    float32 cannot tell the first group's rewards apart, and the second group's are equal.
    """
    file = tmp_path / "scored.jsonl"
    texts, rewards = (" big dog.", " cat", " a"), (16777218, 16777217, 16777216, *[-777.7] * 3)
    lines = [
        (p, c, rewards[3 * n + i]) for n, p in enumerate(TEXTS[:2]) for i, c in enumerate(texts)
    ]
    named = [dict(zip(("prompt", "completion", "reward"), line, strict=True)) for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in named))
    prompts = Prompts(read_scored(file, lm), 2)
    assert [len(prompt.answers) for prompt in prompts.prompts] == [3, 3]
    job = reinforce(jobs.full_finetune(lm), prompts, None, Reinforcement(loss="dr-grpo"))
    job, kept = keep_rows(job)
    found = run(job, 2)
    assert found.records[0].also["drift"] == 0.0
    rows = jax.tree.map(lambda x: x[0], kept[0])
    group = rows.reward_B.argmax() // 3  # of the first prompt: they are shuffled
    expected = np.zeros((2, 3))
    expected[group] = 1, 0, -1
    assert rows.advantage_B.tolist() == expected.ravel().tolist()
    label_T = rows.label_BT[0][rows.label_BT[0] != IGNORED]
    assert lm.decode(label_T) == " big dog."
    assert label_T[-1] == lm.generation["eos_token_id"]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"group_size": 1}, "group_size"),
    ({"loss": "ppo"}, "loss must be one of grpo, dr-grpo, dapo"),
    ({"clip_low": 0.0}, "clip_low"),
    ({"beta": -1.0}, "beta"),
    ({"sampling": {"num_beams": 2}}, "answers to train on cannot have num_beams"),
    ({"sampling": {"temperature": 0}}, "temperature must be above 0"),
    ({"sampling": {"top_p": 2.0}}, "top_p must be"),
    ({"max_new_tokens": 600}, "exceed the model's context"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(options: dict[str, Any], message: str, lm: LM) -> None:
    with pytest.raises((ConfigError, SamplingError, CapacityError), match=message) as caught:
        make_job(lm, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero, for the answer 'cat'"),
        (lambda *_: float("nan"), "between -1e.09 and 1e.09, got nan, for the answer 'cat'"),
        (lambda *_: -1e9, "must be a number between -1e.09 and 1e.09, got -1000000000.0"),
        (lambda *_: None, "raised TypeError"),
        (lambda: 1.0, "raised TypeError"),
    ],
)
def test_failing_reward_is_named(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        score_answer(reward, Prompt("a", [1], {}), "cat")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rewards", "MODULE:FUNCTION"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("math:nothing", "has no attribute 'nothing'"),
        ("math:pi", "is not a function"),
    ],
)
def test_bad_reward_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    ("content", "scored", "message"),
    [
        ("", False, "there is no prompt in"),
        ('["a"]\n', False, "line 1: must be an object"),
        ('{"prompt": "a"}\n{"text": "b"}\n', False, 'line 2 must be an object with "prompt"'),
        ('{"prompt": "a", "completion": "b"}\n', True, "line 1"),
        ('{"prompt": "a", "completion": " b", "reward": 1}\n', True, "at least 2: got \\[1\\]"),
        ('{"prompt": "a", "completion": "", "reward": 1}\n', True, "the completion is empty"),
        (
            '{"prompt": "One da", "completion": " b", "reward": 1}\n'
            '{"prompt": "One da", "completion": "y", "reward": 1}\n',
            True,
            "line 2: the completion must start with a new token",
        ),
        ('{"prompt": "a", "completion": " b", "reward": 1e99}\n', True, "reward"),
    ],
)
def test_bad_files_are_refused(
    content: str, scored: bool, message: str, lm: LM, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(TokenError, match=message) as caught:
        (read_scored if scored else read_prompts)(file, lm)
    assert isinstance(caught.value, JaxllmError)
    assert "\n" not in str(caught.value)


def test_messages_become_prompts_of_chat_template(lm: LM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages, "wanted": "dog"}))
    (prompt,) = read_prompts(file, lm)
    assert prompt.ids == lm.chat_prompt(messages)
    assert "Tell me a story." in prompt.text
    assert prompt.line["wanted"] == "dog"


def test_prompts_come_in_shuffled_epochs(lm: LM) -> None:
    """Every prompt comes once an epoch, also in batches that run over its end."""
    prompts = make_prompts(lm)
    order = np.concatenate([prompts.batch(n).index_B for n in range(6)])
    assert all(sorted(epoch) == [0, 1, 2] for epoch in order.reshape(4, 3).tolist())
    assert len({tuple(epoch) for epoch in order.reshape(4, 3).tolist()}) > 1
