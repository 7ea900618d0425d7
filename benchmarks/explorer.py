"""How long a state of the explorer takes, from the query to its charts.

    python benchmarks/explorer.py run    # measures and stores data/explorer.json
    python benchmarks/explorer.py list

Every state is seen for the first time, as under a slider that moves; what a session loads once is
loaded before. Of each kind the median and the slowest of its states, in milliseconds: by the clock
until what is known by then is shown (`first`) and until all of it is (`clock`), and of processor
time, which says more where a machine has other work. `predicted`: of how many states the first view
has all curves; bands may follow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from moments.show.explorer import Explorer

STORE = Path(__file__).parent / "data" / "explorer.json"

USUAL = {
    "depth": [f"layers={n}" for n in (4, 6, 8, 11, 16, 20, 24, 28, 32)],
    "width": [f"d_model={n}&heads=8" for n in (128, 256, 512, 1024, 2048)],
    "tokens": [f"seq_len={n}" for n in (8, 32, 64, 256, 1024, 4096)],
    "correlation": [f"correlation={n / 20}" for n in range(1, 19, 2)],
    "dropout": [f"dropout={n / 20}" for n in range(1, 10)],
    "skip_scale": [f"skip_scale={n / 20}" for n in range(10, 20)],
    "branch_scale": [f"branch_scale={n / 10}" for n in range(1, 20, 2)],
    "placement": [f"norm={n}" for n in ("post", "sandwich", "hybrid", "b2t")],
    "activation": [f"activation={n}" for n in ("gelu", "silu", "tanh", "identity", "swiglu")],
    "scheme": [
        f"scheme={n}&correlation=0.2"
        for n in ("xavier", "lns", "dslm", "deepnorm", "ds-init", "skipinit", "depth-mup", "mup")
    ],
    "logits halved": [f"logit_scale={n}" for n in (0.316, 0.398, 0.501, 0.631, 0.794)],
    "held": [f"layers={n}&held=norm%3Dpost" for n in (5, 7, 9, 10)],
}
BEYOND = {
    "deep": [f"layers={n}" for n in (40, 48, 64, 96)],
    "logits doubled (variance beyond 8)": ["logit_scale=1.995"],
    "no norm (logits grow beyond)": ["norm=none"],
    "schemes that predict": ["scheme=admin"],
    "causal mask (classes of positions)": ["causal=true"],
}


def measure() -> dict[str, Any]:
    """Medians and slowest of every kind of state."""
    explorer = Explorer()
    for query in ("", "dropout=0.35&correlation=0.07", "activation=geglu", "scheme=rezero"):
        explorer.view(query)
    found: dict[str, Any] = {}
    for group, kinds in (("usual", USUAL), ("beyond", BEYOND)):
        for kind, queries in kinds.items():
            first, clock, processor, predicted = [], [], [], 0
            for query in queries:
                began, used = time.perf_counter(), time.process_time()
                views = explorer.views(query)
                view = next(views)
                first.append(1e3 * (time.perf_counter() - began))
                predicted += bool(view.verdict)
                for later in views:
                    view = later
                clock.append(1e3 * (time.perf_counter() - began))
                processor.append(1e3 * (time.process_time() - used))
                assert view.complete, query
                assert view.charts, (query, view.error)
            found[kind] = {
                "group": group,
                "states": len(queries),
                "predicted": predicted,
                **{
                    name: {"median": round(statistics.median(times)), "most": round(max(times))}
                    for name, times in (
                        ("first", first),
                        ("clock", clock),
                        ("processor", processor),
                    )
                },
            }
            print(kind, found[kind], flush=True)
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("run", "list"))
    if parser.parse_args().what == "run":
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        load = round(os.getloadavg()[0], 1)
        data = {"machine": machine, "load": load, "milliseconds": measure()}
        STORE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    data = json.loads(STORE.read_text(encoding="utf-8"))
    print(
        f"{data['machine']}, load {data['load']}; milliseconds by the clock (processor): "
        "median and most, and the most until something is shown"
    )
    for kind, row in data["milliseconds"].items():
        clock, used = row["clock"], row["processor"]
        print(
            f"{kind:<36}{row['states']:>3} states, median {clock['median']:>5} ({used['median']}), "
            f"most {clock['most']:>5} ({used['most']}), shown {row['first']['most']}, "
            f"curves of {row['predicted']}"
        )


if __name__ == "__main__":
    main()
