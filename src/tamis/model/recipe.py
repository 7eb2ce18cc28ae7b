"""`IndexRecipe`: how index queries and keys are rotated before they are compared."""

from dataclasses import dataclass
from typing import Any, Self

from tamis import checks
from tamis.model import hf_config


@dataclass(frozen=True)
class IndexRecipe:
    """How index queries and index keys are rotated. Their dot products are scores only if both have the same recipe.

    The defaults are DeepSeek-V3.2's. A `PagedCache` of index keys may record its recipe (`recipe=`), and then refuses
    keys and queries of another one.
    """

    rope_dim: int = 64
    """The number of rotated columns."""
    interleaved: bool = False
    """Whether the rope rotates pairs (2i, 2i+1); otherwise pairs (i, i + rope_dim/2)."""
    rope_first: bool = True
    """Whether the rotated columns are the first (V3.2); otherwise they are the last (V4)."""
    hadamard: bool = False
    """Whether rows are multiplied by the orthonormal Hadamard matrix after the rope. Scores stay the same, and the
    quantisation error gets smaller."""

    def __post_init__(self) -> None:
        """Refuse an odd number of rotated columns."""
        for name in ("interleaved", "rope_first", "hadamard"):
            checks.flag(name, getattr(self, name))
        if checks.integer("rope_dim", self.rope_dim, low=0) % 2:
            raise checks.refuse("rope_dim", "even", self.rope_dim, "a rope rotates pairs")

    @classmethod
    def of_v4(cls, rope_dim: int = 64, *, hadamard: bool = False) -> Self:
        """DeepSeek-V4's recipe: the rope rotates adjacent pairs in the last columns."""
        return cls(rope_dim, interleaved=True, rope_first=False, hadamard=hadamard)

    def check_width(self, width: int, name: str = "width") -> None:
        """Refuse a row width that is not a power of two if the recipe has a Hadamard rotation."""
        if self.hadamard:
            check_hadamard(width, name)

    @classmethod
    def from_hf(cls, config: Any, layer: int = 0, *, hadamard: bool = False) -> Self:
        """From a Hugging Face config (object or dict) of the V3.2 family (V3.2, GLM-5.x, A.X-K2, Hy4, Mistral Large 4)
        or the V4 family.

        In the V3.2 family `indexer_rope_interleave` decides which pairs are rotated. Without it they are adjacent in
        GLM-MoE-DSA and Mistral Large 4, and halves in other models, as in transformers. They are the last columns in
        Hy4, and the first in other models.

        Args:
            config: the model's config.
            layer: index of the layer. Some layers of Mistral Large 4 have no rope.
            hadamard: whether rows are multiplied by the Hadamard matrix.
        """
        fields = hf_config.fields_of(config)
        if hf_config.is_v32(fields):
            rope = hf_config.v32_rope_width(fields)
            pairs = fields.get("indexer_rope_interleave")
            kind = str(fields.get("model_type"))
            usual = kind in ("glm_moe_dsa", hf_config.MISTRAL_LARGE4)
            interleaved = usual if pairs is None else checks.flag("config.indexer_rope_interleave", pairs)
            rope = rope if hf_config.has_rope(fields, checks.integer("layer", layer, low=0)) else 0
            return cls(rope, interleaved=interleaved, rope_first=kind != hf_config.HY4, hadamard=hadamard)
        if fields.get("head_dim") is None:
            raise checks.refuse("config", "one with 'kv_lora_rank' or 'head_dim'", "none", "this model has no indexer")
        return cls.of_v4(hf_config.rope_width(fields), hadamard=hadamard)


def check_hadamard(width: int, name: str) -> None:
    """Refuse a width for which there is no Hadamard matrix; `name` is the width's name in the error."""
    if width < 1 or width & (width - 1):
        raise checks.refuse(name, "a power of two for a Hadamard rotation", width, "use a recipe without it")
