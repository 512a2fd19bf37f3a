"""Old and foreign names of training options: each error names the current option."""

from typing import Any

import typer

from jaxllm.cli.command import Command
from jaxllm.errors import ConfigError

RENAMED = {
    "--rate": "--lr",
    "--learning-rate": "--lr",
    "--decay": "--weight-decay",
    "--clip": "--max-grad-norm",
    "--eval": "--eval-data",
    "--held-out": "--eval-split",
    "--evaluate-every": "--eval-steps",
    "--save-every": "--save-steps",
    "--batch": "--batch-size",
    "--per-device-train-batch-size": "--batch-size",
    "--accumulate": "--gradient-accumulation-steps",
    "--grad-accum": "--gradient-accumulation-steps",
    "--remat": "--gradient-checkpointing",
    "--max-steps": "--steps",
    "--num-train-epochs": "--epochs",
    "--warmup-ratio": "--warmup",
    "--max-length": "--length",
    "--gate-rate": "--gate-lr",
    "--target": "--target-modules",
    "--alpha": "--lora-alpha",
    "--dropout": "--lora-dropout",
    "--layers": "--layers-to-transform",
}


class TrainCommand(Command):
    """A command whose errors for old option names give the new ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            asked = getattr(error, "option_name", "")
            name = RENAMED.get(asked)
            if name is not None and any(name in parameter.opts for parameter in self.params):
                raise ConfigError(f"no such option: {asked}. Use {name}") from None
            raise
