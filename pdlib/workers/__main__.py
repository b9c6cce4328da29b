"""`python -m pdlib.workers`: P or D by hand, or both under torchrun. See the package for the commands."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
from dataclasses import fields
from typing import Any

from pdlib.spec import InputError
from pdlib.workers.messages import Lines, Settings
from pdlib.workers.serving import serve

HELP = {
    "model": "a name or folder, the same on both sides",
    "p": "P's device",
    "d": "D's device",
    "road": "network, or memory for two processes of one host",
    "how": "over the network: layers (while prefill runs) or whole (after it)",
    "slots": "requests that D decodes at a time",
    "capacity": "positions a request, prompt and answer",
}


def main(argv: list[str] | None = None) -> int:
    """Read the command line and be one side; returns the exit status of `serve`."""
    parser = argparse.ArgumentParser(prog="python -m pdlib.workers", description=__doc__)
    parser.add_argument("--role", choices=("p", "d"), help="without it, RANK of torchrun: 0 is P, 1 is D")
    for one in fields(Settings):
        if one.name in ("address", "port"):  # MASTER_ADDR and MASTER_PORT, as everywhere in torch
            continue
        kinds: dict[str, Any] = {"bool": lambda text: text != "off", "int": int, "float": float}
        # torchrun takes a bare --d for one of its own
        name = "--" + one.name.replace("_", "-") + ("-device" if one.name in ("p", "d") else "")
        about = HELP.get(one.name, f"default {one.default}")
        parser.add_argument(name, dest=one.name, type=kinds.get(str(one.type), str), default=one.default, help=about)
    parser.add_argument("--requests", type=int, default=0, help="P: make so many itself; without it, read them")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    asked = parser.parse_args(argv)
    try:
        role = asked.role or {"0": "p", "1": "d"}.get(os.environ.get("RANK", ""))
        if role is None:
            raise InputError("neither --role p nor --role d was given, and RANK is not 0 or 1")
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 29500))
        given = {one.name: getattr(asked, one.name) for one in fields(Settings) if hasattr(asked, one.name)}
        settings = Settings(**given | {"address": address, "port": port})
    except (InputError, ValueError) as error:
        print(f"pdlib.workers: {error}", file=sys.stderr)
        return 2
    lines = Lines(made_up(asked) if role == "p" and asked.requests else sys.stdin.fileno(), sys.stdout.fileno())
    status = serve(role, settings, lines)
    os._exit(status)  # threads of torch may still wait for a peer that is gone; everything is said


def made_up(asked: argparse.Namespace) -> int:
    """A pipe from which random requests can be read."""
    generator = random.Random(asked.seed)
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            for number in range(asked.requests):
                prompt = [generator.randrange(50) for _ in range(asked.prompt_tokens)]  # in any vocabulary
                file.write(json.dumps({"id": number, "prompt": prompt, "new_tokens": asked.new_tokens}) + "\n")

    threading.Thread(target=write, daemon=True).start()
    return reading


if __name__ == "__main__":
    sys.exit(main())
