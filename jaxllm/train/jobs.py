"""Training jobs: each kind of training makes a `TrainJob` of a model, which one loop runs.

This module has full fine-tuning and LoRA; `frozen_prefix` has others.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxllm.adapters import (
    Adapter,
    LoraConfig,
    extract_adapter,
    init_adapter,
    make_attacher,
    with_config,
    write_adapter,
)
from jaxllm.checkpoints.resume import TensorStore
from jaxllm.lm import LM
from jaxllm.ops.target import target
from jaxllm.runtime.multihost import check_processes_agree
from jaxllm.runtime.validation import check_dtype, check_seed
from jaxllm.sharding.sharded_model import attach_adapter, with_sharded_rows
from jaxllm.train.data.rows import Data
from jaxllm.train.loop import PrepareRows, TrainPlan, TrainResult, train
from jaxllm.train.objective import NextToken, Objective
from jaxllm.train.partition import ALL_PARAMS, Rules
from jaxllm.train.step import Constraint, OptimizerConfig, Setup
from jaxllm.weights.model import Model
from jaxllm.weights.paths import Params, map_leaves
from jaxllm.weights.precision import cast_arrays, match_precision
from jaxllm.weights.types.lora import LoraWeight

_ADAPTERS: Rules = ((r".*\.weight\.(a|b|magnitude)", True),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A training job.

    Attributes:
        lm, params: the model, and its parameters at the start.
        compute_params: the parameters in the compute dtype, if it differs; master weights are
            float32 anyway.
        rules: which parameters are trained.
        extra_inputs: further arrays for the objective.
        finish: writes the result into a directory.
        data, eval_data: replace those of `run_job`, if a teacher's outputs were added to them.
        metric: a further metric of the objective that shows progress better than its loss.
    """

    lm: LM
    params: Params
    objective: Objective
    finish: Callable[[Params, Path], None]
    compute_params: Params | None = None
    rules: Rules = ALL_PARAMS
    extra_inputs: Any = None
    constraint: Constraint | None = None
    prepare: PrepareRows | None = None
    data: Data | None = None
    eval_data: Data | None = None
    metric: str | None = None

    @property
    def model(self) -> Model:
        return self.lm.model


def full_finetune(
    lm: LM,
    dtype: str = "float32",
    *,
    rules: Rules = ALL_PARAMS,
    objective: Objective | None = None,
    constraint: Constraint | None = None,
) -> TrainJob:
    """Train all weights, or the selection of `rules`.

    Args:
        lm: in float32, since the master weights start as its parameters.
        dtype: of computation and of the result; sparse and low-rank weights keep their format.
    """
    dtype = check_dtype("dtype", dtype)
    precision = dataclasses.replace(lm.model.precision, quantize=None).with_dtype(dtype)
    ran = dataclasses.replace(lm, model=lm.model.clone(precision=precision))

    def finish(params: Params, directory: Path) -> None:
        model = ran.model
        if not model.is_sharded:  # a sharded model's `save` finds the formats
            model = model.clone(precision=match_precision(params, precision))
        dataclasses.replace(ran, model=model, params=params).save(directory)

    return TrainJob(
        lm=ran,
        params=lm.params,
        compute_params=None if dtype == "float32" else cast_arrays(lm.params, precision),
        objective=objective or NextToken(),
        rules=rules,
        constraint=constraint,
        finish=finish,
    )


def lora(lm: LM, config: LoraConfig, *, seed: int = 0, start: Adapter | None = None) -> TrainJob:
    """Train an adapter; the weights, in any format, are frozen. The result is a PEFT directory.

    Args:
        seed: of the initialization.
        start: an adapter of this configuration to continue from.

    Raises:
        ConfigError: For target modules that the model does not have, and for a `start` with other
            modules, ranks or scales.
    """
    key = jax.random.key(check_seed(seed))
    if start is None:
        adapter = init_adapter(lm.config, lm.params, config, key)
    else:
        adapter = with_config(lm.config, start, config)

    def finish(params: Params, directory: Path) -> None:
        leaves = map_leaves(lambda _, leaf: _extract_adapters(leaf), params)
        trained = extract_adapter(lm.config, lm.model.gather(leaves), config)
        write_adapter(directory, trained, lm.config, base=str(lm.path))

    return TrainJob(
        lm=lm,
        params=attach_adapter(lm.model, lm.params, make_attacher(lm.config, adapter)),
        objective=NextToken(),
        rules=_ADAPTERS,
        finish=finish,
    )


def _extract_adapters(leaf: Any) -> Any:
    """Return the adapters of a weight, without the weight."""
    is_adapter = isinstance(leaf, LoraWeight)
    return leaf.replace(weight=_extract_adapters(leaf.weight)) if is_adapter else None


def run_job(
    job: TrainJob,
    data: Data,
    optimizer: OptimizerConfig,
    plan: TrainPlan,
    *,
    eval_data: Data | None = None,
    remat: bool = False,
    **options: Any,
) -> TrainResult:
    """Run a job. Raises what `loop.train` raises.

    Args:
        remat: recompute the inside of each block in the backward pass (gradient checkpointing).
        options: the other arguments of `loop.train`. If there is a `directory`, the caller removes
            the state in it (`delete_state`) after writing the result.
    """
    model = with_sharded_rows(job.model).clone(remat=remat)
    setup = Setup(model, job.objective, optimizer, job.constraint)
    data, eval_data = job.data or data, job.eval_data or eval_data
    whole = (getattr(some, "has_one_document", False) for some in (data, eval_data or data))
    if target() == "cuda" and job.objective == NextToken() and hasattr(model, "packed"):
        setup = setup._replace(model=model.clone(packed=all(whole)))
    digests = [None if some is None else some.digest for some in (data, eval_data)]
    check_processes_agree({"data": digests})
    return train(
        job.params,
        data,
        setup,
        plan,
        rules=job.rules,
        compute_params=job.compute_params,
        extra_inputs=job.extra_inputs,
        eval_data=eval_data,
        prepare=job.prepare,
        **options,
    )


def delete_state(directory: Path) -> None:
    """Remove the saved state of a run, after its result is written."""
    store = TensorStore(directory)
    with store.lock():
        store.clear()


def make_sampler(lm: LM, prompt: str, tokens: int = 40) -> Callable[[Params], str]:
    """Return a function from parameters to a greedy continuation of a prompt, as one line."""

    def sample(params: Params) -> str:
        text = dataclasses.replace(lm, params=params).generate(prompt, max_new_tokens=tokens).text
        return f"  {prompt}{text}".replace("\n", " ")

    return sample
