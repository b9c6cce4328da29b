"""P and D as processes, of one host or of two: requests in, tokens out, and every end of a request accounted for.

    with workers.pair(model="gpt2", p="cpu@1", d="cpu@1", slots=8, capacity=640) as both:
        results = both.run([Request(prompt, 32) for prompt in prompts])  # each a Finished or a Failed

One request: the client gives a prompt to P; P makes the first token and sends it with the cache to D; D makes the
other tokens, in a batch of all requests that it holds, and reports them. The same code runs started three ways:

    by a notebook          `pair(...)`, above
    by torchrun            torchrun --nproc-per-node 2 -m pdlib.workers --model gpt2 --requests 16
    by hand on two hosts   MASTER_ADDR=192.0.2.1 MASTER_PORT=29500 python -m pdlib.workers --role p --requests 16
                           MASTER_ADDR=192.0.2.1 MASTER_PORT=29500 python -m pdlib.workers --role d

MASTER_ADDR is P's address; without it both stay on loopback. P reads requests, one JSON object a line
(`{"id": 0, "prompt": [1, 2, 3], "new_tokens": 8}`), from standard input, or makes `--requests` of them itself;
both sides report to standard output, one object a line. Nobody is authenticated and nothing is encrypted: give an
address only within a network you trust.

The protocol, all of it on torch.distributed:

1. Meeting (meeting.py). P holds a TCPStore. D draws a ticket and both say hello: model, capacity, slots. Who does not
   fit is told why, and P waits on. Then a process group of these two is made, gloo, and NCCL between two GPUs.
2. Messages (link.py). Length-bounded JSON in uint8 tensors, on a tag of their own; a pulse in between.
   P → D  want (may I have a slot?) · coming (a cache, now) · start (the first token: go on from it) · drop · bye
   D → P  go (the slot is yours) · refused (why) · taken, damaged (memory) · finished (tokens, times) · ending · bye
3. The cache (kv_transfer). Over the network: manifest, D's consent, parts, checksums, D's answer. Through memory:
   P lays it down in a shared segment, "coming" carries manifest and checksums, D copies it into the slot.
   What arrives damaged is made anew from the prompt, once.

Every wait has a bound: `start_s` for the other side to come, `slot_s` for a slot (D answers, so that no message
crosses another), `transfer_s` for any pause in a transfer, `silence_s` for any sign of life. A closed connection
tells of a death at once, silence of a host that vanished. When P dies, D finishes every request that has started
there, tells the client which ones these are, and waits `start_s` for another P. When D dies, P ends what was there
with the reason, answers further requests with it, and takes in another D that comes (`Pair.restart`). SIGTERM: no new
requests, each one that is here is finished or reported, exit status 0; a second one ends at once.

Not survived: a peer that sends more bytes than were due. gloo itself then ends the process that receives; the other
processes see a death like any other.
"""

from pdlib.workers.client import Pair, pair
from pdlib.workers.messages import Failed, Finished, Request, Settings, Times

__all__ = ["Failed", "Finished", "Pair", "Request", "Settings", "Times", "pair"]
