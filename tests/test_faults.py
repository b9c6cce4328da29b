"""Faults of workers, each in real processes: every request ends in time, and the side that is left serves on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import faulty
import psutil
import pytest
from pairs import check_finished, expected, folder, killed, pid, requests, settings

from pdlib import workers
from pdlib.spec import InputError
from pdlib.workers import Failed, Finished, Request
from pdlib.workers.client import Worker
from pdlib.workers.serving import serve

TESTS = Path(__file__).parent
SOON = 5.0  # seconds within which a death has to be noticed


def end_soon(both, numbers):
    """Results that are there within the stated time of a death; none of them by waiting too long."""
    end = time.monotonic() + SOON
    results = [both.result(number, max(0.0, end - time.monotonic())) for number in numbers]
    assert not [r for r in results if isinstance(r, Failed) and "no answer" in r.reason]
    return results


@pytest.fixture(scope="module")
def lasting():
    """A pair whose sides die again and again; who is left is the same process throughout."""
    with workers.pair(**settings()) as pair:
        yield pair


def with_fault(pair, role, entry):
    """Start a side anew, with a fault."""
    pair.entries[role] = entry
    worker = pair.workers[role]
    if worker.ended() is None:
        worker.kill()
    pair.restart(role)


def healthy(pair, role):
    """Start a side that has died anew, in health, and see both serve."""
    pair.entries[role] = serve
    pair.restart(role)
    asked = requests(6, seed=9)
    check_finished(pair.run(asked), asked, folder())


@pytest.mark.parametrize("when", ["before", "middle", "after", "started"])
def test_p_is_killed_and_d_loses_nothing_it_holds(lasting, when):
    d = pid(lasting, "d")
    asked = requests(8, seed=4, most=40)
    with_fault(lasting, "p", partial(faulty.p_dies, when, lasting._next + 3))  # the fourth of these
    numbers = [lasting.submit(request) for request in asked]
    killed(lasting, "p")
    results = end_soon(lasting, numbers)
    at_d = 3 if when != "started" else 4
    check_finished(results[:at_d], asked[:at_d], folder())
    assert all(
        isinstance(r, Failed)
        and r.reason
        == "P was killed by SIGKILL; start it again (restart) or make a new pair, then send the request again"
        for r in results[at_d:]
    )
    assert pid(lasting, "d") == d
    healthy(lasting, "p")


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_d_is_killed_and_p_ends_what_was_there(lasting, when):
    p = pid(lasting, "p")
    asked = [Request([3, 4], 2), *requests(7, seed=5, most=40)]
    with_fault(lasting, "d", partial(faulty.d_dies, when, 4))
    numbers = [lasting.submit(request) for request in asked]
    killed(lasting, "d")
    results = end_soon(lasting, numbers)
    check_finished(results[:1], asked[:1], folder())
    failed = [r for r in results if isinstance(r, Failed)]
    assert failed and all(re.match(r"P: D is gone \(.*\); start D again", r.reason) for r in failed)
    (late,) = lasting.run([Request([1, 2], 3)])
    assert isinstance(late, Failed) and "D is gone" in late.reason
    (alone,) = lasting.run([Request([1, 2], 1)])
    assert alone.tokens == expected(Request([1, 2], 1), folder())  # P still prefills
    assert pid(lasting, "p") == p
    healthy(lasting, "d")


GARBAGE = [b"\x00\x01\x02 not JSON", b"[1, 2]", b'{"no": "kind"}', b'{"kind": "dance"}', b"x" * 2**20]


@pytest.mark.parametrize("raw", [*GARBAGE, b'{"kind": "want", "id": "a"}', b'{"kind":"coming","id":99,"tag":1}'])
def test_a_p_that_talks_garbage_is_dropped_and_another_one_served(lasting, raw):
    d = pid(lasting, "d")
    with_fault(lasting, "p", partial(faulty.says, "start", raw))
    results = [lasting.result(lasting.submit(request), 20) for request in requests(1, seed=8)]
    assert isinstance(results[0], Failed) and "D is gone (it ended the connection: it sent" in results[0].reason
    lasting.workers["p"].kill()
    healthy(lasting, "p")
    assert pid(lasting, "d") == d


@pytest.mark.parametrize("raw", [GARBAGE[0], GARBAGE[3], b'{"kind":"go","id":"0"}'])
def test_a_d_that_talks_garbage_is_dropped_and_another_one_served(lasting, raw):
    p = pid(lasting, "p")
    with_fault(lasting, "d", partial(faulty.says, "go", raw))
    result = lasting.result(lasting.submit(Request([1, 2], 3)), 20)
    assert isinstance(result, Failed) and "P: D is gone (it sent" in result.reason
    lasting.workers["d"].kill()
    healthy(lasting, "d")
    assert pid(lasting, "p") == p


def test_strangers_at_the_meeting_point_are_turned_away_and_the_right_d_is_served():
    hellos = ["garbage", '{"model": 3}', '{"a": "%s"}' % ("x" * 2**21)]
    asked = requests(4, seed=10)
    with workers.pair(entries={"d": partial(faulty.d_after_garbage, hellos)}, **settings()) as pair:
        check_finished(pair.run(asked), asked, folder())


def test_strangers_at_every_open_port_disturb_nobody(lasting):
    for worker in lasting.workers.values():
        for c in psutil.Process(worker.process.pid).net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN:
                with socket.create_connection(c.laddr) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 100)
    asked = requests(6, seed=11)
    check_finished(lasting.run(asked), asked, folder())


# the beginning


def test_a_peer_that_never_comes_is_waited_for_only_so_long():
    before = time.monotonic()
    with pytest.raises(InputError, match=r"P: no D came to 127.0.0.1 port \d+ within 1 s; start D with this address"):
        workers.pair(entries={"d": faulty.never_comes}, **settings(start_s=1.0))
    assert time.monotonic() - before < 60  # a wait without an end would be noticed here, not a slow machine
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    heard = []
    alone = Worker(
        "d", workers.Settings(**settings(start_s=1.0, port=port)), serve, lambda _, message: heard.append(message)
    )
    alone.ended(30)
    alone.reader.join(5)
    assert alone.ended() == 1
    assert heard[-2]["reason"] == (
        f"D: P did not come to 127.0.0.1 port {port} within 1 s; start P there, or check MASTER_ADDR and MASTER_PORT"
    )


def test_another_model_is_refused_at_the_meeting():
    entry = partial(faulty.other, dict(model=folder("llama")))
    with pytest.raises(InputError, match=r"P turned this D away: P has the model .*architecture \(gpt2 / llama\)"):
        workers.pair(entries={"d": entry}, **settings(start_s=3.0))


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            InputError, match=f"P cannot listen on 127.0.0.1 port {port} \\(Address already in use\\)"
        ):
            workers.pair(**settings(port=port))


# the end


@pytest.mark.parametrize("role", ["p", "d"])
def test_sigterm_finishes_or_reports_every_request(role):
    asked = requests(30, seed=12, most=30)
    with workers.pair(entries={"d": partial(faulty.slow, 0.01)}, **settings()) as pair:
        numbers = [pair.submit(request) for request in asked]
        first = pair.result(numbers[0], 30)
        os.kill(pid(pair, role), signal.SIGTERM)
        results = [first, *(pair.result(number, 30) for number in numbers[1:])]
        assert pair.workers[role].ended(10) == 0
        failed = [r for r in results if isinstance(r, Failed)]
        done = [(r, q) for r, q in zip(results, asked, strict=True) if isinstance(r, Finished)]
        check_finished([r for r, _ in done], [q for _, q in done], folder())
        assert failed and all("was told to end" in r.reason for r in failed), failed


NOTEBOOK = """
from pdlib import workers
if __name__ == "__main__":
    asked = [workers.Request([i % 50, 2, 3], 2 + i % 60) for i in range(200)]
    with workers.pair(model={folder!r}, capacity=128, road="memory") as pair:
        print("ready", flush=True)
        while True:
            pair.run(asked)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_notebook_leaves_nothing_behind(tmp_path, number):
    before = set(os.listdir("/dev/shm"))
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(folder=folder()))
    notebook = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests' own may be ignored
    )
    assert notebook.stdout.readline().startswith("ready")
    family = psutil.Process(notebook.pid).children(recursive=True)
    assert len(family) >= 3  # P, D and the server they were forked from
    time.sleep(0.5)
    os.killpg(notebook.pid, number) if number == signal.SIGINT else notebook.kill()  # a terminal's Ctrl-C goes to all
    _, error = notebook.communicate(timeout=30)
    assert number != signal.SIGINT or "KeyboardInterrupt" in error
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert set(os.listdir("/dev/shm")) <= before


FULL = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {python} -c '
import sys
sys.path[:0] = ["{tests}"]
from pairs import settings
from pdlib import spec, workers
try:
    workers.pair(**settings(road="memory"))
except spec.InputError as error:
    print(error)
'
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode != 0,
    reason="needs a /dev/shm of its own",
)
def test_a_full_dev_shm_is_said_at_the_start():
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL.format(python=sys.executable, tests=TESTS)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.search(r"P: .* MB of shared memory cannot be had in /dev/shm \(No space left on device", run.stdout), (
        run
    )
