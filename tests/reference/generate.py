"""Make the value files of this folder: `python -m tests.reference.generate` (needs PyTorch and transformers)."""

from functools import partial

import numpy as np
from safetensors.numpy import save_file

from tests.parity.references import Encoded, Kimi, Qwen3OmniAudio, Whisper
from tests.parity.vit_originals import KINDS, Original
from tests.reference.values import CASES, FOLDER, WITH_HIDDEN, digests

ORIGINALS = {
    "kimi_k25": Kimi,
    "qwen3_omni_audio": Qwen3OmniAudio,
    "whisper": Whisper,
    **{name: partial(Original, KINDS[name]) for name in ("llava", "siglip", "siglip2", "dinov2")},
    "pixtral": partial(Original, KINDS["mistral3"]),
}


def generate(name: str) -> Encoded:
    """The float64 outputs that the file of this name holds."""
    case = CASES[name]
    return ORIGINALS[name](case.checkpoint()).run(case.items())


def main() -> None:
    """Write all files."""
    for name, case in CASES.items():
        encoded = generate(name)
        tensors = {f"rows.{i}": np.ascontiguousarray(rows) for i, rows in enumerate(encoded.rows)}
        tensors |= {f"hidden.{i}": np.ascontiguousarray(x) for i, x in enumerate(encoded.hidden[:WITH_HIDDEN])}
        path = FOLDER / f"{name}.safetensors"
        save_file(tensors, path, metadata={"digests": digests(case.checkpoint(), case.items())})
        path.chmod(0o644)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
