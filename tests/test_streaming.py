"""Streams: results in input order, sources read ahead in threads, flat memory; whatever happens, a clean end."""

import contextlib
import gc
import io
import logging
import random
import re
import signal
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from PIL import Image

import jaxenc
from jaxenc import Budget, InputError, VisionItem, encoder, reading
from jaxenc.models import kimi_k25
from jaxenc.reading import AHEAD, read_ahead
from tests.conftest import KIMI
from tests.devices import eight

BUDGET = Budget(64, 1)  # 16 pictures of 4 patches


@pytest.fixture(scope="module")
def kimi():
    return jaxenc.from_config(KIMI, budgets=[BUDGET])


@pytest.fixture(scope="module")
def photos():
    """Sixty pictures, of 4 to 24 patches: dozens of batches."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (28 * (1 + i % 2), 28 * (1 + i % 3), 3), np.uint8) for i in range(60)]


@pytest.fixture(scope="module")
def expected(kimi, photos):
    return kimi.encode(images=photos)


def small(name, value=0.0):
    """The smallest item: four patches, one output row."""
    return VisionItem(np.full((4, 588), value, np.float32), (1, 2, 2), name=name)


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("jaxenc-read")]


def assert_no_reader_is_left():
    deadline = time.monotonic() + 10
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() == []


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Counted:
    """An iterator that knows how many were taken from it."""

    def __init__(self, sources):
        self.sources, self.taken = iter(sources), 0

    def __iter__(self):
        return self

    def __next__(self):
        source = next(self.sources)
        self.taken += 1
        return source


# --- what comes out


def test_an_iterator_gives_what_a_list_gives_in_the_same_order(kimi, photos, expected):
    assert [len(rows) for rows in expected[:6]] == [1, 4, 3, 2, 2, 6]
    stream = kimi.encode(images=(photo for photo in photos))
    assert isinstance(stream, Iterator)
    assert_same(list(stream), expected)
    for photo, rows in zip(photos[:6], expected, strict=False):
        (alone,) = kimi.encode(images=[photo])
        np.testing.assert_allclose(rows, alone, atol=1e-5 * np.abs(alone).max(), rtol=0)


@pytest.mark.parametrize("make", [list, tuple], ids=["list", "tuple"])
def test_a_sequence_gives_a_list(kimi, photos, expected, make):
    rows = kimi.encode(images=make(photos[:3]))
    assert type(rows) is list
    assert type(kimi.encode_items(make(kimi.preprocess(images=photos[:3])))) is list


def test_whatever_else_can_be_iterated_over_gives_an_iterator(kimi):
    class Dataset:
        def __iter__(self):
            return (small(f"{i}", i) for i in range(3))

        def __len__(self):
            return 3

    for sources in (Dataset(), map(small, "abc"), {"a": small("a")}.values()):
        stream = kimi.encode_items(sources)
        assert isinstance(stream, Iterator)
        assert {rows.shape for rows in stream} == {(1, 24)}


def test_an_empty_stream_is_empty(kimi):
    assert kimi.encode(images=[]) == []
    assert list(kimi.encode(images=iter([]))) == []
    assert list(kimi.encode_items(iter([]))) == []


def test_a_stream_of_videos_joins_the_rows_of_each(kimi, photos):
    rng = np.random.default_rng(1)
    videos = [(rng.integers(0, 256, (n, 28, 56, 3), np.uint8), 2.0) for n in (9, 1, 70, 4, 13)]
    results = list(kimi.encode(videos=iter(videos)))
    # chunks of four frames, two rows each
    assert [len(rows) for rows in results] == [6, 2, 36, 2, 8]
    for video, rows in zip(videos, results, strict=True):
        chunks = kimi.encode_items(kimi.preprocess(videos=[video]))
        together = np.concatenate(chunks)
        np.testing.assert_allclose(rows, together, atol=1e-5 * np.abs(together).max(), rtol=0)


def test_the_windows_of_a_recording_may_come_in_several_batches(qwen_folder):
    # windows of 104 tokens, one a batch
    encoder = jaxenc.load(qwen_folder, dtype="float32", budgets=[Budget(104, 1)])
    wide = jaxenc.load(qwen_folder, dtype="float32", budgets=[Budget(832, 1)])
    rng = np.random.default_rng(2)
    clips = [jaxenc.AudioItem(rng.standard_normal((32, n)).astype(np.float32)) for n in (1050, 61, 2000, 800)]
    for rows, other in zip(encoder.encode_items(iter(clips)), wide.encode_items(clips), strict=True):
        np.testing.assert_allclose(rows, other, atol=1e-5 * np.abs(other).max(), rtol=0)


def test_results_of_a_stream_live_where_they_shall(kimi, photos, expected):
    device = SingleDeviceSharding(eight()[5])
    results = list(kimi.encode(images=iter(photos[:20]), out_sharding=device))
    assert all(isinstance(rows, jax.Array) and rows.sharding == device for rows in results)
    assert_same(results, kimi.encode(images=photos[:20]))


def test_one_pil_image_given_many_times_is_decoded_once_by_one_thread(kimi, photos, tmp_path):
    path = tmp_path / "photo.jpg"
    Image.fromarray(np.tile(photos[1], (40, 20, 1))).resize((56, 56)).save(path)
    for _ in range(5):
        image = Image.open(path)
        results = kimi.encode(images=[image] * 8)
        assert all(len(rows) == 4 for rows in results)


# --- when it is read


def test_nothing_is_read_before_the_first_result_is_asked_for(kimi):
    sources = Counted(small(f"{i}") for i in range(1000))
    with contextlib.closing(kimi.encode_items(sources)) as stream:
        assert sources.taken == 0
        assert readers() == []
        next(stream)
    # one batch of 16 is done and one started; at most two wait, beside what is read ahead
    assert 16 <= sources.taken <= 4 * 16 + AHEAD


def test_arguments_are_checked_before_anything_is_read(kimi):
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        kimi.encode_items(iter([]), on_error="ignore")
    with pytest.raises(ValueError, match="layout is 'row'"):
        kimi.encode_items(iter([]), layout="row")
    with pytest.raises(TypeError, match="not audio"):
        kimi.encode(audio=iter([]))


def test_no_more_is_read_ahead_than_the_bound():
    begun = []

    def read(position, source):
        begun.append(position)
        yield source

    sources = Counted(range(1000))
    runs = read_ahead(sources, read)
    for taken, run in enumerate(runs, 1):
        assert list(run.items) == [taken - 1]
        assert sources.taken <= taken + AHEAD - 1
        assert max(begun) < sources.taken
        if taken % 100 == 0:
            time.sleep(0.02)
    assert taken == 1000


def test_what_waits_is_bounded_in_tokens_too():
    sources = Counted(range(100))
    # each fills the bound by itself: there is one for each thread, and one that waits
    runs = read_ahead(sources, lambda position, source: iter([source]), size=lambda item: 10, limit=10)
    for taken in range(1, 30):
        next(runs)
        time.sleep(0.01)
        assert sources.taken <= taken + reading.THREADS
    runs.close()


def test_many_long_videos_are_not_all_read_ahead(monkeypatch):
    monkeypatch.setattr(reading, "THREADS", 8)
    monkeypatch.setattr(reading, "AHEAD", 32)
    made = []

    def read(position, source):
        for i in range(200):
            made.append((position, i))
            yield position, i

    taken = []
    for run in read_ahead(range(32), read, size=lambda item: 1, limit=64):
        taken += run.items
        time.sleep(0.002)
        # the first up to the bound, the next run of it too, and all the others together
        assert len(made) - len(taken) <= 3 * 64
    assert taken == [(position, i) for position in range(32) for i in range(200)]


def test_threads_go_on_while_the_first_source_takes_long():
    rest = threading.Event()

    def read(position, source):
        if position == 0:
            assert rest.wait(10)
        if position == reading.AHEAD - 1:
            rest.set()
        yield position

    if reading.THREADS > 1:
        runs = read_ahead(range(100), read)
        assert [run.items[0] for run in runs] == list(range(100))


def test_a_long_video_is_never_read_in_full(kimi):
    class Frames(list):
        read = 0

        def __getitem__(self, index):
            Frames.read += 1
            return super().__getitem__(index)

    frame = np.zeros((28, 28, 3), np.uint8)
    made, launch = [], kimi._launch
    chunks, alive = weakref.WeakSet(), []

    def watched(items, placed, budget):
        made.append((Frames.read, sum(item.grid[0] for item in items)))
        chunks.update(items)
        alive.append(len(chunks))
        return launch(items, placed, budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi, "_launch", watched)
        (rows,) = kimi.encode(videos=iter([(Frames([frame] * 1200), 2.0)]))
    assert len(rows) == 300
    encoded = np.cumsum([frames for _, frames in made])
    assert encoded[-1] == Frames.read == 1200
    ahead = [read - done for (read, _), done in zip(made, [0, *encoded], strict=False)]
    # a batch is 16 frames: one is laid out, two wait, two are read ahead
    assert max(ahead) <= 5 * 16
    # what is laid out is given up: a batch is 4 chunks
    assert max(alive) <= 2 * 4


# --- batches


def test_batches_depend_on_the_items_alone(kimi, photos, monkeypatch):
    launch, read = kimi._launch, kimi_k25.Config.read

    def batches(seed):
        made, rng = [], random.Random(seed)

        def slow(self, kind, source, *, name):
            time.sleep(rng.choice([0, 0, 0.001, 0.01]))
            return read(self, kind, source, name=name)

        def watched(items, placed, budget):
            made.append((budget, [item.name for item in items], placed))
            time.sleep(rng.choice([0, 0.01]))
            return launch(items, placed, budget)

        monkeypatch.setattr(kimi_k25.Config, "read", slow)
        monkeypatch.setattr(kimi, "_launch", watched)
        return made, list(kimi.encode(images=iter(photos)))

    (first, rows), (second, same) = batches(1), batches(2)
    assert len(first) > 5
    assert first == second
    assert_same(rows, same)


def test_reading_goes_on_in_several_threads_while_a_batch_is_laid_out(kimi, photos, monkeypatch):
    launch, read = kimi._launch, kimi_k25.Config.read
    names, during = set(), []

    def watched_read(self, kind, source, *, name):
        names.add(threading.current_thread().name)
        during.append(launching.is_set())
        return read(self, kind, source, name=name)

    launching = threading.Event()

    def watched(items, placed, budget):
        launching.set()
        time.sleep(0.02)
        out = launch(items, placed, budget)
        launching.clear()
        return out

    monkeypatch.setattr(kimi_k25.Config, "read", watched_read)
    monkeypatch.setattr(kimi, "_launch", watched)
    list(kimi.encode(images=iter(photos)))
    assert any(during)
    assert len(names) > 1 or reading.THREADS == 1
    assert all(name.startswith("jaxenc-read") for name in names)


def test_a_batch_is_laid_out_while_the_one_before_is_computed(kimi, monkeypatch):
    events, launch, fetch = [], kimi._launch, encoder._to_host
    monkeypatch.setattr(kimi, "_launch", lambda *how: events.append("launch") or launch(*how))
    monkeypatch.setattr(encoder, "_to_host", lambda rows: events.append("fetch") or fetch(rows))
    assert len(kimi.encode_items([small(f"{i}") for i in range(60)])) == 60
    assert events == ["launch", "launch", "fetch", "launch", "fetch", "launch", "fetch", "fetch"]


# --- what goes wrong


@pytest.mark.parametrize("at", [0, 7, 59])
def test_an_error_is_raised_in_the_place_of_the_bad_one(kimi, photos, expected, at):
    stream = kimi.encode(images=(b"bad" if i == at else photo for i, photo in enumerate(photos)))
    results = []
    with pytest.raises(InputError, match=rf"^images\[{at}\]: "):
        results.extend(stream)  # keeps what came before
    assert len(results) == at
    for rows, other in zip(results, expected[:at], strict=True):
        np.testing.assert_allclose(rows, other, atol=1e-5 * np.abs(other).max(), rtol=0)
    assert list(stream) == []
    assert_no_reader_is_left()


def test_the_first_of_two_bad_ones_is_raised(kimi, photos):
    with pytest.raises(InputError, match=r"^images\[3\]: "):
        kimi.encode(images=[*photos[:3], b"bad", photos[0], b"worse"])


def test_a_bad_one_that_is_skipped_leaves_none_in_its_place(kimi, photos, expected, caplog):
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        results = list(
            kimi.encode(images=(b"bad" if i in (0, 7, 8, 59) else p for i, p in enumerate(photos)), on_error="skip")
        )
    assert len(results) == 60
    for i, (rows, other) in enumerate(zip(results, expected, strict=True)):
        if i in (0, 7, 8, 59):
            assert rows is None
        else:
            np.testing.assert_allclose(rows, other, atol=1e-5 * np.abs(other).max(), rtol=0)
    assert [re.match(r"skipped: images\[\d+\]", message).group() for message in caplog.messages] == [
        f"skipped: images[{i}]" for i in (0, 7, 8, 59)
    ]


def test_a_video_that_breaks_off_late_is_none_though_its_start_was_encoded(kimi, caplog):
    frame = np.zeros((28, 28, 3), np.uint8)
    broken = ([frame] * 200 + [np.zeros((0, 28, 3), np.uint8)] + [frame] * 200, 2.0)
    good = ([frame] * 5, 2.0)
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        first, none, last = kimi.encode(videos=iter([good, broken, good]), on_error="skip")
    assert none is None
    assert len(first) == len(last) == 2
    assert len(caplog.messages) == 1
    with pytest.raises(InputError, match=r"videos\[1\], frame 200"):
        kimi.encode(videos=[good, broken, good])


def test_one_that_is_too_long_for_any_budget_is_a_bad_one_too(kimi, caplog):
    long = VisionItem(np.zeros((80, 588), np.float32), (1, 8, 10), name="long.png")
    items = [small("a"), long, small("b")]
    with pytest.raises(InputError, match=r"^long\.png: 80 tokens attend together, and the longest row holds 64"):
        kimi.encode_items(items)
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        results = kimi.encode_items(items, on_error="skip")
    assert [rows is None for rows in results] == [False, True, False]
    assert len(caplog.messages) == 1


def test_a_video_of_which_every_chunk_is_too_long_is_one_bad_one(kimi, caplog):
    # 2 x 10 patches a frame, 80 a chunk
    video = (np.zeros((200, 28, 140, 3), np.uint8), 2.0)
    with caplog.at_level(logging.WARNING, logger="jaxenc"):
        assert kimi.encode(videos=[video, video], on_error="skip") == [None, None]
    assert [message[:18] for message in caplog.messages] == ["skipped: videos[0]", "skipped: videos[1]"]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    "error", [OSError("the network is down"), InputError("of the caller's own")], ids=["os", "input"]
)
def test_an_error_of_the_source_comes_after_the_results_before_it(kimi, photos, error, on_error):
    def source():
        yield from photos[:21]
        raise error

    results = []
    with pytest.raises(type(error), match=str(error)):
        results.extend(kimi.encode(images=source(), on_error=on_error))
    assert len(results) == 21
    assert_no_reader_is_left()


def test_an_error_that_is_not_the_inputs_is_not_skipped(kimi, photos, monkeypatch):
    def read(self, kind, source, *, name):
        raise ImportError("no such library")

    monkeypatch.setattr(kimi_k25.Config, "read", read)
    with pytest.raises(ImportError, match="no such library"):
        kimi.encode(images=photos[:3], on_error="skip")


# --- how it ends


def test_closing_a_stream_ends_its_threads(kimi, photos):
    stream = kimi.encode(images=(photos[i % 60] for i in range(10**9)))
    next(stream)
    assert readers()
    stream.close()
    assert_no_reader_is_left()
    assert list(stream) == []


def test_dropping_a_stream_ends_its_threads(kimi):
    stream = kimi.encode_items(small("") for _ in range(10**9))
    for _ in zip(range(40), stream, strict=False):
        pass
    assert readers()
    del stream, _
    gc.collect()
    assert_no_reader_is_left()


def test_a_source_that_is_being_read_is_left_when_a_stream_is_closed():
    def read(position, source):
        yield position
        for _ in range(2000 if position else 0):  # 20 seconds
            time.sleep(0.01)
            yield position

    runs = read_ahead(range(10), read)
    next(runs)
    runs.close()
    assert_no_reader_is_left()


def test_a_finished_stream_has_no_threads(kimi, photos):
    list(kimi.encode(images=iter(photos)))
    kimi.preprocess(images=photos)
    with contextlib.suppress(InputError):
        kimi.preprocess(images=[b"bad", *photos])
    assert_no_reader_is_left()


SCRIPT = """
    import itertools, sys, time
    import numpy as np
    import jaxenc
    from jaxenc.models import kimi_k25
    from tests.conftest import KIMI

    read = kimi_k25.Config.read
    def slow(self, kind, source, *, name):
        time.sleep(0.02)
        return read(self, kind, source, name=name)
    kimi_k25.Config.read = slow

    encoder = jaxenc.from_config(KIMI, budgets=[jaxenc.Budget(64, 1)])
    sources = (np.zeros((28, 28, 3), np.uint8) for _ in itertools.count())
    stream = encoder.encode(images=sources, progress="bar" in sys.argv[1])
    next(stream)
    print("running", flush=True)
    if sys.argv[1] == "interrupted":
        for _ in stream: pass
    elif sys.argv[1] == "in a list":
        encoder.encode(images=[np.zeros((28, 28, 3), np.uint8)] * 10**6)
