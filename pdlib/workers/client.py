"""P and D started by this process, and the client that gives them requests: what a notebook uses."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pdlib.kv_transfer import sweep
from pdlib.spec import InputError, one_of
from pdlib.workers.messages import ClientGone, Failed, Finished, Lines, Message, Request, Settings, finished
from pdlib.workers.serving import serve

Entry = Callable[[str, Settings, Lines], int]
Result = Finished | Failed
Heard = Callable[["Worker", Message | None], None]
AGAIN = "; start it again (restart) or make a new pair, then send the request again"


class Worker:
    """One side: its process, the pipes to it, and the thread that reads its reports."""

    def __init__(self, role: str, settings: Settings, entry: Entry, heard: Heard) -> None:
        methods = multiprocessing.get_all_start_methods()
        # A server that has imported torch but never computed forks children in a tenth of a second.
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        context.set_forkserver_preload(["pdlib.workers", "transformers.models.gpt2.modeling_gpt2"])
        self.role, self.said, self.over, self._polling = role, "", False, threading.Lock()
        theirs_in, self._to = context.Pipe(duplex=False)
        self._from, theirs_out = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(entry, role, settings, theirs_in, theirs_out), daemon=True)
        self.process.start()
        theirs_in.close()
        theirs_out.close()  # so that the end of the process is the end of what can be read
        self.lines = Lines(self._from.fileno(), self._to.fileno())
        self.reader = self.lines.listen(lambda line: heard(self, None if line is None else json.loads(line)))

    def ended(self, patience_s: float = 0.0) -> int | None:
        """The process's exit status (a signal's number, negative), None while it runs.

        The reader's thread and the client's ask for it at once, and multiprocessing can read it only once.
        """
        multiprocessing.connection.wait([self.process.sentinel], patience_s)
        with self._polling:
            self.process.join(0)
            code: int | None = self.process.exitcode
        return code

    def why(self) -> str:
        """How the process ended, in its own words if it had any."""
        code = self.ended(5)
        if self.said:
            return self.said
        if code is not None and code < 0:
            return f"{self.role.upper()} was killed by {signal.Signals(-code).name}"
        return f"{self.role.upper()} ended with status {code}"

    def no_more(self) -> None:
        """Tell the worker that nothing more will come."""
        self._to.close()

    def kill(self) -> None:
        """End the process now."""
        if self.ended() is None:
            self.process.kill()
        self.ended(5)
        self.reader.join(5)


def _run(entry: Entry, role: str, settings: Settings, requests: Any, reports: Any) -> None:
    """The child's main. An interrupt is for the parent, who decides what becomes of its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = entry(role, settings, Lines(requests.fileno(), reports.fileno()))
    os._exit(status)  # threads of torch may still wait for a peer that is gone; everything is said


