"""A hub id, against a loopback server that stands in for the hub: what is asked for, and what is not."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints_convert import tiny
from tests.checkpoints_convert.hub import COMMIT, Hub
from tests.parity.checkpoints import kimi_k25

LANGUAGE = "model-00001-of-00003.safetensors"
# The endpoint is read when huggingface_hub is imported, so that each case runs in a process of its own.
SCRIPT = """
import json, sys
from checkpoints_convert import CheckpointError, Target, detect, load_parameters, mappings, open_source
reports = []
for name, revision, token in json.loads(sys.argv[2]):
    try:
        source = open_source(name, revision=revision, token=token)
        mapping = detect(source, mappings.kimi_k25.mappings(**json.loads(sys.argv[1])))
        params = load_parameters(source, mapping, {p: Target(s, "float32") for p, s in mapping.shapes.items()})
        reports.append({"sum": float(sum(float(abs(v).sum()) for v in params.values())), "revision": source.revision,
                        "files": source.sizes, "etags": source.etags, "config": source.config,
                        "bytes_fetched": source.bytes_fetched})
    except CheckpointError as error:
        reports.append({"error": str(error)})
print(json.dumps(reports))
"""


@pytest.fixture
def tower() -> tiny.Tensors:
    return tiny.kimi_original()


@pytest.fixture
def hub(tmp_path, tower) -> Iterator[Hub]:
    items = list(tower.items())
    tiny.write_folder(tmp_path / "repo", tiny.language_model(), dict(items[:20]), dict(items[20:]))
    hub = Hub(tmp_path / "repo")
    yield hub
    hub.close()


def command_line(hub, tmp_path, *arguments, offline=False, **environment):
    """Python in a process of its own, for which this is the hub."""
    env = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    env.pop("HF_TOKEN", None)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=env | environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


def run(hub, tmp_path, *cases, offline=False, script=SCRIPT):
    """What opening and loading each (name, revision, token) came to."""
    done = command_line(hub, tmp_path, "-c", script, json.dumps(tiny.KIMI), json.dumps(cases), offline=offline)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if cases else []


def total(tensors):
    return sum(float(np.abs(value.astype(np.float64)).sum()) for value in tensors.values())


def test_only_the_towers_bytes_are_fetched_and_then_kept_for_offline_use(hub, tmp_path, tower):
    (report,) = run(hub, tmp_path, ("org/tiny", None, "secret"))
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["revision"] == COMMIT
    assert report["config"] == {"model_type": "tiny"}
    assert report["etags"] == {
        file: sha256((tmp_path / "repo" / file).read_bytes()).hexdigest() for file in report["files"]
    }
    assert report["files"].keys() == {"model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}
    assert hub.fetched() == {*report["files"], "config.json", "model.safetensors.index.json"}
    assert LANGUAGE not in {request.file for request in hub.requests}
    assert {request.authorization for request in hub.requests} == {"Bearer secret"}
    assert report["bytes_fetched"] == hub.sent_bytes
    # The branch is looked up once; everything after is of the commit it was at.
    assert {request.file for request in hub.requests if request.revision == "main"} == {"config.json"}

    hub.requests.clear()
    again, uncached = run(hub, tmp_path, ("org/tiny", None, None), ("org/uncached", None, None), offline=True)
    assert (again["sum"], again["bytes_fetched"], again["etags"]) == (report["sum"], 0, report["etags"])
    assert "org/uncached: config.json: not in the cache" in uncached["error"]
    assert hub.requests == []


def test_what_is_cached_whole_is_read_from_there(hub, tmp_path, tower):
    blob = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT / "model-00002-of-00003.safetensors"
    blob.parent.mkdir(parents=True)
    blob.write_bytes((tmp_path / "repo" / blob.name).read_bytes())
    (report,) = run(hub, tmp_path, ("org/tiny", None, None))
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert hub.fetched() == {"config.json", "model.safetensors.index.json", "model-00003-of-00003.safetensors"}


def test_offline_without_the_weights_says_so(hub, tmp_path):
    command = "from huggingface_hub import hf_hub_download as get\nfor f in ('config.json', %r): get('org/tiny', f)"
    run(hub, tmp_path, script=command % "model.safetensors.index.json")
    (report,) = run(hub, tmp_path, ("org/tiny", None, None), offline=True)
    first, second = report["error"].splitlines()[1:]
    assert "model-00002-of-00003.safetensors: not in the cache, and HF_HUB_OFFLINE is set" in first
    assert "model-00003-of-00003.safetensors: not in the cache" in second


def test_weights_that_the_hub_sends_from_elsewhere_are_told_apart_by_the_hubs_etag(hub, tmp_path, tower):
    front = Hub(tmp_path / "repo", store=hub)
    (report,) = run(front, tmp_path, ("hf://org/tiny@v1", None, "secret"))
    front.close()
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["etags"].keys() == report["files"].keys()
    assert {request.file for request in hub.requests} == report["files"].keys()
    assert {request.authorization for request in hub.requests} == {""}  # the token stays with the hub


def test_a_server_that_does_not_send_parts_has_the_towers_files_downloaded_whole(tmp_path, hub, tower):
    whole = Hub(tmp_path / "repo", ranges=False)
    (report,) = run(whole, tmp_path, ("org/tiny", None, None))
    whole.close()
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["etags"].keys() == report["files"].keys()
    assert LANGUAGE not in whole.fetched()


def test_a_single_file_repository_and_a_revision(hub, tmp_path, tower):
    for path in (tmp_path / "repo").glob("*.safetensors*"):
        path.unlink()
    language = tiny.fill({"language_model.a": (1000, 1000), "zzz": (100, 1000)})
    save_file(tower | language, tmp_path / "repo" / "model.safetensors")
    (report,) = run(hub, tmp_path, ("org/tiny", "v1", None))
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["files"].keys() == {"model.safetensors"}
    assert {request.revision for request in hub.requests} == {"v1", COMMIT}
    assert hub.sent_bytes <= (1 << 17) + sum(value.nbytes for value in tower.values())


def test_mistrals_own_files_are_read_where_there_are_no_others(hub, tmp_path, tower):
    for path in (tmp_path / "repo").glob("*.safetensors*"):
        path.unlink()
    save_file(tower, tmp_path / "repo" / "consolidated.safetensors")
    (tmp_path / "repo" / "config.json").rename(tmp_path / "repo" / "params.json")
    (report,) = run(hub, tmp_path, ("org/tiny", "v1", None))
    assert report["files"].keys() == {"consolidated.safetensors"}
    assert report["config"] == {"model_type": "tiny"}
    # after the files that are not there, everything is of one commit
    first_look = {request.file for request in hub.requests if request.revision == "v1"}
    assert first_look == {"config.json", "params.json"}


def test_what_the_hub_does_not_have_is_said(hub, tmp_path):
    (tmp_path / "repo" / "model-00003-of-00003.safetensors").unlink()
    (tmp_path / "repo" / "model-00002-of-00003.safetensors").unlink()
    cases = (("org/tiny", None, None), ("org/tiny", "nowhere", None), ("org/other", None, None))
    cases = (*cases, ("hf://org/tiny@main", "v1", None))
    file, revision, repository, two = (report["error"] for report in run(hub, tmp_path, *cases))
    assert "model-00002-of-00003.safetensors: the hub has no such file" in file
    assert "model-00003-of-00003.safetensors: the hub has no such file" in file
    assert file.splitlines()[0].startswith("org/tiny: ")
    assert "RevisionNotFound" in revision
    assert "RepositoryNotFound" in repository
    assert "names the revision main, but v1 is asked for" in two

    shutil.rmtree(tmp_path / "home")
    for path in (tmp_path / "repo").glob("model*"):
        path.unlink()
    (report,) = run(hub, tmp_path, ("org/tiny", None, None))
    assert "org/tiny: has none of model.safetensors.index.json, model.safetensors, consolidated" in report["error"]


def test_pickles_of_a_hub_are_downloaded_whole(hub, tmp_path, tower):
    torch = pytest.importorskip("torch")
    for path in (tmp_path / "repo").glob("*.safetensors*"):
        path.unlink()
    tensors = {name: torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) for name, value in tower.items()}
    torch.save(tensors, tmp_path / "repo" / "pytorch_model.bin")
    (report,) = run(hub, tmp_path, ("org/tiny", None, None))
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["etags"].keys() == {"pytorch_model.bin"}


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_shows_what_is_fetched_and_what_is_converted(tmp_path, quiet):
    hub = Hub(kimi_k25().write(tmp_path / "repo", dtype="bfloat16"))
    try:
        program = "from checkpoints_convert.cli import main; main()"
        arguments = ["convert", "org/tiny", "converted", *(["--quiet"] if quiet else [])]
        done = command_line(hub, tmp_path, "-c", program, *arguments, FORCE_COLOR="1", COLUMNS="120")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "converted").is_dir()
        for shown in ("fetching", "converting org/tiny"):
            assert (shown in done.stderr) != quiet
    finally:
        hub.close()
