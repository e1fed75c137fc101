"""A model on the Hugging Face hub: small files through its cache, weight files in ranges.

Endpoint, token, cache and offline mode are huggingface_hub's own (`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`). A weight file that its cache holds whole is read from there; else the ranges that were fetched are
kept in the cache for assets beside it (`HF_ASSETS_CACHE`), which may be deleted at any time.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from huggingface_hub import cached_assets_path, constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its HTTP library's own
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    Response,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import SafetensorsFile, TensorFile
from checkpoints_convert.ranges import Answer, RangedFile, RangesUnsupportedError, Retries

T = TypeVar("T")

_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)


class HubFile:
    """A file that is sent in parts over HTTP.

    Args:
        url: Where it is.
        name: What errors call it.
        headers: Sent with each request.
        retries: After an answer that says to come back later.
        timeout_s: Without a byte, after which a transfer has broken off.
    """

    transient: tuple[type[Exception], ...] = (HTTPError,)

    def __init__(
        self,
        url: str,
        name: str,
        *,
        headers: Mapping[str, str] | None = None,
        retries: Retries | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._url = url
        self._name = name
        self._headers = dict(headers or {})
        self._retries = retries or Retries()
        self._timeout_s = timeout_s or constants.HF_HUB_DOWNLOAD_TIMEOUT

    @contextmanager
    def get(self, start: int, stop: int) -> Iterator[Answer]:
        """Asks for the bytes from `start` up to `stop`; see `Remote`."""
        # A compressed answer has other bytes.
        headers = {**self._headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with ExitStack() as stack:
            try:
                response = stack.enter_context(
                    http_stream_backoff(
                        "GET",
                        self._url,
                        headers=headers,
                        timeout=self._timeout_s,
                        max_retries=self._retries.times,
                        base_wait_time=self._retries.wait_s,
                        max_wait_time=self._retries.longest_wait_s,
                        # A broken connection is the caller's to mend: it knows how far it has come.
                        retry_on_exceptions=(),
                        retry_on_status_codes=_RETRIED_STATUSES,
                    )
                )
                hf_raise_for_status(response)
            except EntryNotFoundError as error:
                raise CheckpointError(f"{self._name}: the hub has no such file") from error
            except (HfHubHTTPError, OSError) as error:
                raise CheckpointError(f"{self._name}: {type(error).__name__}: {error}") from error
            part = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
            etag = _etag([*response.history, response])
            if response.status_code != 206 or not part or "Content-Encoding" in response.headers:
                raise RangesUnsupportedError(f"{self._name}: the server sends all of it where a part was asked for")
            if not etag:
                raise RangesUnsupportedError(f"{self._name}: the server sends no etag, so that versions could mix")
            yield Answer(etag, int(part[2]), int(part[1]), response.iter_raw())


class Hub:
    """One repository of models.

    Args:
        name: Its id, "org/name".
        revision: Branch, tag or commit. Once a file has said which commit that is, all others come from the same.
        token: Access token; None takes the one that huggingface_hub finds.
        count: Called with the number of bytes that have come of weight files, from any thread.
    """

    def __init__(
        self, name: str, *, revision: str | None, token: str | bool | None, count: Callable[[int], None]
    ) -> None:
        self.name = name
        self.revision = revision
        self._token = token
        self._count = count
        self._pinned = False

    def locate(self, file: str) -> Path:
        """A whole file in huggingface_hub's cache, downloaded where need be.

        Raises:
            CheckpointError: It cannot be had.
        """
        try:
            path = Path(hf_hub_download(self.name, file, revision=self.revision, token=self._token))
        except LocalEntryNotFoundError as error:
            raise CheckpointError(f"{file}: not in the cache, and the hub cannot be reached: {error}") from error
        except EntryNotFoundError as error:
            raise self._absent(file) from error
        except (OSError, HTTPError, HFValidationError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{file}: {why} (there is no folder {self.name} here either)") from error
        commit = path.parents[len(Path(file).parts) - 1]
        if not self._pinned and commit.parent.name == "snapshots":
            # Everything after comes from this commit, even if the branch moves meanwhile.
            self.revision, self._pinned = commit.name, True
        return path

    def optional(self, get: Callable[[str], T], file: str) -> T | None:
        """What `get` makes of a file, or None where there is no such file.

        That is known of the cache alone only if it has something else of this revision.

        Raises:
            CheckpointError: There is no such repository or revision, or nothing can be known.
        """
        try:
            return get(file)
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, EntryNotFoundError) and (
                self._pinned or not isinstance(cause, LocalEntryNotFoundError)
            ):
                return None
            raise

    def open(self, file: str) -> TensorFile:
        """A safetensors file: whole from the cache where it is there, in ranges where it is not.

        Raises:
            CheckpointError: It cannot be had, or its header is unusable.
        """
        cached = try_to_load_from_cache(self.name, file, revision=self.revision) if self._pinned else None
        if isinstance(cached, str):
            return SafetensorsFile(Path(cached), file, etag=cached_etag(Path(cached)))
        url = hf_hub_url(self.name, file, revision=self.revision)
        remote = HubFile(url, file, headers=build_hf_headers(token=self._token))
        folder = cached_assets_path("checkpoints_convert", self.name, "ranges")
        note = folder / "commits" / str(self.revision) / f"{file}.json" if self._pinned else None
        offline = constants.HF_HUB_OFFLINE
        if offline and not (note and note.is_file()):
            absent = LocalEntryNotFoundError("HF_HUB_OFFLINE is set")
            raise CheckpointError(f"{file}: not in the cache, and {absent}") from absent
        try:
            return RangedFile(None if offline else remote, file, folder / "files", note=note, count=self._count)
        except RangesUnsupportedError as error:
            logging.getLogger(__name__).warning("%s; it is downloaded whole", error)
            path = self.locate(file)
            return SafetensorsFile(path, file, etag=cached_etag(path))
        except CheckpointError as error:
            if isinstance(error.__cause__, EntryNotFoundError):
                raise self._absent(file) from error.__cause__
            raise

    def _absent(self, file: str) -> CheckpointError:
        return CheckpointError(f"{file}: the hub has no such file at {self.revision or 'main'}")


def cached_etag(path: Path) -> str:
    """The etag of a file in huggingface_hub's cache: its snapshots are links to blobs that are named so."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" else ""


def _etag(responses: Sequence[Response]) -> str:
    """The etag of a file's content, which the hub itself sends before it hands over to the place that stores it."""
    linked = next((r.headers["X-Linked-Etag"] for r in responses if "X-Linked-Etag" in r.headers), "")
    return str(linked or responses[-1].headers.get("ETag", "")).removeprefix("W/").strip('"')
