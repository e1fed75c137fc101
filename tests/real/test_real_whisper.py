"""Trained Whisper encoders, six and eight heads on a model axis of 4, heard by transformers' decoder."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxenc
from tests.parity.compare import max_error, rms_error
from tests.real.packages import Unavailable, without
from tests.real.whisper_weights import checkpoint

CLIP = Path(jaxenc.__file__).parent / "assets" / "sense_and_sensibility.flac"
SAID = "and mr john dashwood had then leisure to consider how much there might be prudently in his power to do for them"
PROMPTS = {"tiny.en": ("<|notimestamps|>",), "base": ("<|en|>", "<|transcribe|>", "<|notimestamps|>")}


@dataclass(frozen=True)
class Trained:
    """A trained model: ours on the mesh and on one device, and the folder that all read."""

    name: str
    folder: Path
    encoder: jaxenc.Encoder
    alone: jaxenc.Encoder
    rows: np.ndarray  # of CLIP


@pytest.fixture(scope="module", params=["tiny.en", "base"])
def trained(request: pytest.FixtureRequest) -> Trained:
    if jax.device_count() < 4:
        without("needs 4 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8")
    for package in ("torch", "transformers", "tokenizers"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"needs {package}: this is the suite for where there is none")
    try:
        folder = checkpoint(request.param)
    except Unavailable as error:
        without(str(error))
    encoder = jaxenc.load(folder, mesh=jaxenc.make_mesh(data=1, model=4), dtype="float32")
    alone = jaxenc.load(folder, dtype="float32")
    return Trained(request.param, folder, encoder, alone, encoder.encode(audio=[CLIP])[0])


def test_every_device_works(trained: Trained) -> None:
    # six heads do not divide over four devices: the batch takes what the heads leave
    assert trained.encoder.plan.strategy == {"tiny.en": "hybrid", "base": "tensor"}[trained.name]
    assert trained.rows.shape == (1500, trained.encoder.config.embed)


def test_rows_are_about_as_near_the_truth_as_the_originals(trained: Trained) -> None:
    # few channels of the trained models hold most of the activations, so the largest error is one or two values' luck
    (item,) = trained.encoder.preprocess(audio=[CLIP])
    truth = original_rows(trained.folder, item.mel, dtype="float64")
    own = original_rows(trained.folder, item.mel, dtype="float32")
    alone = trained.alone.encode_items([item])[0]
    assert rms_error([alone], [truth]) <= 1.5 * rms_error([own], [truth])
    assert max_error([alone], [truth]) <= 2.0 * max_error([own], [truth])
    # products of several CPU devices are another library's, with longer sums
    assert rms_error([trained.rows], [truth]) <= 4.0 * rms_error([own], [truth])
    assert max_error([trained.rows], [truth]) <= 6.0 * max_error([own], [truth])


def test_the_decoder_hears_what_was_said(trained: Trained) -> None:
    assert words(transcribe(trained.folder, trained.rows, PROMPTS[trained.name])) == words(SAID)


def original(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def original_rows(folder: Path, mel: np.ndarray, *, dtype: str) -> np.ndarray:
    import torch

    model = original(folder, dtype)
    with torch.no_grad():
        features = torch.from_numpy(mel)[None].to(model.dtype)
        return model.model.encoder(features).last_hidden_state[0].double().numpy()


def transcribe(folder: Path, rows: np.ndarray, prompt: tuple[str, ...]) -> str:
    """What the decoder says, greedily, given the encoder's rows."""
    import torch
    from tokenizers import Tokenizer
    from transformers.modeling_outputs import BaseModelOutput

    model, tokenizer = original(folder, "float32"), Tokenizer.from_file(str(folder / "tokenizer.json"))
    heard = BaseModelOutput(last_hidden_state=torch.from_numpy(np.array(rows))[None])
    tokens = [tokenizer.token_to_id(token) for token in ("<|startoftranscript|>", *prompt)]
    said, past = list(tokens), None
    with torch.no_grad():
        while len(said) < 60:
            out = model(encoder_outputs=heard, decoder_input_ids=torch.tensor([tokens]), cache=past)
            tokens, past = [int(out.logits[0, -1].argmax())], out.cache
            if tokens[0] == model.config.eos_token_id:
                break
            said += tokens
    return tokenizer.decode(said)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower().replace("mister", "mr"))
