"""Audio of any kind -> 16 kHz mono -> log-mel spectrogram (Whisper's front end)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64
from numpy.typing import ArrayLike

from jaxenc.errors import InputError
from jaxenc.preprocess._sources import MediaFile, as_array, is_array, open_container, open_source, require, source_name

SAMPLE_RATE = 16_000
WINDOW_SAMPLES = 400
HOP_SAMPLES = 160
# Spectra are made for this many frames at a time: 3 MB, whatever the clip's length.
_BLOCK_FRAMES = 1024


def load_audio(
    source: MediaFile | ArrayLike | tuple[ArrayLike, float], *, sample_rate: int = SAMPLE_RATE, name: str | None = None
) -> Float32[np.ndarray, " samples"]:
    """Any audio as float32 mono at one rate.

    Channels are averaged, then resampled, as librosa and transformers load audio.

    Args:
        source: a path, bytes or binary file (WAV, FLAC, OGG, Opus, MP3 by libsndfile; MP4, M4A and others by FFmpeg),
            an array already at `sample_rate`, or (array, its rate). Arrays are `[samples]` or two-dimensional, the
            shorter axis being the channels; floats are taken as they are, beyond [-1, 1] too, int16 and int32 are
            scaled by their range, uint8 is centred at 128.
        sample_rate: of the result, in Hz.
        name: what error messages call it; the path by default.

    Returns:
        float32 `[samples]`.

    Raises:
        InputError: unreadable, truncated, empty, NaN or infinite, or not audio's shape or dtype.
    """
    rate: float = sample_rate
    if isinstance(source, tuple):
        if len(source) != 2 or np.ndim(source[1]) != 0:
            raise InputError(f"{name or '<tuple>'}: expected (array, sample rate in Hz)")
        rate, source = float(source[1]), np.asarray(source[0])
    name = source_name(source, name)
    if is_array(source) or isinstance(source, list):
        waveform = _array_mono(as_array(source), name)
    else:
        waveform, rate = _file_mono(source, name)
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(f"{name}: sample rate {rate}, expected a positive number of Hz")
    if waveform.size == 0:
        raise InputError(f"{name}: the audio is empty")
    if not np.isfinite(waveform).all():
        raise InputError(f"{name}: the audio holds NaN or infinite samples")
    if rate == sample_rate:
        return waveform
    # HQ is librosa's and transformers' setting, so features equal the published ones; its 20-bit precision is already
    # beyond 16-bit audio, and VHQ costs twice the time for a difference below -120 dB.
    resampled = require("soxr").resample(waveform, rate, sample_rate, quality="HQ")
    samples = math.ceil(len(waveform) * sample_rate / rate)
    return pad_or_trim(np.asarray(resampled, np.float32), samples)


def pad_or_trim(waveform: Float[np.ndarray, " samples"], samples: int) -> Float[np.ndarray, " {samples}"]:
    """Zeros at the end, or a cut, to exactly `samples` (Whisper: 480,000, its 30 s)."""
    return np.pad(waveform[:samples], (0, max(0, samples - len(waveform))))


def log_mel(
    waveform: Float[np.ndarray, " samples"], *, bins: int, name: str = "<waveform>"
) -> Float32[np.ndarray, "{bins} frames"]:
    """Whisper's log-mel spectrogram (transformers' `WhisperFeatureExtractor`), in float64 inside.

    Frames of 400 samples every 160, periodic Hann, the clip reflected by 200 at both ends, power spectrum, Slaney mel
    filters, log10 clamped to 8 below the clip's largest value, (x + 4) / 4. The last frame is dropped as upstream does,
    so there are `samples // 160` frames.

    Args:
        waveform: `[samples]` at 16 kHz. 160 to 200 samples are fewer than the reflection needs and are reflected
            repeatedly, as upstream's NumPy path does (its torch path raises).
        bins: mel bins (80 or 128).
        name: what error messages call it.

    Returns:
        float32 `[bins, samples // 160]`.

    Raises:
        InputError: fewer than 160 samples (10 ms): no frame results.
    """
    frames = len(waveform) // HOP_SAMPLES
    if frames == 0:
        raise InputError(f"{name}: {len(waveform)} samples are shorter than one frame ({HOP_SAMPLES} samples, 10 ms)")
    padded = np.pad(np.asarray(waveform), WINDOW_SAMPLES // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES)
    filters = mel_filters(bins)
    mel = np.empty((bins, frames), np.float32)
    for start in range(0, frames, _BLOCK_FRAMES):
        stop = min(start + _BLOCK_FRAMES, frames)
        spectrum = np.fft.rfft(windows[start:stop] * hann)
        power = spectrum.real**2 + spectrum.imag**2
        mel[:, start:stop] = np.log10(np.maximum(power @ filters, 1e-10)).T
    np.maximum(mel, mel.max() - 8, out=mel)
    mel += 4
    mel /= 4
    return mel


def padded_log_mel(
    waveform: Float[np.ndarray, " samples"], *, bins: int, frames: int | None = None, name: str = "<waveform>"
) -> tuple[Float32[np.ndarray, "{bins} frames"], int]:
    """`log_mel` of a recording with silence after it, and how many frames are recorded: one for every hop begun.

    Args:
        waveform: `[samples]` at 16 kHz.
        bins: mel bins.
        frames: what it is padded to; where not given, to a few frames more than are recorded.
        name: what error messages call it.

    Returns:
        float32 `[bins, frames]`, and the number of frames up to the recording's end.

    Raises:
        InputError: the recording is longer than `frames`.
    """
    recorded = -(-len(waveform) // HOP_SAMPLES)
    if frames is not None and recorded > frames:
        rate = SAMPLE_RATE / HOP_SAMPLES
        raise InputError(
            f"{name}: {len(waveform) / SAMPLE_RATE:.1f} s of audio; this encoder reads {frames / rate:.0f} s: cut it "
            "first"
        )
    # three: what is reflected at the end is silence too
    samples = HOP_SAMPLES * (recorded + 3 if frames is None else frames)
    return log_mel(pad_or_trim(waveform, samples), bins=bins, name=name), recorded


def mel_filters(bins: int) -> Float64[np.ndarray, "frequencies {bins}"]:
    """Triangular mel filters over the 201 FFT frequencies of 0 to 8 kHz, Slaney's scale and area normalisation.

    Slaney's Auditory Toolbox (1998): linear up to 1 kHz (15 mel), logarithmic above, 27 mel to a factor of 6.4.

    Args:
        bins: number of filters.

    Returns:
        float64 `[201, bins]`.
    """
    top_mel = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000) / math.log(6.4)
    mels = np.linspace(0, top_mel, bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, WINDOW_SAMPLES // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))
    return triangles


def _array_mono(array: np.ndarray, name: str) -> Float32[np.ndarray, " samples"]:
    if array.ndim not in (1, 2) or (array.ndim == 2 and min(array.shape) > 32):
        raise InputError(f"{name}: shape {array.shape}, expected [samples] or two dimensions, the shorter the channels")
    kind, size_bytes = array.dtype.kind, array.dtype.itemsize
    scaled: np.ndarray
    if kind == "f":
        scaled = array.astype(np.float32)
    elif kind == "i" and size_bytes in (2, 4):
        scaled = (array / 2 ** (8 * size_bytes - 1)).astype(np.float32)
    elif kind == "u" and size_bytes == 1:
        scaled = (array.astype(np.float32) - 128) / 128
    else:
        raise InputError(f"{name}: dtype {array.dtype}, expected float, int16, int32 or uint8")
    if scaled.ndim == 1 or scaled.size == 0:
        return scaled.ravel()
    return np.asarray(np.mean(scaled, axis=int(np.argmin(scaled.shape))))


def _file_mono(source: Any, name: str) -> tuple[Float32[np.ndarray, " samples"], float]:
    soundfile: Any = require("soundfile")
    file = open_source(source, name)
    try:
        with soundfile.SoundFile(file) as sound:
            parts = []  # read by blocks: a damaged header may promise more samples than memory holds
            while len(block := sound.read(2**20, dtype="float32", always_2d=True)):
                parts.append(block.mean(axis=1))
            waveform = np.concatenate([np.zeros(0, np.float32), *parts])
            if len(waveform) < sound.frames:
                raise InputError(f"{name}: truncated, {len(waveform)} of {sound.frames} samples are there")
            return waveform, sound.samplerate
    except soundfile.LibsndfileError as error:
        refusal = error
    av: Any = require("av")  # containers that libsndfile does not know: MP4, M4A, WebM
    try:
        with open_container(file) as container:
            if not container.streams.audio:
                raise InputError(f"{name}: the file has no audio stream")
            as_float = av.AudioResampler(format="fltp")
            decoded = [*container.decode(audio=0), None]
            parts = [part.to_ndarray().mean(axis=0) for frame in decoded for part in as_float.resample(frame)]
            rate = container.streams.audio[0].rate
    except (av.error.FFmpegError, OSError) as error:
        raise InputError(f"{name}: not readable audio (libsndfile: {refusal}; FFmpeg: {error})") from error
    return np.concatenate([np.zeros(0, np.float32), *parts]), rate
