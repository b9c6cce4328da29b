"""One side's process, however it was started: signals, the side's work, and how it ends."""

from __future__ import annotations

import signal
import sys
from typing import Any

from pdlib.spec import InputError
from pdlib.workers.decode_side import DecodeSide
from pdlib.workers.meeting import PeerLost
from pdlib.workers.messages import ClientGone, Lines, Settings
from pdlib.workers.prefill_side import PrefillSide

SIDES = {"p": PrefillSide, "d": DecodeSide}


def serve(role: str, settings: Settings, client: Lines) -> int:
    """Be P or D until the work is done; returns the exit status.

    0: every request was finished or reported, also after SIGTERM; 1: the other side did not come, or nobody reads
    the reports; 2: bad input. Why it ended is told to the client, and to standard error.
    """
    side: Any = None

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        ended.append(number)
        if side is not None:
            side.told_to_end = True

    ended: list[int] = []
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a child's interrupts are its parent's
        signal.signal(signal.SIGINT, end)
    try:
        side = SIDES[role](settings, client)
        side.told_to_end = side.told_to_end or bool(ended)
        side.serve()
        client.tell(kind="ended")
        return 0
    except ClientGone:
        return 1
    except (InputError, PeerLost) as error:
        reason = str(error) if str(error).startswith(("P", "D")) else f"{role.upper()}: {error}"
        print(f"pdlib.workers: {reason}", file=sys.stderr, flush=True)
        try:
            client.tell(kind="stopped", reason=reason)
        except ClientGone:
            pass  # it was said on standard error
        return 2 if isinstance(error, InputError) else 1
