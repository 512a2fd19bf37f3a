"""Layouts of experts in checkpoints: one tensor per expert, or all of them stacked."""

import dataclasses
import re

from jaxllm.config.model import ModelConfig
from jaxllm.convert.fused_layouts import Tensors
from jaxllm.errors import CheckpointError
from jaxllm.models.moe import MoEConfig
from jaxllm.weights.lazy import LazyTensor, stack_tensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LAYER = r"(layers\.\d+\.)"
_STACK = re.compile(_LAYER + r"mlp\.experts\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER_NUMBER = re.compile(r"\blayers\.(\d{1,9})\.")
_BIAS = "mlp.selection.bias"
_FUSED = re.compile(_LAYER + r"mlp\.experts\.(gate_up_proj|down_proj)")


# Fields that only training reads.
ROUTER_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The experts of each layer, read in two layouts and written in the published one.

    Published files have one matrix per expert, `{module}.experts.3.{name}.weight`. transformers 5
    has `mlp.experts.gate_up_proj` `[E, 2I, D]`, gate rows first, and `mlp.experts.down_proj`
    `[E, D, I]`.

    Attributes:
        module: The checkpoint's name of the mixture.
        names: The checkpoint's names of the gate, up and down projections.
        bias: The checkpoint's name of the selection's bias, within the mixture.
    """

    module: str
    names: tuple[str, str, str] = PROJECTIONS
    bias: str = "gate.e_score_correction_bias"

    def matches(self, path: str) -> bool:
        patterns = (self._expert_pattern, self._router_pattern, self._bias_pattern, _FUSED)
        return any(r.fullmatch(path) for r in patterns)

    def read(self, tensors: Tensors, config: MoEConfig) -> Tensors:
        result, each = Tensors(), dict[str, dict[int, LazyTensor]]()
        for path, tensor in tensors.items():
            if match := self._expert_pattern.fullmatch(path):
                name = PROJECTIONS[self.names.index(match[3])]
                stack = each.setdefault(f"{match[1]}mlp.experts.{name}.weight", {})
                stack[int(match[2])] = tensor
            elif match := _FUSED.fullmatch(path):
                result |= _split_fused_experts(path, match[1], tensor, config)
            elif match := self._router_pattern.fullmatch(path):
                result[f"{match[1]}mlp.gate.weight"] = tensor
            elif match := self._bias_pattern.fullmatch(path):
                result[f"{match[1]}{_BIAS}"] = tensor
            else:
                result[path] = tensor
        for path, experts in each.items():
            if path in result:
                raise CheckpointError(f"{path} is stored twice, stacked and per expert")
            result[path] = _stack_experts(path, experts, config.num_experts)
        return result

    def write(self, tensors: Tensors, config: MoEConfig) -> Tensors:
        result = Tensors()
        for path, tensor in tensors.items():
            if match := _STACK.fullmatch(path):
                name = self.names[PROJECTIONS.index(match[2])]
                for number, expert in enumerate(tensor.unstack()):
                    to = f"{match[1]}{self.module}.experts.{number}.{name}.weight"
                    result[to] = expert
            elif match := re.fullmatch(_LAYER + re.escape(_BIAS), path):
                result[f"{match[1]}{self.module}.{self.bias}"] = tensor
            else:
                router = re.fullmatch(_LAYER + r"mlp\.gate\.weight", path)
                result[f"{router[1]}{self.module}.gate.weight" if router else path] = tensor
        return result

    @property
    def _expert_pattern(self) -> re.Pattern[str]:
        names = "|".join(map(re.escape, self.names))
        return re.compile(rf"{_LAYER}{self.module}\.experts\.(\d{{1,4}})\.({names})\.weight")

    @property
    def _router_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{_LAYER}{self.module}\.gate\.weight")

    @property
    def _bias_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{_LAYER}{self.module}\.{re.escape(self.bias)}")


@dataclasses.dataclass(frozen=True)
class NextTokenLayers:
    """Layers that predict further tokens (MTP), which are not read.

    They are in a module `mtp`, or past the last layer and known by their `eh_proj`.
    """

    def matches(self, path: str) -> bool:
        return False

    def read(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        layers = {path: _LAYER_NUMBER.search(path) for path in tensors}
        numbers = {path: int(match[1]) for path, match in layers.items() if match}
        further = {
            number
            for path, number in numbers.items()
            if path.endswith(".eh_proj.weight") and number >= config.num_hidden_layers
        }
        return {
            path: x
            for path, x in tensors.items()
            if numbers.get(path) not in further and not path.startswith("mtp.")
        }

    def write(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        return tensors


def _stack_experts(path: str, experts: dict[int, LazyTensor], count: int) -> LazyTensor:
    if sorted(experts) != list(range(count)):
        raise CheckpointError(
            f"{path}: the checkpoint has experts {sorted(experts)}, but config.json sets {count}"
        )
    first = experts[0]
    for number, tensor in experts.items():
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{path}: expert {number} is {tensor.dtype} {tensor.shape}, expert 0 is"
                f" {first.dtype} {first.shape}"
            )
    return stack_tensors([experts[i] for i in range(count)])


def _split_fused_experts(path: str, layer: str, tensor: LazyTensor, config: MoEConfig) -> Tensors:
    """Split transformers 5's stacked tensor into ours."""
    E, D, F = config.num_experts, config.hidden_size, config.expert_size
    fused = path.endswith("gate_up_proj")
    wanted = (E, 2 * F, D) if fused else (E, D, F)
    if tensor.shape != wanted:
        raise CheckpointError(f"{path} has shape {tensor.shape}, expected {wanted} by config.json")
    if not fused:
        return {f"{layer}mlp.experts.down_proj.weight": tensor}
    return {
        f"{layer}mlp.experts.{name}.weight": stack_tensors(
            [expert.rows(begin, begin + F) for expert in tensor.unstack()]
        )
        for name, begin in (("gate_proj", 0), ("up_proj", F))
    }
