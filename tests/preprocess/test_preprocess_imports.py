import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxenc
from jaxenc.preprocess import load_audio, load_image, load_video

PACKAGE = str(Path(jaxenc.__file__).parent)


def test_preprocessing_imports_neither_jax_nor_a_media_library():
    program = (
        "import sys, types\n"
        "sys.modules['jax'] = None\n"
        f"package = types.ModuleType('jaxenc'); package.__path__ = [{PACKAGE!r}]\n"
        "sys.modules['jaxenc'] = package\n"
        "import jaxenc.preprocess, jaxenc.items, jaxenc.errors\n"
        "print(sorted({'PIL', 'av', 'soundfile', 'soxr', 'torch', 'jaxlib'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("library", "module", "read"),
    [
        ("PIL", "PIL.Image", lambda path: load_image(path)),
        ("soundfile", "soundfile", lambda path: load_audio(path)),
        ("soxr", "soxr", lambda path: load_audio((np.zeros(100), 8000))),
        ("av", "av", lambda path: load_video(path)),
    ],
)
def test_a_missing_media_library_says_how_to_install_it(monkeypatch, tmp_path, library, module, read):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ImportError, match=rf'needs {library}: pip install "jaxenc\[media\]"'):
        read(tmp_path / "file")
