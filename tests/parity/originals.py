"""Every original by name: what transformers computes on a checkpoint of `tests.parity`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from jaxenc.items import Item, VisionItem
from tests.parity import references
from tests.parity.checkpoints import Checkpoint
from tests.parity.qwen_references import TOWERS, Qwen
from tests.parity.references import Dtype, Encoded
from tests.parity.vit_originals import KINDS, Original


class Encodes(Protocol):
    """One of them with a checkpoint's weights."""

    def run(self, items: Sequence[Any], *, dtype: Dtype = "float64") -> Encoded:
        """Encodes what `given` makes of each item."""


ORIGINALS: dict[str, Callable[[Checkpoint], Encodes]] = {
    "kimi_k25": references.Kimi,
    **{name: partial(Original, kind) for name, kind in KINDS.items()},
    **{name: partial(Qwen, name) for name in TOWERS},
    "whisper": references.Whisper,
    "qwen2_audio": references.Qwen2Audio,
    "qwen2_5_omni_audio": references.Qwen25OmniAudio,
    "qwen3_omni_audio": references.Qwen3OmniAudio,
    "qwen3_asr_audio": references.Qwen3AsrAudio,
}


def given(name: str, item: Item) -> Any:
    """What an original takes of an item: patches and grid, a log-mel, or a log-mel and the frames recorded."""
    if isinstance(item, VisionItem):
        return item.patches, item.grid
    return (item.mel, item.recorded) if name == "qwen2_audio" else item.mel
