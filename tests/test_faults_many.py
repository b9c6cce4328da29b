"""1,000 requests through P and D, every hundredth of them with a fault: none lost, none hung, memory flat."""

import random
from collections import Counter, deque
from functools import partial

import faulty
import psutil
from pairs import expected, folder, pid, requests, settings

from pdlib import workers
from pdlib.workers import Finished, Request

COUNT, IN_FLIGHT, SEED = 1000, 16, 7
DEADLY = ["P killed", "D killed"]
OTHERS = ["flipped"] * 3 + ["flipped twice"] * 2 + ["truncated", "bad token", "too long"]


def test_every_request_ends_and_memory_stays():
    draw = random.Random(SEED)
    deadly = draw.sample(range(50, 250), len(DEADLY))  # the processes whose memory is watched come after them
    others = draw.sample([i for i in range(COUNT) if i not in deadly], len(OTHERS))
    faults = dict(zip(deadly + others, DEADLY + OTHERS, strict=True))
    pool = requests(40, seed=SEED, longest=24, most=6)
    asked = [draw.choice(pool) for _ in range(COUNT)]
    for number, fault in faults.items():
        if fault == "bad token":
            asked[number] = Request([97], 2)
        elif fault == "too long":
            asked[number] = Request([1] * 60, 10)
    wanted = {request: expected(request, folder()) for request in pool}

    entries = {"p": partial(faulty.p_chaos, faults), "d": partial(faulty.d_chaos, faults)}
    results, flying, memory = [], deque(), []
    with workers.pair(entries=entries, **settings(capacity=64)) as pair:
        for number, request in enumerate(asked):
            for role in "pd":
                if pair.workers[role].ended() is not None:
                    pair.restart(role)
            flying.append(pair.submit(request))
            if number in deadly:  # what is asked before the system tells of a death fails too: no bound on its number
                assert pair.workers[faults[number][0].lower()].ended(60) is not None
            if len(flying) == IN_FLIGHT:
                results.append(pair.result(flying.popleft(), 60))
            if len(results) in (400, COUNT - IN_FLIGHT):
                sides = [psutil.Process(pid(pair, role)) for role in "pd"]
                memory.append([(side.memory_info().rss, side.num_fds(), side.num_threads()) for side in sides])
        results += [pair.result(number, 60) for number in flying]

    assert [result.id for result in results] == list(range(COUNT))
    failed = {}
    for result, request in zip(results, asked, strict=True):
        if isinstance(result, Finished):
            assert result.tokens == wanted[request]
        else:
            failed[result.id] = result.reason
    assert not [reason for reason in failed.values() if "no answer" in reason]
    for number, fault in faults.items():
        if fault in ("flipped", "truncated"):
            assert isinstance(results[number], Finished) and results[number].redone == 1
        else:
            assert number in failed
    # what else failed was in flight when a side died
    innocent = {reason for number, reason in failed.items() if number not in faults}
    assert all("killed by SIGKILL" in reason or "is gone" in reason for reason in innocent), innocent
    assert len(failed) <= 5 + 2 * IN_FLIGHT, Counter(failed.values())

    for before, after in zip(memory[0], memory[-1], strict=True):
        assert after[0] - before[0] < 6 * 2**20  # 584 caches of 25 kB are 15 MB
        assert after[1:] == before[1:]  # open files, threads
