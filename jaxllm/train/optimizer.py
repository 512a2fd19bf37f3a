"""Optimizers as values: an optax method, its learning rate schedule and its weight decay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.errors import requires_extra
from jaxllm.train.partition import TrainedParams
from jaxllm.train.settings import OptimizerSettings
from jaxllm.weights.paths import first_match


class Optimizer(OptimizerSettings):
    """AdamW with its learning rate, as an optax transformation.

    A run that is resumed with another `steps` or `lr` (`train.checkpointing.CHANGEABLE`) uses the
    new values from its next step on: the rate of step `n` is their `learning_rate(n)`, whatever
    came before.
    """

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """Return the learning rate of step `step`, counted from 0."""
        return self.lr * self._relative_rate(step)

    def _relative_rate(self, step: jax.Array) -> jax.Array:
        """Return the learning rate of a step as a share of the peak."""
        step, warm = jnp.asarray(step, jnp.float32), round(self.warmup * self.steps)
        done = (step - warm) / max(1, self.steps - warm)
        share = self.floor + (1 - self.floor) * SCHEDULES[self.schedule](jnp.clip(done, 0, 1))
        rising = (step + 1) / (warm + 1)
        return jnp.where(step < warm, rising, share)

    def build(self) -> Any:
        """Return the optax transformation. Raises ConfigError if optax is not installed."""
        optax = import_optax()
        clip = [] if self.max_grad_norm is None else [self._build_clip(self.max_grad_norm)]
        adamw = optax.chain(  # optax.adamw
            self._build_adam(),
            optax.add_decayed_weights(self.weight_decay, self._decay_mask),
            optax.scale_by_learning_rate(lambda step: self._base_rate * self._relative_rate(step)),
        )
        rates = [optax.stateless(self._apply_rates)] if self.rates else []
        return optax.chain(*clip, adamw, *rates)

    def _build_clip(self, largest: float) -> Any:
        """Return `optax.clip_by_global_norm` as one factor; `update` also takes the norm."""
        optax = import_optax()

        def update(gradient: Any, state: Any, _: Any = None, **extra: Any) -> tuple[Any, Any]:
            norm = extra["norm"] if "norm" in extra else optax.tree.norm(gradient)
            share = jnp.minimum(1.0, largest / norm)
            return jax.tree.map(lambda x: x * share, gradient), state

        init = optax.clip_by_global_norm(largest).init
        return optax.GradientTransformationExtraArgs(init, update)

    def _build_adam(self) -> Any:
        """Return `optax.scale_by_adam`, with moments that XLA computes once and in place.

        XLA computes cheap values again for each reader, and copies old moments for that. Quotients
        are not cheap to it.
        """
        optax = import_optax()

        def update(gradient: Any, state: Any, _: Any = None) -> tuple[Any, Any]:
            count = optax.safe_increment(state.count)
            one = (count > 0).astype(jnp.float32)  # XLA cannot infer that it is 1
            mu = optax.tree.update_moment(gradient, state.mu, self.b1, 1)
            nu = optax.tree.update_moment(gradient, state.nu, self.b2, 2)
            mu, nu = jax.tree.map(lambda x: x / one, (mu, nu))
            first, second = 1 / (1 - self.b1**count), 1 / (1 - self.b2**count)
            updates = jax.tree.map(
                lambda m, v: m * first / (jnp.sqrt(v * second) + self.eps), mu, nu
            )
            return updates, state._replace(count=count, mu=mu, nu=nu)

        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        return optax.GradientTransformation(adam.init, update)

    def _decay_mask(self, trained: TrainedParams) -> dict[str, bool]:
        return {
            path: yes and first_match(self.rates, path) is None
            for path, yes in decay_mask(trained).items()
        }

    def _apply_rates(self, updates: TrainedParams, _: Any) -> TrainedParams:
        """Scale updates by the ratio of the rates: AdamW's updates are proportional to the rate."""
        rates = {path: first_match(self.rates, path) for path in updates}
        peaks = {path: self.lr if rate is None else rate for path, rate in rates.items()}
        return {path: x * (peaks[path] / self._base_rate) for path, x in updates.items()}

    @property
    def _base_rate(self) -> float:
        """The peak rate that AdamW runs with: `lr`, or 1 if that is 0 and there are `rates`."""
        return self.lr or (1.0 if self.rates else 0.0)


def decay_mask(trained: TrainedParams) -> dict[str, bool]:
    """Return which arrays decay: matrices and embeddings, but not scales of groups, or biases."""
    ends = (".scale", ".bias")
    return {path: x.ndim >= 2 and not path.endswith(ends) for path, x in trained.items()}


def import_optax() -> Any:
    """Import and return optax. Raises ConfigError if it is not installed."""
    with requires_extra("train", "training"):
        import optax
    return optax


# The rate after warmup: maps the share of steps done, 0 to 1, to a factor from 1 down to 0.
SCHEDULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda done: 0.5 * (1 + jnp.cos(jnp.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: jnp.ones_like(done),
}
