"""Our rows beside those that transformers computes with the same tensors, for `verify --against torch`."""

import importlib.metadata
import importlib.util
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import jaxenc
from checkpoints_convert.convert import stored_arrays
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.mapping import Mapping
from checkpoints_convert.sources import Source
from jaxenc.items import Item
from jaxenc.models.base import EncoderConfig
from jaxenc.packing import Budget
from jaxenc.preprocess.audio import load_audio
from jaxenc.preprocess.images import load_image

ASSETS = files("jaxenc") / "assets"
# older ones compute another audio tower: 4.57's ignores its attention windows
OLDEST = (5, 24)
# Two right ways to add up in float32 differ: at every published size ours is at most 1.4 times as far from float64 as
# torch's (benchmarks/results). There float64 is so throughout; as transformers runs it, it keeps tables of float32
# (rotary angles, sinusoids, resampling), whose rounding torch in float32 shares and ours does not: in the tests' small
# models the ratio is up to 2.4, at 2e-6 of absmax. The floor is twice that. An epsilon ten times too small is 3e-6 to
# 6e-6 there: rows do not always tell.
TIMES, FLOOR = 3.0, 5e-6

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """How far rows of one item are apart; errors are of the absmax of torch's rows.

    Attributes:
        item: its name.
        rows: that come out.
        difference_max: largest |ours - torch's|, both in float32.
        difference_rms: its root mean square.
        ours_max: largest error of ours against torch in float64.
        torch_max: that of torch in float32.
    """

    item: str
    rows: int
    difference_max: float
    difference_rms: float
    ours_max: float
    torch_max: float

    @property
    def ratio(self) -> float:
        """Our error over torch's own."""
        return self.ours_max / max(self.torch_max, 1e-30)

    @property
    def allowed(self) -> float:
        """The error that float32 explains."""
        return max(TIMES * self.torch_max, FLOOR)

    @property
    def line(self) -> str:
        """It in words."""
        return (
            f"{self.item}: {self.rows} rows, ours - torch's in float32: max {self.difference_max:.1e}, rms "
            f"{self.difference_rms:.1e} of absmax; from torch in float64: ours {self.ours_max:.1e}, torch's "
            f"{self.torch_max:.1e}, ratio {self.ratio:.2f}"
        )


@dataclass(frozen=True)
class Differences:
    """Those of all items.

    Attributes:
        reference: what it was: names and versions.
        independent: whether transformers read the published names itself.
        items: one each.
    """

    reference: str
    independent: bool
    items: tuple[Difference, ...]

    @property
    def problems(self) -> list[str]:
        """A line for each item that float32 does not explain."""
        return [
            f"{item.item}: rows are {item.ours_max:.1e} of absmax from torch's in float64; float32 explains "
            f"{item.allowed:.1e}"
            for item in self.items
            if not item.ours_max <= item.allowed  # so that NaN is one
        ]

    @property
    def lines(self) -> list[str]:
        """Them in words."""
        names = "published names" if self.independent else "through jaxenc's own table of names: not independent"
        return [f"against {self.reference}, {names}:", *(f"  {item.line}" for item in self.items)]

    @property
    def data(self) -> dict[str, Any]:
        """Them as plain JSON values."""
        return {
            "reference": self.reference,
            "independent": self.independent,
            "items": [asdict(item) | {"ratio": item.ratio, "allowed": item.allowed} for item in self.items],
        }


def differences(
    source: Source, mapping: Mapping, encoder: EncoderConfig, checkpoint: str | Path | None = None
) -> Differences:
    """Encodes the same items with transformers and with ours.

    Args:
        source: What transformers is given.
        mapping: Names of the tower's tensors there.
        encoder: Which tower it is.
        checkpoint: What ours is loaded from; the source where not given.

    Raises:
        CheckpointError: transformers is not there or does not know the source, or gives other rows than ours.
    """
    reference = require()
    # imported where torch and transformers are known to be there
    from checkpoints_convert.originals import Original

    given = _items(encoder)
    dtypes = {}
    if checkpoint is not None:  # what it has rounded is rounded for both: rows would differ by much more than a mistake
        stored = mapping.outputs(stored_arrays(checkpoint))
        dtypes = {name: dtype for name, (_, dtype) in stored.items()}

    original = Original(source, mapping, encoder, dtypes)
    # one model after the other: in float64 there is no room for a second one
    torch, truth = original.rows(given, dtype="float32"), original.rows(given, dtype="float64")
    tokens = {sum(encoder.pieces(item)) for item in given}
    ours = jaxenc.load(
        checkpoint or source.name,
        tower=encoder.modality,
        dtype="float32",
        budgets=[Budget(n, 1) for n in sorted({-(-n // encoder.unit) * encoder.unit for n in tokens})],
        revision=None if checkpoint else source.revision,
    ).encode_items(given)
    items = tuple(map(compare, given, ours, torch, truth))
    return Differences(reference, original.independent, items)


def require() -> str:
    """What the reference is: names and versions.

    Raises:
        CheckpointError: It is not installed, or too old.
    """
    wanted = f'transformers {OLDEST[0]}.{OLDEST[1]} with torch: pip install "jaxenc[verify]"'
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        raise CheckpointError(f"--against torch: there is no {' and no '.join(lacking)} here; it needs {wanted}")
    found = importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        raise CheckpointError(f"--against torch: transformers {found} is too old; it needs {wanted}")
    return f"transformers {found}, torch {importlib.metadata.version('torch')}"


def compare(item: Item, ours: npt.ArrayLike, torch: Rows, truth: Rows) -> Difference:
    """Measures our rows of one item against torch's, in float32 and in float64.

    Raises:
        CheckpointError: There are more or fewer of them, or of another width.
    """
    ours, at = np.asarray(ours, np.float64), getattr(item, "timestamp", None)
    name = item.name if at is None else f"{item.name} at {at:g} s"
    if ours.shape != truth.shape:
        raise CheckpointError(f"{name}: our rows have the shape {list(ours.shape)}, torch's {list(truth.shape)}")
    absmax = np.abs(truth).max()
    return Difference(
        name,
        len(ours),
        float(np.abs(ours - torch).max() / np.abs(torch).max()),
        float(np.sqrt(np.square(ours - torch).mean()) / np.abs(torch).max()),
        float(np.abs(ours - truth).max() / absmax),
        float(np.abs(torch - truth).max() / absmax),
    )


def _items(config: EncoderConfig) -> list[Item]:
    """What is encoded: a photograph of odd sides, a video where the encoder takes one; or speech."""
    if config.modality == "audio":
        return list(config.read("audio", load_audio(str(ASSETS / "sense_and_sensibility.flac")), name="speech"))
    photograph = load_image(str(ASSETS / "cat.jpg"))
    # a camera that moves over the photograph
    frames = np.stack([photograph[12 * i : 12 * i + 112, 40 * i : 40 * i + 140] for i in range(4)])
    sources = {"images": ("photograph", photograph[40:203, 75:376]), "videos": ("video", (frames, 2.0))}
    return [
        item
        for kind, (name, source) in sources.items()
        if kind in config.kinds
        for item in config.read(kind, source, name=name)
    ]