"""


@pytest.mark.parametrize("how", ["interrupted", "in a list", "left alone", "left with a bar"])
def test_a_process_ends_at_once_and_without_noise(how, python):
    terminal = {"FORCE_COLOR": "1"} if "bar" in how else {}
    process = python("-c", textwrap.dedent(SCRIPT), how, TERM="xterm", COLUMNS="80", **terminal)
    assert process.stdout.readline() == "running\n"
    if "left" not in how:
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    if "left" in how:
        assert process.returncode == 0
        assert ("1/?" in err) == ("bar" in how)
        assert "Exception" not in err
        assert "bar" in how or err == ""
    else:
        assert process.returncode == -signal.SIGINT
        assert err.startswith("Traceback (most recent call last):")
        assert err.count("Traceback") == 1
        assert err.splitlines()[-1] == "KeyboardInterrupt"


# --- memory


def test_memory_is_flat_over_ten_thousand_items(kimi):
    items, results = weakref.WeakSet(), weakref.WeakValueDictionary()
    most_items = most_results = 0

    def source():
        for i in range(10_000):
            item = small(f"{i}", i)
            items.add(item)
            yield item

    count = 0
    for rows in kimi.encode_items(source()):
        results[count] = rows
        count += 1
        if count % 10 == 0:
            most_items, most_results = max(most_items, len(items)), max(most_results, len(results))
    assert count == 10_000
    # two batches of 16 wait and one is laid out, beside what is read ahead
    assert most_items <= 3 * 16 + AHEAD + 4
    assert most_results <= 3 * 16
    del rows
    gc.collect()
    assert len(items) == len(results) == 0


# --- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal; what stands on it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    @contextlib.contextmanager
    def shown():
        with contextlib.redirect_stderr(Terminal()) as fake:
            yield lambda: re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", fake.getvalue())

    return shown


def test_progress_is_shown_on_a_terminal(kimi, photos, expected, terminal):
    with terminal() as shown:
        assert_same(kimi.encode(images=photos, progress=True), expected)
    assert "images" in shown()
    assert "60/60" in shown()
    assert re.search(r"\d/s", shown())


def test_progress_of_a_stream_has_no_total(kimi, photos, terminal):
    with terminal() as shown:
        stream = kimi.encode(images=iter(photos[:20]), progress=True)
        assert shown() == ""
        list(stream)
    assert "20/?" in shown()


def test_closing_a_stream_with_progress_ends_both(kimi, photos, terminal):
    with terminal() as shown:
        stream = kimi.encode(images=iter(photos), progress=True)
        next(stream)
        stream.close()
    assert_no_reader_is_left()
    assert "1/?" in shown()
    assert shown().endswith("\n")


def test_nothing_is_shown_where_it_is_not_asked_for_or_there_is_no_terminal(kimi, photos, terminal):
    with terminal() as shown:
        kimi.encode(images=photos[:3])
    assert shown() == ""
    with contextlib.redirect_stderr(io.StringIO()) as file:
        kimi.encode(images=photos[:3], progress=True)
    assert file.getvalue() == ""
