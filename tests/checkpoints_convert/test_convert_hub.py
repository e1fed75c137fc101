"""A hub id, against a loopback server that stands in for the hub: what is asked for, and what is not."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoints_convert import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
                        "files": source.sizes, "config": source.config})
    except CheckpointError as error:
        reports.append({"error": str(error)})
print(json.dumps(reports))
"""


class Hub:
    """Serves one folder as the repository org/tiny at one commit."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[str, str, str, str]] = []  # method, revision, file, authorization
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                parts = self.path.split("?")[0].strip("/").split("/")
                if parts[:3] != ["org", "tiny", "resolve"]:
                    self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
                    return
                revision, file = parts[3], "/".join(parts[4:])
                hub.requests.append((self.command, revision, file, self.headers.get("Authorization", "")))
                if revision not in ("main", "v1", COMMIT):
                    self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
                elif not (folder / file).is_file():
                    self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body=body)
                else:
                    content = (folder / file).read_bytes()
                    headers = {"ETag": f'"{sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                    self.reply(200, content, headers, body=body)

            def reply(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fetched(self) -> set[str]:
        return {file for method, _, file, _ in self.requests if method == "GET"}


@pytest.fixture
def tower() -> tiny.Tensors:
    return tiny.kimi_original()


@pytest.fixture
def hub(tmp_path, tower) -> Iterator[Hub]:
    items = list(tower.items())
    tiny.write_folder(tmp_path / "repo", tiny.language_model(), dict(items[:20]), dict(items[20:]))
    hub = Hub(tmp_path / "repo")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(hub, tmp_path, *cases, offline=False):
    """What opening and loading each (name, revision, token) came to, in a process of its own."""
    env = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    env.pop("HF_TOKEN", None)
    command = [sys.executable, "-c", SCRIPT, json.dumps(tiny.KIMI), json.dumps(cases)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def total(tensors):
    return sum(float(np.abs(value.astype(np.float64)).sum()) for value in tensors.values())


def test_only_the_towers_files_are_downloaded_and_then_kept_for_offline_use(hub, tmp_path, tower):
    (report,) = run(hub, tmp_path, ("org/tiny", None, "secret"))
    assert report["sum"] == pytest.approx(total(tower), rel=1e-5)
    assert report["revision"] == COMMIT
    assert report["config"] == {"model_type": "tiny"}
    assert report["files"].keys() == {"model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}
    assert hub.fetched() == {*report["files"], "config.json", "model.safetensors.index.json"}
    assert LANGUAGE not in {file for _, _, file, _ in hub.requests}
    assert {authorization for *_, authorization in hub.requests} == {"Bearer secret"}
    # The branch is looked up once; everything after is of the commit it was at.
    assert {file for _, revision, file, _ in hub.requests if revision == "main"} == {"config.json"}

    hub.requests.clear()
    again, uncached = run(hub, tmp_path, ("org/tiny", None, None), ("org/uncached", None, None), offline=True)
    assert again["sum"] == report["sum"]
    assert "org/uncached: config.json: not in the cache" in uncached["error"]
    assert hub.requests == []


def test_a_single_file_repository_and_a_revision(hub, tmp_path, tower):
    for path in (tmp_path / "repo").glob("*.safetensors*"):
        path.unlink()
    save_file(tower, tmp_path / "repo" / "model.safetensors")
    (report,) = run(hub, tmp_path, ("org/tiny", "v1", None))
    assert report["files"].keys() == {"model.safetensors"}
    assert {revision for _, revision, _, _ in hub.requests} == {"v1", COMMIT}


def test_mistrals_own_files_are_read_where_there_are_no_others(hub, tmp_path, tower):
    for path in (tmp_path / "repo").glob("*.safetensors*"):
        path.unlink()
    save_file(tower, tmp_path / "repo" / "consolidated.safetensors")
    (tmp_path / "repo" / "config.json").rename(tmp_path / "repo" / "params.json")
    (report,) = run(hub, tmp_path, ("org/tiny", "v1", None))
    assert report["files"].keys() == {"consolidated.safetensors"}
    assert report["config"] == {"model_type": "tiny"}
    # after the files that are not there, everything is of one commit
    first_look = {file for _, revision, file, _ in hub.requests if revision == "v1"}
    assert first_look == {"config.json", "params.json"}


def test_what_the_hub_does_not_have_is_said(hub, tmp_path):
    (tmp_path / "repo" / "model-00003-of-00003.safetensors").unlink()
    cases = (("org/tiny", None, None), ("org/tiny", "nowhere", None), ("org/other", None, None))
    file, revision, repository = (report["error"] for report in run(hub, tmp_path, *cases))
    assert "model-00003-of-00003.safetensors: the hub has no such file" in file
    assert file.splitlines()[0].startswith("org/tiny: ")
    assert "RevisionNotFound" in revision
    assert "RepositoryNotFound" in repository
