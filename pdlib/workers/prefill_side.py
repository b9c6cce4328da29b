"""P: takes requests in turn, asks D for slots, prefills, hands caches over, reports how each request ended."""

from __future__ import annotations

import queue
import time
from dataclasses import asdict, dataclass
from typing import Any

from pdlib import kv_transfer, models
from pdlib.devices import parse
from pdlib.kv_transfer import TransferError
from pdlib.spec import InputError, Workload
from pdlib.workers.handover import Sender
from pdlib.workers.link import Link
from pdlib.workers.meeting import Hello, Meeting, PeerLost, first_line, gpu_name
from pdlib.workers.messages import (
    Finished,
    Lines,
    Message,
    Request,
    Settings,
    Times,
    decode,
    finished,
    report,
    seconds,
    whole,
)

AHEAD = 2  # slots asked for at a time: also the next request's, so that D answers while this one is prefilled
WORDS = ("go", "refused", "taken", "damaged", "finished", "ending", "bye")  # what D may say


@dataclass
class Job:
    """A request on its way: waiting → asked → granted → at D → settled."""

    id: int
    request: Request
    arrived: float
    state: str = "waiting"
    asked: float = 0.0  # when D was asked for a slot


class PrefillSide:
    """P's process. Every job in `open` is settled, as finished or failed, before it ends."""

    def __init__(self, settings: Settings, client: Lines) -> None:
        self.settings, self.client = settings, client
        self.told_to_end = self.ending = False
        self.meeting = Meeting("p", settings, lambda: self.told_to_end)
        client.tell(kind="listening", port=self.meeting.port)
        self.model = models.load(settings.model, parse(settings.p), settings.dtype, settings.seed)
        self.sender = Sender(self.model, settings)
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.open: dict[int, Job] = {}
        self.link: Link | None = None
        self.d: Hello | None = None  # what D says of itself, as long as it takes requests
        self.no_d = ""  # why it does not

    def serve(self) -> None:
        """Work until the client has no more requests, or a signal says so, and everything open is settled."""
        if not self._join(self.settings.start_s):
            if self.told_to_end:
                return
            raise PeerLost(
                f"P: no D came to {self.meeting.host} port {self.meeting.port} within {self.settings.start_s:g} s; "
                f"start D with this address and port{self.meeting.turned_away}"
            )
        self.client.listen(lambda line: self.events.put(("client", line)))
        while self.open or not self.ending:
            self._hear(0.0 if self._granted() else 0.2)
            if self.told_to_end:
                self._stop_taking()
            if self.link is None:
                self._join(0.0)
            self._ask()
            if granted := self._granted():
                self._hand_over(granted[0])
        if self.link:
            self.link.close()

    def _granted(self) -> list[Job]:
        return [job for job in self.open.values() if job.state == "granted"]

    def _join(self, patience_s: float) -> bool:
        """Meet a D, if one comes in time."""
        if self.settings.road == "memory" and self.sender.segment is None:
            self.sender.new_segment()
        segment = self.sender.segment
        hello = Hello(
            model=asdict(kv_transfer.fingerprint(self.model)),
            road=self.settings.road,
            capacity=self.settings.capacity,
            slots=1,
            gpu=gpu_name(self.model.device.torch),
            segment=segment.name if segment else "",
            segment_bytes=segment.nbytes if segment else 0,
        )
        self.d = self.meeting.wait_for_d(hello, patience_s)
        if self.d is None:
            return False
        self.link = Link(self.meeting.talk, "D", self.settings.silence_s, WORDS, self._heard)
        self.client.tell(kind="ready")
        return True

    def _heard(self, message: Message) -> None:
        """In the link's thread: hand a message to whoever waits for it."""
        if message["kind"] in ("taken", "damaged", "lost", "bye"):
            self.sender.answers.put(message)
        if message["kind"] not in ("taken", "damaged"):
            self.events.put(("peer", message))

    # what comes in

    def _hear(self, patience_s: float) -> None:
        """Take in all that came from the client and from D; wait `patience_s` for the first."""
        try:
            source, event = self.events.get(timeout=patience_s)
            while True:
                try:
                    self._of_client(event) if source == "client" else self._of_d(event)
                except InputError as error:
                    assert self.link is not None
                    self.link.lose(f"it sent {error}", tell=True)
                source, event = self.events.get_nowait()
        except queue.Empty:
            pass

    def _of_client(self, line: bytes | None) -> None:
        if line is None:
            self.ending = True
            return
        if not line.strip():
            return
        number = -1
        try:
            message = decode(line)
            number = whole(message, "id")
            arrived = seconds(message, "arrived") if "arrived" in message else time.perf_counter()
            if number in self.open:
                raise InputError(f"request {number} is here already: give each one an id of its own")
            if not isinstance(message.get("prompt"), list):
                raise InputError("a request without a prompt: give a list of token ids")
            job = Job(number, Request(tuple(message["prompt"]), whole(message, "new_tokens")), arrived)
            self._check(job.request)
            self.open[number] = job
        except InputError as error:
            self.client.tell(kind="failed", id=number, reason=f"P refused the request: {error}", doubt=False)

    def _check(self, request: Request) -> None:
        """InputError, before any work, for what neither side could answer."""
        spec, capacity = self.model.spec, self.settings.capacity
        Workload(1, len(request.prompt), request.new_tokens).check_fits(spec)
        if max(request.prompt) >= spec.vocab:
            raise InputError(
                f"token {max(request.prompt)} in a prompt for {spec.name}, whose tokens end before {spec.vocab}"
            )
        if len(request.prompt) > capacity:
            raise InputError(
                f"a prompt of {len(request.prompt)} tokens; P's cache holds {capacity}: start P with more capacity"
            )

    def _of_d(self, message: Message) -> None:
        kind = message["kind"]
        if kind in ("lost", "bye", "ending"):
            self._without_d(str(message.get("reason", "D has ended")), gone=kind != "ending", doubt=kind == "lost")
            return
        job = self.open.get(whole(message, "id"))
        if job is None:
            return  # settled already
        if kind == "go" and job.state == "asked":
            job.state = "granted"
        elif kind == "refused":
            self._fail(job, f"D refused the request: {message.get('reason')}")
        elif kind == "finished":
            self._finish(finished(message))

    def _without_d(self, reason: str, gone: bool, doubt: bool) -> None:
        """D takes no more requests: those it has no slot for end here; when it is gone, so do the others."""
        self.d, self.no_d = None, f"{reason}; start D again, then send the request again"
        if gone:
            self.link = None
            self.sender.close_segment()
        for job in list(self.open.values()):
            if job.state == "asked" or (gone and job.state in ("granted", "at D")):
                self._fail(job, f"P: {self.no_d}", doubt=doubt and job.state == "at D")

    def _stop_taking(self) -> None:
        """A signal: what is not on its way to D yet ends here, what is there is waited for."""
        self.ending, self.told_to_end = True, False
        for job in list(self.open.values()):
            if job.state != "at D":
                self._drop(job, "P was told to end before this request's turn; send it to another pair")

    # what goes out

    def _finish(self, done: Finished) -> None:
        del self.open[done.id]
        self.client.tell(**report(done))

    def _fail(self, job: Job, reason: str, doubt: bool = False) -> None:
        """Settle a job. `doubt`: D may have finished it, or still be at it, and tell the client itself."""
        del self.open[job.id]
        self.client.tell(kind="failed", id=job.id, reason=reason, doubt=doubt)

    def _drop(self, job: Job, reason: str) -> None:
        """Settle a job whose slot D is not to keep."""
        if self.link and job.state in ("asked", "granted"):
            self.link.tell("drop", id=job.id)
        self._fail(job, reason)

    def _ask(self) -> None:
        """Ask D for the slots of the next requests; without a D, end them."""
        bound = self.settings.slot_s + self.settings.silence_s
        if any(job.state == "asked" and time.monotonic() > job.asked + bound for job in self.open.values()):
            assert self.link is not None
            self.link.lose(f"it did not answer within {bound:g} s", tell=True)
        asked = sum(job.state in ("asked", "granted") for job in self.open.values())
        for job in [job for job in self.open.values() if job.state == "waiting"]:
            if job.request.new_tokens == 1:
                job.state = "granted"  # P makes the only token: there is nothing to ask for
                continue
            if asked == AHEAD:
                return
            if self.d is None or self.link is None:
                self._fail(job, f"P: {self.no_d}")
            elif job.request.positions > self.d.capacity:
                self._fail(
                    job,
                    f"D's slots hold {self.d.capacity} positions, this request needs {job.request.positions}: "
                    "start D with more capacity or send a shorter one",
                )
            else:
                job.state, job.asked, asked = "asked", time.monotonic(), asked + 1
                self.link.tell(
                    "want",
                    id=job.id,
                    prompt_tokens=len(job.request.prompt),
                    new_tokens=job.request.new_tokens,
                    patience_s=self.settings.slot_s,
                )

    def _hand_over(self, job: Job) -> None:
        """Prefill and send, once more from the prompt when the cache did not arrive as it left."""
        if job.request.new_tokens == 1:
            alone = self.sender.prefill(job.request.prompt)
            end = alone.prefill_end
            times = Times(job.arrived, alone.prefill_start, end, end, (end,))
            self._finish(Finished(job.id, (alone.token,), times))
            return
        link = self.link
        assert link is not None  # without one nothing was granted
        redone = 0
        try:
            try:
                sent = self.sender.send(link, job.id, job.request.prompt)
            except TransferError:
                if link.lost:
                    raise
                redone = 1
                sent = self.sender.send(link, job.id, job.request.prompt)
            link.tell("start", id=job.id, redone=redone, arrived=job.arrived, **vars(sent))
            job.state = "at D"
        except RuntimeError as error:  # the connection: what is open ends with the next look at the events
            link.lose(first_line(error))
        except TransferError as error:
            if not link.lost:
                self._drop(job, f"D refused the cache of this request, and the same cache made anew: {error}")
