"""What labkit's callback costs a model whose experts are all in memory.

    python tests/bench/callback_cost.py MODEL --rounds 7 --tokens 12

Stock llama.cpp without a callback and a streamed session that holds every expert take turns, token
by token, in one process. Prints JSON: the speed of the session over that of stock llama.cpp (median
of rounds, and each round), and the difference in milliseconds a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from statistics import median

import numpy as np

from labkit.runtime import Session
from labkit.runtime.stock import StockModel
from labkit.runtime.text import TextStream


def session_token(session: Session, token: int) -> float:
    """Seconds of one decoded token, with all that a session records about it."""
    begin = time.perf_counter()
    session._graph([token], "decode", [True])
    session._recorder.steps([token], TextStream(session._tokenizer))
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--overlap", default="serial")
    parser.add_argument("--resident", action="store_true", help="the session streams nothing")
    parser.add_argument("--load", default="mmap", help="how stock llama.cpp loads: mmap, resident")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tokens = np.random.default_rng(0).integers(10, 400, arguments.tokens).tolist()
    stock = StockModel(arguments.model, arguments.load, n_ctx=512)
    session = Session(
        arguments.model,
        resident=arguments.resident,
        cache_mib=None if arguments.resident else "auto",
        overlap=arguments.overlap,
        prefill="experts",
        n_ctx=512,
    )
    with stock, session:
        for token in tokens * 2:
            stock.decode(token)
            session_token(session, token)
        ratios, costs_ms, stock_ms = [], [], []
        for turn in range(arguments.rounds):
            stock.reset()
            session.reset()
            ours, theirs = [], []
            for index, token in enumerate(tokens):
                if (index + turn) % 2:
                    ours.append(session_token(session, token))
                theirs.append(stock.decode(token))
                if not (index + turn) % 2:
                    ours.append(session_token(session, token))
            ratios.append(median(theirs) / median(ours))
            stock_ms.append(1e3 * median(theirs))
            costs_ms.append(1e3 * (median(ours) - median(theirs)))
        missed = session._recorder.totals.misses
    figures = {
        "speed_ratio": round(median(ratios), 4),
        "rounds": [round(ratio, 4) for ratio in ratios],
        "cost_ms": round(median(costs_ms), 3),
        "stock_ms": round(median(stock_ms), 3),
        "misses_in_all": missed,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
