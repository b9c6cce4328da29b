"""workers: requests through P and D as real processes end with the tokens of one process, however started."""

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest
from pairs import check_finished, expected, folder, requests, settings

from pdlib import workers
from pdlib.spec import InputError
from pdlib.workers import Failed, Finished, Request
from pdlib.workers.__main__ import main
from pdlib.workers.messages import finished


@pytest.fixture(scope="module")
def both():
    with workers.pair(**settings()) as pair:
        yield pair


def test_many_requests_in_flight_end_with_the_tokens_of_one_process(both):
    asked = requests(40)
    check_finished(both.run(asked), asked, folder())


@pytest.mark.parametrize(
    "changes",
    [
        dict(how="whole", checksums=False),
        dict(road="memory"),
        dict(road="memory", model="qwen3", slots=1),
        dict(model="llama", slots=7),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_every_road_and_way(changes):
    name = folder(changes.get("model", "gpt2"))
    before = set(os.listdir("/dev/shm")) if sys.platform == "linux" else set()
    asked = requests(20, seed=1)
    with workers.pair(**settings(**changes | {"model": name})) as pair:
        check_finished(pair.run(asked), asked, name)
        both = list(pair.workers.values())
        if sys.platform == "linux":
            assert set(os.listdir("/dev/shm")) <= before  # mapped on both sides: the name is gone already
    assert [worker.ended() for worker in both] == [0, 0]


def test_d_decodes_requests_together(both):
    results = both.run([Request([i + 1, 2, 3], 100) for i in range(4)])
    steps = [set(result.times.tokens[1:]) for result in results]
    shared = set.intersection(*steps)
    assert len(shared) > 10  # one step, one time, for all four


def test_times_follow_each_other(both):
    for result in both.run(requests(12, seed=2)):
        times = result.times
        order = [times.arrived, times.prefill_start, times.prefill_end, *times.tokens[1:]]
        assert order == sorted(order)
        assert times.tokens[0] == times.prefill_end and len(times.tokens) == len(result.tokens)
        assert times.prefill_start < times.transfer_end < times.tokens[1]


def test_one_new_token_needs_no_d(both):
    asked = Request([5, 6, 7], 1)
    (result,) = both.run([asked])
    assert result.tokens == expected(asked, folder()) and result.times.tokens == (result.times.prefill_end,)


def test_the_longest_request_fits_and_one_more_position_does_not(both):
    longest, longer = Request([1] * 100, 29), Request([1] * 100, 30)
    finished, failed = both.run([longest, longer])
    check_finished([finished], [longest], folder())
    assert failed.reason == (
        "D's slots hold 128 positions, this request needs 129: start D with more capacity or send a shorter one"
    )


@pytest.mark.parametrize(
    "wrong, says",
    [
        (Request([97], 2), "P refused the request: token 97 in a prompt"),
        (Request([1] * 200, 100), "P refused the request: 200 prompt tokens + 100 new tokens = 300"),
        (Request([1] * 200, 2), "a prompt of 200 tokens; P's cache holds 128: start P with more capacity"),
    ],
)
def test_a_bad_request_fails_alone(both, wrong, says):
    asked = requests(3, seed=3)
    *good, bad = both.run([*asked, wrong])
    check_finished(good, asked, folder())
    assert isinstance(bad, Failed) and says in bad.reason


def test_a_result_is_given_once(both):
    number = both.submit(Request([1], 2))
    assert isinstance(both.result(number), Finished)
    for unknown in (number, 10**6):
        with pytest.raises(InputError, match=f"no request {unknown}, or its result was taken already"):
            both.result(unknown)


def test_a_side_that_lives_is_not_started_twice(both):
    with pytest.raises(InputError, match="D is alive"):
        both.restart("d")
    with pytest.raises(InputError, match="unknown side 'q'"):
        both.restart("q")


def listening(process):
    """Addresses on which a process and its children wait for connections."""
    family = [process, *process.children(recursive=True)]
    return {c.laddr.ip for one in family for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_both_sides_are_bound_to_loopback(both):
    for worker in both.workers.values():
        assert listening(psutil.Process(worker.process.pid)) == {"127.0.0.1"}


# started otherwise


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def reports(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def environment(**more):
    hidden = ("MASTER_ADDR", "MASTER_PORT", "RANK", "GLOO_SOCKET_IFNAME")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1"} | more


def test_by_hand_two_commands_serve_what_comes_on_standard_input():
    command = [
        sys.executable,
        "-m",
        "pdlib.workers",
        "--model",
        folder(),
        "--p-device",
        "cpu@1",
        "--d-device",
        "cpu@1",
    ]
    more = dict(env=environment(MASTER_PORT=str(free_port())), stdout=subprocess.PIPE, text=True)
    asked = requests(5)
    lines = [json.dumps({"id": i, "prompt": r.prompt, "new_tokens": r.new_tokens}) for i, r in enumerate(asked)]
    lines += [
        "no JSON",
        '{"id": 7, "prompt": [1], "new_tokens": "2"}',
        '{"id": 8, "prompt": "hello", "new_tokens": 2}',
    ]
    with (
        subprocess.Popen([*command, "--capacity", "128", "--role", "d"], stdin=subprocess.DEVNULL, **more) as d,
        subprocess.Popen([*command, "--capacity", "128", "--role", "p"], stdin=subprocess.PIPE, **more) as p,
    ):
        output, _ = p.communicate("\n".join(lines), timeout=60)
        at_d, _ = d.communicate(timeout=60)
    assert (p.returncode, d.returncode) == (0, 0)
    told = reports(output)
    done = {m["id"]: finished(m) for m in told if m["kind"] == "finished"}
    check_finished([done[i] for i in range(5)], asked, folder())
    failed = {m["id"]: m["reason"] for m in told if m["kind"] == "failed"}
    assert set(failed) == {-1, 7, 8} and "no message: b'no JSON'" in failed[-1]
    assert {m["id"] for m in reports(at_d) if m["kind"] == "finished"} == set(range(5))


def test_torchrun_starts_both():
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        + ["-m", "pdlib.workers", "--model", folder(), "--capacity", "64", "--requests", "4"]
        + ["--prompt-tokens", "8", "--new-tokens", "5", "--p-device", "cpu@1", "--d-device", "cpu@1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 0, run.stderr
    done = {m["id"]: m for m in reports(run.stdout) if m["kind"] == "finished"}
    assert set(done) == {0, 1, 2, 3} and all(len(m["tokens"]) == 5 for m in done.values())


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "neither --role p nor --role d was given"),
        (["--role", "p", "--road", "air"], "unknown road 'air'; choose one of: network, memory"),
    ],
)
def test_the_command_line_refuses_bad_input(monkeypatch, capsys, arguments, says):
    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2 and says in capsys.readouterr().err


def test_what_a_side_finds_wrong_is_said_and_ends_it():
    run = subprocess.run(
        [sys.executable, "-m", "pdlib.workers", "--role", "p", "--model", "nobody"],
        env=environment(MASTER_PORT=str(free_port())),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "P: model 'nobody' is not here" in run.stderr
    assert "model 'nobody' is not here" in reports(run.stdout)[-1]["reason"]