class Pair:
    """P and D as two processes of this machine; a context manager that leaves nothing behind."""

    def __init__(self, settings: Settings, entries: dict[str, Entry] | None = None) -> None:
        """Start both, and return when they have met. InputError, in a side's own words, when they cannot.

        `entries`: what a child runs as "p" or "d" instead of `serve`.
        """
        self.settings, self.entries = settings, {"p": serve, "d": serve} | (entries or {})
        self._changed = threading.Condition()
        self._results: dict[int, Result] = {}
        self._open: set[int] = set()
        self._doubts: dict[int, str] = {}  # open, and failed unless D holds them: why
        self._holding: set[int] | None = None  # what D held when it lost P; None while it has one
        self._ready: set[str] = set()
        self._port, self._listening = settings.port, False
        self._next = 0
        self.workers: dict[str, Worker] = {}
        try:
            self._start("p")
            self._wait(lambda: self._listening, "P did not open its meeting point")
            self._start("d")
            self._wait(lambda: self._ready == {"p", "d"}, "P and D did not meet")
        except BaseException:
            self.kill()
            raise

    # requests and results

    def submit(self, request: Request) -> int:
        """Hand a request to P; returns its number. Whatever is wrong with it becomes its result."""
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._open.add(number)
        p = self.workers["p"]
        try:
            p.lines.tell(id=number, prompt=request.prompt, new_tokens=request.new_tokens, arrived=time.perf_counter())
        except (ClientGone, InputError) as error:
            reason = p.why() + AGAIN if p.over else f"P does not take requests: {error}{AGAIN}"
            with self._changed:
                self._settle(Failed(number, reason))
        return number

    def result(self, number: int, timeout_s: float = 600.0) -> Result:
        """The result of a request, waited for at most `timeout_s`; after that it has failed."""
        end = time.monotonic() + timeout_s
        with self._changed:
            if number not in self._open and number not in self._results:
                raise InputError(f"no request {number}, or its result was taken already")
            while number not in self._results:
                left = end - time.monotonic()
                if left <= 0:
                    reason = self._doubts.get(
                        number, f"no answer within {timeout_s:g} s; wait longer or kill the pair"
                    )
                    self._settle(Failed(number, reason))
                else:
                    self._changed.wait(left)
            return self._results.pop(number)

    def run(self, requests: Iterable[Request], timeout_s: float = 600.0) -> list[Result]:
        """Hand over all, return the results in the same order; `timeout_s` is for all together."""
        end = time.monotonic() + timeout_s
        numbers = [self.submit(request) for request in requests]
        return [self.result(number, max(0.0, end - time.monotonic())) for number in numbers]

    def _settle(self, result: Result) -> None:
        if result.id in self._open:  # the first word counts
            self._open.discard(result.id)
            self._doubts.pop(result.id, None)
            self._results[result.id] = result
            self._changed.notify_all()

    # what the workers report

    def _heard(self, worker: Worker, message: Message | None) -> None:
        role, reason = worker.role, worker.why() if message is None else ""  # why() may wait: outside the lock
        with self._changed:
            if message is None:
                worker.over = True
                self._gone(role, reason)
            elif message["kind"] == "listening":
                self._port, self._listening = message["port"], True
            elif message["kind"] == "ready":
                self._ready.add(role)
                if role == "p":  # after all that P had to say about the D before
                    self._holding = None
            elif message["kind"] == "stopped":
                worker.said = message["reason"]
            elif message["kind"] == "finished":
                self._settle(finished(message))
            elif message["kind"] == "failed" and message["doubt"]:
                self._doubts[message["id"]] = message["reason"]
            elif message["kind"] == "failed":
                self._settle(Failed(message["id"], message["reason"]))
            elif message["kind"] == "lost":
                self._holding = set(message["holding"])
            self._decide()
            self._changed.notify_all()

    def _gone(self, role: str, reason: str) -> None:
        self._ready.discard(role)
        if role == "p":
            self._doubts |= {number: reason + AGAIN for number in self._open if number not in self._doubts}
        else:
            self._holding = set()

    def _decide(self) -> None:
        """A doubt ends when D is gone, or has said what it holds and this is not among it."""
        if self._holding is not None:
            for number in [n for n in self._doubts if n not in self._holding]:
                self._settle(Failed(number, self._doubts.pop(number)))

    # beginning and end

    def _start(self, role: str) -> None:
        self.workers[role] = Worker(role, replace(self.settings, port=self._port), self.entries[role], self._heard)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done`; InputError when a side ends before, or when it takes longer than two starts may."""
        end = time.monotonic() + 2 * self.settings.start_s
        with self._changed:
            while not done():
                over = [worker for worker in self.workers.values() if worker.over]
                if over:
                    raise InputError(over[0].why())
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise InputError(f"{what} within {2 * self.settings.start_s:g} s; set start_s higher")

    def restart(self, role: str) -> None:
        """Start a side that has died again; the other one serves on with it."""
        one_of("side", role, ("p", "d"))
        old = self.workers[role]
        if old.ended() is None:
            raise InputError(f"{role.upper()} is alive: only a side that has ended can be started again")
        old.reader.join(10)
        self._ready.clear()
        self._start(role)
        self._wait(lambda: self._ready == {"p", "d"}, "P and D did not meet again")

    def close(self, patience_s: float = 60.0) -> None:
        """Finish what is open, then end both; what still runs after `patience_s` is killed."""
        end = time.monotonic() + patience_s
        for role in ("p", "d"):  # P says bye to D when all is done
            worker = self.workers.get(role)
            if worker is None:
                continue
            worker.no_more()
            if role == "d" and self.workers["p"].ended() != 0:
                worker.process.terminate()  # no P will come to say bye
            worker.ended(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End both now, whatever they do, and remove the shared memory of processes that are gone."""
        for worker in self.workers.values():
            worker.kill()
        sweep()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def pair(entries: dict[str, Entry] | None = None, **settings: Any) -> Pair:
    """Start P and D here: `with pair(model="gpt2-tiny", p="cpu@1", d="cpu@1") as both: both.run(requests)`.

    Keywords are those of Settings.
    """
    return Pair(Settings(**settings), entries)
