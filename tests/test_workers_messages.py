"""What workers say to each other: everything is checked before it is used."""

import os

import psutil
import pytest

from pdlib import workers
from pdlib.spec import InputError
from pdlib.workers import Finished, Request, Settings
from pdlib.workers.meeting import Hello, interface
from pdlib.workers.messages import Lines, decode, encode, finished, report


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(road="air"), "unknown road"),
        (dict(how="slowly"), "unknown way"),
        (dict(dtype="int8"), "unknown dtype"),
        (dict(slots=0), "slots = 0"),
        (dict(capacity=True), "capacity = True"),
        (dict(start_s=0), "start_s = 0"),
        (dict(port=70000), "port 70000"),
    ],
)
def test_settings_are_checked(changes, says):
    with pytest.raises(InputError, match=says):
        Settings(**changes)


@pytest.mark.parametrize("prompt, new", [([], 2), ([-1], 2), (["a"], 2), ([True], 2), ([1], 0), ([1], 1.5)])
def test_requests_are_checked(prompt, new):
    with pytest.raises(InputError):
        Request(prompt, new)


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"[]", b"3", b"{", b"[" * 100_000, b" " * 2**20 + b"{}", b"NaN"])
def test_what_is_no_message_is_refused(raw):
    with pytest.raises(InputError, match="no message"):
        decode(raw)


def test_a_result_survives_the_wire():
    times = workers.Times(1.0, 2.0, 3.0, 4.0, (3.0, 5.5))
    done = Finished(3, (7, 8), times, 1)
    assert finished(decode(encode(report(done)))) == done


@pytest.mark.parametrize(
    "change",
    [
        {"id": "3"},
        {"tokens": [1.5, 2]},
        {"tokens": None},
        {"redone": -1},
        {"times": []},
        {"tokens": [1]},
        {"id": 2**60},
    ],
)
def test_a_false_result_is_refused(change):
    done = Finished(3, (7, 8), workers.Times(1.0, 2.0, 3.0, 4.0, (3.0, 5.5)))
    with pytest.raises(InputError):
        finished(decode(encode(report(done) | change)))


def test_lines_come_whole_and_long_ones_do_not_fill_the_memory():
    reading, writing = os.pipe()
    received = []
    thread = Lines(reading, -1).listen(received.append)
    with os.fdopen(writing, "wb") as file:
        file.write(b'{"a": 1}\n{"b"')
        file.flush()
        file.write(b": 2}\n" + b"x" * (3 * 2**20) + b"\nlast")
    thread.join(10)
    os.close(reading)
    assert received[:2] == [b'{"a": 1}', b'{"b": 2}'] and received[-2:] == [b"last", None]
    assert sum(len(piece) for piece in received[2:-2]) == 3 * 2**20
    assert max(len(piece) for piece in received[:-1]) <= 2**20 + 65536


def test_telling_ends_when_nobody_reads():
    reading, writing = os.pipe()
    with pytest.raises(workers.messages.ClientGone, match="nothing was read for 0.1 s"):
        Lines(-1, writing, patience_s=0.1).tell(text="x" * 2**18)
    os.close(reading)
    with pytest.raises(workers.messages.ClientGone):
        Lines(-1, writing).tell(text="x")
    os.close(writing)


@pytest.mark.parametrize("change", [{"slots": -1}, {"slots": 2**60}, {"road": 3}, {"model": 0}, {"more": 1}])
def test_a_false_hello_is_refused(change):
    hello = vars(Hello({"name": "a"}, "network", 8, 2, ""))
    assert Hello.read(encode(hello)) == Hello(**hello)
    with pytest.raises(InputError, match="is no hello"):
        Hello.read(encode(hello | change))


def test_another_model_is_refused_with_both_named():
    ours = Hello({"name": "gpt2", "layers": 2, "weights": "a"}, "network", 8, 2, "")
    ours.check(Hello(ours.model | {"name": "/a/folder"}, "network", 4, 1, ""), "P", "D")
    with pytest.raises(InputError, match=r"P has the model gpt2, D has b; they differ in layers \(2 / 4\)"):
        ours.check(Hello(ours.model | {"name": "b", "layers": 4}, "network", 8, 2, ""), "P", "D")
    with pytest.raises(InputError, match="P hands over by network, D by memory"):
        ours.check(Hello(ours.model, "memory", 8, 2, ""), "P", "D")


def test_the_interface_of_an_address():
    assert "127.0.0.1" in [a.address for a in psutil.net_if_addrs()[interface("127.0.0.1")]]
    with pytest.raises(InputError, match="no network of this machine holds 203.0.113.9: set GLOO_SOCKET_IFNAME"):
        interface("203.0.113.9")
