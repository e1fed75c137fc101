"""A file of which only parts are fetched: which parts, and what happens when the network or the server fails."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from checkpoints_convert import CheckpointError, Source
from checkpoints_convert.hub import HubFile
from checkpoints_convert.ranges import PROBE_BYTES, RangedFile, RangesUnsupportedError, Retries
from checkpoints_convert.sources import Traffic
from tests.checkpoints_convert.hub import Hub, Reply, Request

QUICK = Retries(times=2, wait_s=0.01)
# Beside the towers of two files there is much that nobody wants; names sort as they lie.
SIZES = {"a": 60_000, "b.0": 50_000, "b.1": 70_000, "c": 80_000, "d": 40_000}
WANTED = ["b.0", "b.1", "d"]


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(size, np.float32) for name, size in SIZES.items()}


@pytest.fixture
def hub(tmp_path, tensors, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "repo").mkdir()
    save_file(tensors, tmp_path / "repo" / "x.safetensors")
    hub = Hub(tmp_path / "repo")
    yield hub
    hub.close()


@pytest.fixture
def opened(hub, tmp_path):
    """Opens a file of the loopback hub, as a source."""

    def open_source(*, progress=None, note=None, online=True, timeout_s=5.0) -> Source:
        traffic = Traffic(progress)

        def open_file(file):
            remote = HubFile(f"{hub.url}/org/tiny/resolve/main/{file}", file, retries=QUICK, timeout_s=timeout_s)
            place = {"folder": tmp_path / "kept", "note": note and tmp_path / note}
            return RangedFile(remote if online else None, file, **place, retries=QUICK, count=traffic.fetched)

        names = dict.fromkeys(SIZES, "x.safetensors")
        return Source("org/tiny", names, open_file=open_file, locate=tmp_path.joinpath, traffic=traffic)

    return open_source


def fetched(source, tensors, names=WANTED):
    """Whether these tensors arrive as they are."""
    assert source.open(names) == []
    source.prefetch(names)
    return all(np.array_equal(source.read(name), tensors[name]) for name in names)


def on_tensors(change):
    """A fault of the first request for tensors, after that for the header."""
    waiting = [change]

    def fault(request: Request, reply: Reply) -> None:
        if request.start and waiting:
            waiting.pop()(request, reply)

    return fault


def test_the_header_then_each_run_of_wanted_tensors_in_one_request(hub, opened, tensors, tmp_path):
    progress = []
    source = opened(progress=lambda *now: progress.append(now))
    assert source.open(WANTED) == []
    assert [(r.start, r.stop) for r in hub.requests] == [(0, PROBE_BYTES)]
    source.prefetch(WANTED)
    spans = {name: (source.info(name).offset, source.info(name).size_bytes) for name in WANTED}
    assert sorted((r.start, r.stop) for r in hub.requests[1:]) == [
        (spans["b.0"][0], spans["b.1"][0] + spans["b.1"][1]),
        (spans["d"][0], sum(spans["d"])),
    ]
    wanted = sum(tensors[name].nbytes for name in WANTED)
    assert source.bytes_fetched == hub.sent_bytes == PROBE_BYTES + wanted
    assert progress[-1] == (wanted, wanted)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)

    hub.requests.clear()
    out = np.empty(100, np.float32)
    source.read_into("b.1", out, start=300)
    assert np.array_equal(out, tensors["b.1"][300:400])
    assert fetched(source, tensors)
    assert fetched(opened(), tensors)  # another source needs the header alone, to know that it is the same file
    assert [(r.start, r.stop) for r in hub.requests] == [(0, PROBE_BYTES)]


def test_a_file_that_cannot_change_is_not_asked_for_again(hub, opened, tensors):
    assert fetched(opened(note="note.json"), tensors)
    hub.requests.clear()
    assert fetched(opened(note="note.json", online=False), tensors)
    assert hub.requests == []
    source = opened(note="note.json", online=False)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: bytes \d+-\d+ of it have not been fetched before"):
        source.read("c")


def test_a_tensor_that_was_not_fetched_ahead_is_fetched_when_it_is_read(hub, opened, tensors):
    source = opened()
    assert np.array_equal(source.read("c"), tensors["c"])
    assert source.bytes_fetched == PROBE_BYTES + tensors["c"].nbytes
    assert np.array_equal(source.read("c"), tensors["c"])
    assert len(hub.requests) == 2


def test_a_header_longer_than_the_first_request(hub, opened, tmp_path):
    names = {f"n{i:05}": np.float32([i]) for i in range(4000)}
    save_file(names, tmp_path / "repo" / "x.safetensors", metadata={"k": "v"})
    file = RangedFile(HubFile(f"{hub.url}/org/tiny/resolve/main/x.safetensors", "x"), "x", tmp_path / "kept")
    assert file.header.header_bytes > PROBE_BYTES
    assert file.read("n03999").tolist() == [3999]


def test_many_files_are_opened_and_fetched_at_once(hub, opened, tensors, tmp_path):
    for n in range(8):
        save_file({f"t{n}": tensors["a"]}, tmp_path / "repo" / f"f{n}.safetensors")
    hub.fault = lambda request, reply: time.sleep(0.2)
    source = opened()
    source.files.clear()
    source.files.update({f"t{n}": f"f{n}.safetensors" for n in range(8)})
    begun = time.monotonic()
    assert source.open(source.names) == []
    source.prefetch(source.names)
    assert time.monotonic() - begun < 16 * 0.2 / 2
    assert all(np.array_equal(source.read(name), tensors["a"]) for name in source.names)


def test_two_sources_at_once_fetch_everything_once(hub, opened, tensors):
    sources = [opened(), opened()]
    for source in sources:
        source.open(WANTED)
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda source: fetched(source, tensors), sources))
    assert hub.sent_bytes == 2 * PROBE_BYTES + sum(tensors[name].nbytes for name in WANTED)


def test_a_transfer_that_is_cut_goes_on_where_it_was(hub, opened, tensors):
    def cut(request, reply):
        reply.drop_after = 100_000

    hub.fault = on_tensors(cut)
    source = opened()
    assert fetched(source, tensors)
    asked = {(r.start, r.stop) for r in hub.requests}
    assert any((start + 100_000, stop) in asked for start, stop in asked)
    assert source.bytes_fetched == PROBE_BYTES + sum(tensors[name].nbytes for name in WANTED)


def test_a_header_that_is_cut_goes_on_too(hub, opened, tensors):
    hub.fault = lambda request, reply: setattr(reply, "drop_after", 50_000 if request.start == 0 else None)
    assert fetched(opened(), tensors)
    assert [r.start for r in hub.requests][:2] == [0, 50_000]


def test_a_transfer_that_stalls_is_cut_and_goes_on(hub, opened, tensors):
    def stall(request, reply):
        reply.drop_after, reply.stall_s = 1000, 3

    hub.fault = on_tensors(stall)
    begun = time.monotonic()
    assert fetched(opened(timeout_s=0.3), tensors)
    assert time.monotonic() - begun < 2.5


def test_an_answer_with_too_few_bytes_is_asked_for_again(hub, opened, tensors):
    def short(request, reply):
        reply.body = reply.body[:777]

    hub.fault = on_tensors(short)
    assert fetched(opened(), tensors)


@pytest.mark.parametrize(
    ("status", "headers", "least_s"), [(429, {"Retry-After": "0"}, 1.0), (500, {}, 0), (503, {}, 0)]
)
def test_a_server_that_says_later_is_asked_later(hub, opened, tensors, status, headers, least_s):
    def later(request, reply):
        reply.status, reply.body = status, b""
        reply.headers = headers

    hub.fault = on_tensors(later)
    begun = time.monotonic()
    assert fetched(opened(), tensors)
    assert least_s <= time.monotonic() - begun < least_s + 3


def test_a_server_that_fails_for_good_is_named_with_what_it_said(hub, opened, tensors):
    source = opened()
    source.open(WANTED)

    def fail(request, reply):
        reply.status, reply.body, reply.headers = 500, b"", {}

    hub.fault = fail
    with pytest.raises(CheckpointError, match=r"x\.safetensors: HfHubHTTPError: Server error '500") as error:
        source.prefetch(WANTED)
    assert str(error.value).startswith("org/tiny: cannot be fetched")
    hub.fault = lambda request, reply: None
    assert fetched(source, tensors)


def test_a_connection_that_always_breaks_is_given_up_and_what_came_is_kept(hub, opened, tensors):
    source = opened()
    source.open(["c"])
    offset = source.info("c").offset

    def nothing_more(request, reply):
        reply.drop_after = max(0, offset + 200_000 - request.start)

    hub.fault = nothing_more
    with pytest.raises(CheckpointError, match=rf"broke off at {offset + 200_000}, and 2 more tries gave nothing"):
        source.prefetch(["c"])
    hub.fault = lambda request, reply: None
    hub.requests.clear()
    assert fetched(opened(), tensors, ["c"])
    assert [r.start for r in hub.requests] == [0, offset + 200_000]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_file_that_changes_midway_is_an_error_and_not_a_mixture(hub, opened, tensors, tmp_path, at_once):
    changed = {name: value + 1 for name, value in tensors.items()}
    source = opened()
    source.open(WANTED)
    if at_once:
        save_file(changed, tmp_path / "repo" / "x.safetensors")
    else:

        def cut(request, reply):
            reply.drop_after = 1000
            save_file(changed, tmp_path / "repo" / "x.safetensors")

        hub.fault = on_tensors(cut)
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors: has changed while it was read: \d+ bytes with the etag"
    ):
        source.prefetch(WANTED)
    assert fetched(opened(), changed)


@pytest.mark.parametrize(
    ("content_range", "message"),
    [
        ("bytes 7-{last}/{total}", "sends bytes from 7 on, not from"),
        ("bytes {first}-{last}/99", "has changed while it was read"),
        ("bytes */{total}", "sends all of it where a part was asked for"),
    ],
)
def test_an_answer_of_other_bytes_is_refused(hub, opened, content_range, message):
    def wrong(request, reply):
        first, last, total = reply.headers["Content-Range"].removeprefix("bytes ").replace("/", "-").split("-")
        reply.headers["Content-Range"] = content_range.format(first=first, last=last, total=total)

    source = opened()
    source.open(WANTED)
    hub.fault = on_tensors(wrong)
    with pytest.raises(CheckpointError, match=message):
        source.prefetch(WANTED)


def test_an_answer_of_more_bytes_than_were_asked_for_is_refused(hub, opened):
    def more(request, reply):
        reply.body += b"more"

    source = opened()
    source.open(WANTED)
    hub.fault = on_tensors(more)
    with pytest.raises(CheckpointError, match="sends more than the bytes"):
        source.prefetch(WANTED)


def test_all_of_the_file_in_place_of_a_part_is_refused_before_it_comes(hub, opened, tmp_path):
    def whole(request, reply):
        reply.status, reply.body = 200, (tmp_path / "repo" / "x.safetensors").read_bytes()
        del reply.headers["Content-Range"]

    source = opened()
    source.open(WANTED)
    hub.fault = on_tensors(whole)
    with pytest.raises(CheckpointError, match="sends all of it where a part was asked for"):
        source.prefetch(WANTED)
    assert source.bytes_fetched <= PROBE_BYTES + sum(4 * SIZES[name] for name in WANTED)


def test_without_an_etag_parts_are_not_put_together(hub, tmp_path):
    hub.fault = lambda request, reply: reply.headers.pop("ETag")
    with pytest.raises(RangesUnsupportedError, match="no etag"):
        RangedFile(HubFile(f"{hub.url}/org/tiny/resolve/main/x.safetensors", "x"), "x", tmp_path / "kept")


def test_every_file_that_cannot_be_had_is_in_one_report(hub, opened, tensors, tmp_path):
    tiny = json.dumps({"t": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    (tmp_path / "repo" / "cut.safetensors").write_bytes(len(tiny).to_bytes(8, "little") + tiny + bytes(20))
    (tmp_path / "repo" / "bad.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{" + bytes(99))
    source = opened()
    source.files.update({"t": "cut.safetensors", "u": "bad.safetensors", "v": "gone.safetensors"})
    bad, cut, gone = sorted(source.open([*WANTED, "t", "u", "v"]))
    assert bad.startswith("bad.safetensors: malformed header")
    assert cut.startswith("cut.safetensors: truncated (")
    assert gone.startswith("gone.safetensors: the hub has no such file")


def test_where_pieces_cannot_be_kept_is_said(hub, tmp_path):
    (tmp_path / "kept").write_bytes(b"a file")
    with pytest.raises(CheckpointError, match="x: what comes of it cannot be kept"):
        RangedFile(HubFile(f"{hub.url}/org/tiny/resolve/main/x.safetensors", "x"), "x", tmp_path / "kept")


def test_one_failure_stops_the_other_transfers(hub, opened, tensors):
    def fault(request, reply):
        if request.start and len(reply.body) == tensors["d"].nbytes:
            time.sleep(0.3)
            reply.status, reply.body, reply.headers = 403, b"{}", {}
        elif request.start:
            reply.drop_after = 1000

    source = opened()
    source.open(WANTED)
    hub.fault = fault
    with pytest.raises(CheckpointError, match="403") as error:
        source.prefetch(WANTED)
    assert len(error.value.problems) == 1
    assert len(hub.requests) < 60  # of the 480 that so short answers would take
