"""Reading and editing what a model computes, as values: see docs/inside.md.

`read=` and `edits=` of `forward`, `prefill`, `decode_step`, `generate` and `serve` take the names
of sites (`models.sites`). Here are the edits, and what is built on them.
"""

from jaxllm.inside.attribution import attribute_logits, decompose_stream
from jaxllm.inside.lens import (
    Lens,
    fit_jacobian_lens,
    fit_tuned_lens,
    lens_divergence,
    lens_logits,
    read_lens,
    top_tokens,
    write_lens,
)
from jaxllm.inside.patching import Patches, attribute_patches, patch_paths, patch_sites
from jaxllm.inside.sae import (
    SparseAutoencoder,
    load_autoencoder,
    save_autoencoder,
    train_autoencoder,
)
from jaxllm.inside.steering import (
    combine_directions,
    find_directions,
    read_directions,
    steering_edits,
    write_directions,
)
from jaxllm.models.interventions import Add, Apply, Clamp, Edit, Project, Scale, Set
from jaxllm.models.site_inputs import assign_edits, site_names

__all__ = [
    "Add",
    "Apply",
    "Clamp",
    "Edit",
    "Lens",
    "Patches",
    "Project",
    "Scale",
    "Set",
    "SparseAutoencoder",
    "assign_edits",
    "attribute_logits",
    "attribute_patches",
    "combine_directions",
    "decompose_stream",
    "find_directions",
    "fit_jacobian_lens",
    "fit_tuned_lens",
    "lens_divergence",
    "lens_logits",
    "load_autoencoder",
    "patch_paths",
    "patch_sites",
    "read_directions",
    "read_lens",
    "save_autoencoder",
    "site_names",
    "steering_edits",
    "top_tokens",
    "train_autoencoder",
    "write_directions",
    "write_lens",
]
