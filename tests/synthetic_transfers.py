"""Made-up rows of the experiments of a KV transfer, near what a laptop measures; and a GPU machine's."""

import numpy as np

from pdlib import hand_over, links, results

KAPPA = 73_728  # GPT-2, float32
LAYERS = 12
SPEED = {"laptop": 1.0, "h200": 1 / 55}  # seconds ×
ROADS = {"device": (3e-5, 6.2e9), "memory": (1.5e-4, 11e9), "network": (3e-4, 3.4e9), "file": (2e-3, 1.2e9)}
LINKS = {"10gbit": (3e-4, 1.17e9), "1gbit": (4e-4, 1.17e8)}


def rows(machine="laptop", source="measured", repeats=5):
    """A frame with the experiments bandwidth, kv_bytes, hidden, timeline, busy and slow_link."""
    made = []
    rng = np.random.default_rng(7 + len(machine))
    speed = SPEED[machine]

    def add(experiment, phase, seconds, size, kernel, repeat=0, **more):
        row = dict(
            experiment=experiment,
            machine=machine,
            source=source,
            model="gpt2",
            weights="random",
            dtype="float32",
            device="cpu@1->cpu@1",
            kernel=kernel,
            requests=size[0],
            prompt_tokens=size[1],
            new_tokens=size[2] if len(size) > 2 else 2,
            phase=phase,
            repeat=repeat,
            order=len(made),
            seconds=float(seconds * speed),
        )
        made.append(results.row(**(row | more)))

    def noise():
        return rng.lognormal(0.0, 0.04)

    for road, (t0, rate) in ROADS.items():
        for requests, tokens in ((1, 1), (1, 16), (1, 256), (8, 512)):
            size = KAPPA * requests * tokens
            for r in range(repeats):
                seconds = (t0 + size / rate) * noise()
                add("bandwidth", "transfer", seconds, (requests, tokens), hand_over.kernel(road), r, bytes=size)
                if road == "memory":
                    name = hand_over.kernel(road, checksums=True)
                    add("bandwidth", "transfer", 1.1 * seconds, (requests, tokens), name, r, bytes=size)
    for tokens in (64, 128, 256, 512):
        size, compute = KAPPA * 8 * tokens, 8 * tokens / 820 * (1 + tokens / 4000)
        moved = 3e-4 * LAYERS + size / 3.4e9
        shown = dict(alone=compute, streaming=compute * 1.01, whole=moved, exposed=1.4 * moved / LAYERS)
        for r in range(repeats):
            for part, seconds in shown.items():
                how = "whole" if part in ("alone", "whole") else "layers"
                phase = "prefill" if part in ("alone", "streaming") else "transfer"
                name = hand_over.kernel("network", how, part=part)
                moved_bytes = size if phase == "transfer" else 0
                add("hidden", phase, seconds * noise(), (8, tokens), name, r, bytes=moved_bytes)
    compute, moved = 0.42, 0.09
    for how in ("whole", "layers"):
        name, free = hand_over.kernel("network", how), 0.0
        for layer in range(LAYERS):
            start, seconds = layer * compute, compute * noise() * 0.97
            add("timeline", "prefill", seconds, (8, 512), name, scenario=f"layer={layer}", start_s=start * speed)
            if how == "layers":
                free = max(free, start + seconds + 0.002)
                part = moved * noise()
                add("timeline", "transfer", part, (8, 512), name, scenario=f"layer={layer}", start_s=free * speed)
                free += part
        if how == "whole":
            add("timeline", "transfer", LAYERS * moved, (8, 512), name, start_s=LAYERS * compute * speed)
    for r in range(repeats):
        for kind, parts in (
            ("synchronous", dict(prefill=1.3, transfer=0.05)),
            ("streaming", dict(prefill=1.31, transfer=0.004)),
            ("none", dict(prefill=1.3, decode=2.4)),
        ):
            name = hand_over.kernel("network", "layers" if kind == "streaming" else "whole", hand_over=kind)
            for phase, seconds in parts.items():
                add("busy", phase, seconds * noise(), (4, 256, 64), name, r)
    size, own, compute = KAPPA * 8 * 512, 5.4, 3.1
    for link, (t0, rate) in LINKS.items():
        moved = t0 + size / rate
        late = float(links.exposed_s(compute, moved, LAYERS))
        for r in range(repeats):
            where = {"repeat": r, "scenario": link}
            for how, part, phase, seconds, sent in (
                ("whole", "alone", "prefill", compute, 0),
                ("whole", "whole", "transfer", moved, size),
                ("whole", "first-token", "decode", compute + moved + 0.06, 0),
                ("layers", "streaming", "prefill", 1.01 * compute, 0),
                ("layers", "exposed", "transfer", late, size),
                ("layers", "first-token", "decode", compute + late + 0.06, 0),
            ):
                name = hand_over.kernel("network", how, part=part)
                add("slow_link", phase, seconds * noise(), (8, 512), name, bytes=sent, **where)
            small, name = KAPPA * 16, hand_over.kernel("network", "whole", part="whole")
            add("slow_link", "transfer", (t0 + small / rate) * noise(), (1, 16), name, bytes=small, **where)
    for r in range(repeats):
        add("slow_link", "prefill", own * noise(), (8, 512), "part=alone", r, scenario="none")
        add("slow_link", "decode", (own + 0.06) * noise(), (8, 512), "part=first-token", r, scenario="none")
    for shape, kappa in (("gpt2 float32 1", KAPPA), ("llama-2-70b float16 16", 655_360)):
        model, dtype, parallel = shape.split()
        name = hand_over.kernel("device", devices=parallel)
        more = {"model": model, "dtype": dtype, "weights": "unknown", "bytes": 16 * kappa}
        add("kv_bytes", "transfer", 1e-3, (1, 16), name, **more)
    return results.frame(made)


def mixes():
    """Name → rows: every mix of sources that a notebook can hand over."""
    import pandas as pd

    from pdlib import published

    paper = published.transfers()
    both = pd.concat([paper, rows()], ignore_index=True)
    return {
        "published only": paper,
        "published and measured": both,
        "all three": pd.concat([both, rows("h200", "recorded")], ignore_index=True),
        "measured only": rows(),
        "one sample": pd.concat([paper, rows(repeats=1)], ignore_index=True),
        "none": paper.iloc[:0],
    }
