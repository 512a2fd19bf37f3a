"""Reading and editing what a model computes, as values: see docs/inside.md.

`read=` and `edits=` of `forward`, `prefill`, `decode_step`, `generate` and `serve` take the names
of sites (`models.sites`). Here are the edits, and what is built on them.
"""

from jaxllm.inside.attribution import (
    attribute_logits as attribute_logits,
    decompose_stream as decompose_stream,
)
from jaxllm.inside.cache_edits import assign_edits as assign_edits
from jaxllm.inside.lens import (
    Lens as Lens,
    fit_jacobian_lens as fit_jacobian_lens,
    fit_tuned_lens as fit_tuned_lens,
    lens_divergence as lens_divergence,
    lens_logits as lens_logits,
    read_lens as read_lens,
    top_tokens as top_tokens,
    write_lens as write_lens,
)
from jaxllm.inside.patching import (
    Patches as Patches,
    attribute_patches as attribute_patches,
    patch_paths as patch_paths,
    patch_sites as patch_sites,
)
from jaxllm.inside.sae import (
    SparseAutoencoder as SparseAutoencoder,
    load_autoencoder as load_autoencoder,
    save_autoencoder as save_autoencoder,
    train_autoencoder as train_autoencoder,
)
from jaxllm.inside.steering import (
    combine_directions as combine_directions,
    find_directions as find_directions,
    read_directions as read_directions,
    steering_edits as steering_edits,
    write_directions as write_directions,
)
from jaxllm.models.edits import (
    Add as Add,
    Apply as Apply,
    Clamp as Clamp,
    Edit as Edit,
    Project as Project,
    Scale as Scale,
    Set as Set,
)
from jaxllm.models.site_inputs import site_names as site_names
