"""What a cache policy costs and saves live: tokens a second, and bytes read, beside LRU.

Sessions of all policies are open at once and decode the same tokens in turns, a few at a time,
so that a busy machine slows all of them. Then the bookkeeping alone: microseconds of a request
where all hits, 8 experts in each of 24 layers. Prints JSON.

    python tests/bench/policy_cost.py MODEL --cache-mib 1150 --rounds 5 --tokens 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack

from labkit.policy import ONLINE, make_policy
from labkit.runtime import Session

PROMPT = list(range(7, 200, 9))  # token ids, so that a model without a tokenizer will do


def live(model: str, cache_mib: float, policies: list[str], rounds: int, tokens: int) -> dict:
    """By policy: median tokens a second, the median of its ratio to the first's, MiB a token."""
    speeds: dict[str, list[float]] = {name: [] for name in policies}
    read = dict.fromkeys(policies, 0)
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                Session(model, cache_mib=cache_mib, policy=name, prefill="experts")
            )
            for name in policies
        }
        for session in sessions.values():
            session.generate(PROMPT, tokens)
        for number in range(rounds):
            for name in policies if number % 2 else reversed(policies):
                result = sessions[name].generate([], tokens)
                speeds[name].append(result.decode_tok_s or 0.0)
                read[name] += sum(step.bytes_read for step in result.steps)
    first = speeds[policies[0]]
    return {
        name: {
            "tok_s": round(statistics.median(own), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(own, first, strict=True)), 3),
            "read_mib_a_token": round(read[name] / rounds / tokens / 2**20, 3),
        }
        for name, own in speeds.items()
    }


def request_us(policy: str, layers: int = 24, k: int = 8, experts: int = 64) -> float:
    """Microseconds of processor time of a request on which all hits, the best of many loops."""
    cache = make_policy(policy, 2**40, dict.fromkeys(range(layers), 1))
    chosen = [[(layer * 7 + 5 * place) % experts for place in range(k)] for layer in range(layers)]
    best = float("inf")
    for _ in range(60):
        begin = time.process_time()
        for _ in range(20):
            for layer in range(layers):
                cache.request(layer, chosen[layer], 1)
        best = min(best, (time.process_time() - begin) / 20 / layers)
    return round(1e6 * best, 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--cache-mib", type=float, default=1150)
    parser.add_argument("--policies", default="lru,echo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    found: dict = {"request_us": {name: request_us(name) for name in ONLINE}}
    if options.model:
        policies = options.policies.split(",")
        found["live"] = live(
            options.model, options.cache_mib, policies, options.rounds, options.tokens
        )
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
