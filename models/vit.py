"""A vision transformer (Dosovitskiy et al., 2021) that classifies images. Single-device code.

Letters: B rows, H height, W width, C channels, T patches, Q numbers in a patch, D embed, K classes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

import jaxpar
from jaxpar.batch import BatchAxes
from models.gpt import Block
from models.layers import LayerNorm, normed, residual

# What a batch is: float32[rows, height, width, channels], and int32[rows] from 0 to num_classes - 1.
IMAGES: BatchAxes = {"image": ("rows", None, None, None), "label": ("rows",)}

_kernel = nnx.initializers.lecun_normal()
_embedding = nnx.initializers.normal(stddev=0.02)


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of the model; images are square, of `image_size` pixels, cut into patches of `patch_size`."""

    image_size: int
    patch_size: int
    num_classes: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    channels: int = 3
    dropout: float = 0.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise jaxpar.ConfigError(
                f"image_size={self.image_size} does not divide into patches of patch_size={self.patch_size}"
            )
        if self.embed_dim % self.num_heads:
            raise jaxpar.ConfigError(
                f"embed_dim={self.embed_dim} does not divide into num_heads={self.num_heads}; give a multiple"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.image_size, self.image_size, self.channels

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def build(self, rngs: nnx.Rngs) -> "ViT":
        return ViT(self, rngs=rngs)


class ViT(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        c = config
        numbers = c.patch_size**2 * c.channels
        self.patch = nnx.Linear(numbers, c.embed_dim, kernel_init=jaxpar.named(_kernel, None, "embed"), rngs=rngs)
        positions = jaxpar.named(_embedding, "positions", "embed")
        self.positions = nnx.Param(positions(rngs.params(), (c.num_patches, c.embed_dim), jnp.float32))
        sizes, options = (c.embed_dim, c.num_heads, c.mlp_dim), dict(dropout=c.dropout, epsilon=c.norm_epsilon)
        self.blocks = jaxpar.stack(Block, c.num_layers, *sizes, **options, causal=False, rngs=rngs)
        self.norm = LayerNorm(c.embed_dim, epsilon=c.norm_epsilon, rngs=rngs)
        self.out = nnx.Linear(c.embed_dim, c.num_classes, kernel_init=jaxpar.named(_kernel, "embed", None), rngs=rngs)
        self.config = c

    def embed(self, batch: dict[str, Array], ctx: jaxpar.Context) -> Float[Array, "b t d"]:
        x_BTD = self.patch(patches(batch["image"], self.config)) + self.positions[...][None]
        return residual(ctx.dropout(x_BTD, self.config.dropout), ctx)

    def head(self, x_BTD: Float[Array, "b t d"], batch: dict[str, Array], ctx: jaxpar.Context) -> dict[str, Array]:
        scores_BK, labels_B = self._classify(x_BTD, ctx), batch["label"]
        known_B = (labels_B >= 0) & (labels_B < self.config.num_classes)
        right_BK = jax.nn.one_hot(labels_B, self.config.num_classes)
        losses_B = -jnp.sum(right_BK * jax.nn.log_softmax(scores_BK), axis=1)
        hits_B = jnp.argmax(scores_BK, axis=1) == labels_B
        # A class that is not there gives NaN: rather a step that is skipped than one that learns nothing in silence.
        return {"cross_entropy": jnp.sum(jnp.where(known_B, losses_B, jnp.nan)), "accuracy": jnp.sum(hits_B)}

    def terms(self, batch: dict[str, Array]) -> dict[str, jaxpar.Term]:
        rows = jnp.float32(batch["label"].shape[0])
        return {"cross_entropy": jaxpar.Term(rows), "accuracy": jaxpar.Term(rows, coef=0.0)}

    def logits(self, images: Float[Array, "b h w c"], ctx: jaxpar.Context) -> Float[Array, "b k"]:
        """Float32 scores of every class, on one device."""
        return self._classify(self.blocks(self.embed({"image": images}, ctx), ctx), ctx)

    def _classify(self, x_BTD: Float[Array, "b t d"], ctx: jaxpar.Context) -> Float[Array, "b k"]:
        return self.out(jnp.mean(normed(self.norm, x_BTD, ctx).astype(jnp.float32), axis=1))


def patches(images: Float[Array, "b h w c"], config: ViTConfig) -> Float[Array, "b t q"]:
    """The images cut into square patches, row by row. Raises `ModelError` for images of another shape."""
    if images.shape[1:] != config.image_shape:
        raise jaxpar.ModelError(f"images have shape {images.shape[1:]}, the model was made for {config.image_shape}")
    side, size = config.image_size // config.patch_size, config.patch_size
    cut = images.reshape(-1, side, size, side, size, config.channels).swapaxes(2, 3)
    return cut.reshape(-1, config.num_patches, size * size * config.channels)
