"""Whisper's stem: two convolutions over the frames of a spectrogram, made token by token.

Token p of a chunk of frames depends on five of them. With these beside each token, tokens of any chunks can lie in any
order and on any device, and nothing is computed for frames that no token needs.
"""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int
from numpy.lib.stride_tricks import sliding_window_view

from jaxenc import packing
from jaxenc.items import AudioItem
from jaxenc.layers.linear import Linear, conv_flops
from jaxenc.layers.mlp import activated
from jaxenc.layers.parameters import Shard
from jaxenc.packing import Budget, Placed, Slots
from sharding_rules import GroupWork

TOKEN_FRAMES = 5  # 2 p - 2 to 2 p + 2

AXES: Mapping[str, tuple[str | None, ...]] = {
    "mel": ("batch", "stem_length", None, None),
    "position": ("batch", "stem_length"),
    "frames": ("batch", "stem_length"),
}


class MelStem(nnx.Module):
    """Two convolutions over time, the second of stride 2, as products over the windows of each token by itself."""

    def __init__(self, mel: int, embed: int, *, dtype: DTypeLike):
        """Declares the convolutions."""
        filters, window = {"filters": embed}, {"kernel_w": 3}
        self.conv1 = Linear(filters, {"channels_in": mel, **window}, dtype=dtype)
        self.conv2 = Linear(filters, {"channels_in": embed, **window}, dtype=dtype)

    def __call__(self, inputs: Mapping[str, Array], *, shard: Shard) -> Float[Array, "b n embed"]:
        """Tokens, each from its own frames; those of padding are finite.

        Args:
            inputs: what `mel_arrays` makes.
            shard: constrains activations by name.
        """
        real: Bool[Array, "b n"] = inputs["frames"] > 0
        # selected away, not multiplied by zero: whatever is in the padding, NaN included, ends here
        mel = jnp.where(real[..., None, None], inputs["mel"], 0).astype(self.conv1.kernel.dtype)
        mel = shard(mel, "batch", "stem_length", "mel", "frames")
        windows = jnp.stack([mel[..., i : i + 3] for i in range(3)], axis=2)
        x = activated(self.conv1(windows), "gelu_erf")
        # the second convolution is padded with zeros, not with what the first makes of its own padding
        taps: Int[Array, "b n 3"] = 2 * inputs["position"][..., None] + jnp.arange(-1, 2)
        inside = (taps >= 0) & (taps < inputs["frames"][..., None])
        x = shard(jnp.where(inside[..., None], x, 0), "batch", "stem_length", "frames", "filters")
        x = activated(self.conv2(jnp.swapaxes(x, 2, 3)), "gelu_erf")
        return shard(x, "batch", "stem_length", "filters")


def mel_stem_work(tokens: Sequence[int], *, mel: int, embed: int) -> GroupWork:
    """The work of the stem over segments of so many tokens."""
    # no token shares an output of the first convolution with another one
    token = conv_flops(mel, embed, window=3, positions=3) + conv_flops(embed, embed, window=3, positions=1)
    return GroupWork(
        "stem",
        None,
        "stem_length",
        tuple(token * n for n in tokens),
        returned=embed,
        live=tuple(n * (9.0 * mel + 6.0 * embed) for n in tokens),
    )


def mel_arrays(
    items: Sequence[AudioItem],
    placed: Sequence[Placed],
    budget: Budget,
    *,
    mel: int,
    chunk_frames: int,
    tokens: Callable[[AudioItem], int],
) -> tuple[dict[str, np.ndarray], Slots]:
    """What the stem reads, and which tokens attend to each other: those of a chunk. Positions restart in every chunk.

    Args:
        items: of the call.
        placed: where their pieces go; each is a chunk.
        budget: of the batch.
        mel: mel bins.
        chunk_frames: mel frames of a whole chunk, two a token.
        tokens: how many an item has; what its pieces have beyond is padding.

    Returns:
        The arrays of the stem and "segments", and whose token each place holds.
    """
    b, n, size = budget.rows, budget.row, chunk_frames // 2
    slots = Slots.empty(b, n)
    arrays = {
        "mel": np.zeros((b, n, mel, TOKEN_FRAMES), np.float32),
        "position": np.zeros((b, n), np.int32),
        "frames": np.zeros((b, n), np.int32),
        "segments": np.zeros((b, n), np.int32),
    }
    # once a chunk, however many rows have a share of it
    frames: dict[tuple[int, int], np.ndarray] = {}
    for segment, place in packing.segments(placed):
        item, first = items[place.item], place.piece * size
        chunk = item.mel[:, 2 * first : 2 * first + chunk_frames]
        if (place.item, place.piece) not in frames:
            frames[place.item, place.piece] = token_frames(chunk)
        stop = min(place.start + place.size, tokens(item) - first)
        positions = np.arange(place.start, stop)
        at = (place.row, slice(place.offset, place.offset + len(positions)))
        arrays["mel"][at] = frames[place.item, place.piece][positions]
        arrays["position"][at] = positions
        arrays["frames"][at] = chunk.shape[1]
        arrays["segments"][at] = segment
        slots.fill(place.row, place.offset, place.item, first + positions)
    return arrays, slots


def token_frames(mel: Float[np.ndarray, "mel frames"]) -> Float[np.ndarray, "n mel 5"]:
    """The frames 2 p - 2 to 2 p + 2 of every token p; zero before the first frame and after the last."""
    padded = np.pad(mel, ((0, 0), (2, 2)))
    return sliding_window_view(padded, TOKEN_FRAMES, axis=1)[:, ::2].swapaxes(0, 1)
