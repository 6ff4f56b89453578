"""The cases of a benchmark: ways of running one model that are measured in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from labkit.errors import OptionError
from labkit.host import userfaultfd_problem
from labkit.policy import ONLINE
from labkit.runtime.engine import Dense
from labkit.runtime.streaming import Prefetch, Prefill

CacheMib = float | Literal["auto"] | None


@dataclass(frozen=True)
class Kind:
    """What a name in `--cases` stands for.

    Attributes:
        what: in words.
        stock: llama.cpp without labkit in its graph; else a `Session`.
        fixed: arguments of `StockModel` or `Session`.
        whole: the model is in memory as a whole, so that a memory limit is not put on it.
        exact: its logits are to equal the streamed ones bit for bit.
    """

    what: str
    stock: bool
    fixed: dict[str, Any]
    whole: bool = False
    exact: bool = True


KINDS: dict[str, Kind] = {
    "resident": Kind("stock llama.cpp, all weights read into memory", True,
                     {"load": "resident"}, whole=True),
    "mmap": Kind("stock llama.cpp, the file mapped and read ahead", True, {"load": "mmap"}),
    "mmap-random": Kind("stock llama.cpp, the file mapped, without reading ahead (MADV_RANDOM)",
                        True, {"load": "mmap-random"}),
    "repack": Kind("stock llama.cpp, weights laid out anew for this processor", True,
                   {"load": "repack"}, whole=True, exact=False),
    "traced": Kind("a session that streams nothing: the file mapped, routing recorded", False,
                   {"resident": True}),
    "stream": Kind("streamed, the overlap that labkit picks here", False, {"overlap": "auto"}),
    "stream-serial": Kind("streamed, a layer waits for all its reads", False,
                          {"overlap": "serial"}),
    "stream-pipeline": Kind("streamed, a projection is computed while the next one is read", False,
                            {"overlap": "pipeline"}),
    "stream-userfaultfd": Kind("streamed, compute threads sleep only on bytes not yet there",
                               False, {"overlap": "userfaultfd"}),
}  # fmt: skip

_CHOICES: dict[str, tuple[str, ...]] = {
    "policy": ONLINE,
    "dense": get_args(Dense),
    "prefill": get_args(Prefill),
    "prefetch": get_args(get_args(Prefetch)[0]),
}
_KEYS = ("lanes", *_CHOICES, "cache_mib")


@dataclass(frozen=True)
class Case:
    """One way of running the model.

    Attributes:
        name: unique in a benchmark, as it was asked for, with its budget.
        kind: a name of `KINDS`.
        cache_mib: budget for expert weights; None for cases without a cache of labkit's.
        options: arguments of `Session` beyond those of the kind.
    """

    name: str
    kind: str
    cache_mib: CacheMib = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether experts are read by labkit."""
        return self.kind.startswith("stream")

    @property
    def about(self) -> Kind:
        """What the kind stands for."""
        return KINDS[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the worker and the saved file."""
        return dataclasses.asdict(self)


def parse_cases(texts: Sequence[str], budgets: Sequence[CacheMib]) -> list[Case]:
    """Cases from NAME or NAME:key=value:..., streamed ones once for each budget.

    Keys are arguments of `Session`: lanes, policy, dense, prefill, prefetch, and cache_mib, which
    takes the place of `budgets` for that case.

    Raises:
        OptionError: an unknown name, key or value, or the same case twice.
    """
    found: dict[str, Case] = {}
    for text in texts:
        for case in _expand(text.strip(), budgets):
            if case.name in found:
                raise OptionError(f"the case {case.name!r} is asked for twice")
            found[case.name] = case
    if not found:
        raise OptionError(f"a benchmark needs at least one case; there are {', '.join(KINDS)}")
    return list(found.values())


def default_cases(*, limited: bool) -> list[str]:
    """The cases of a bench without `--cases`: the stock ways, and every overlap there is here."""
    names = ["resident", "mmap", "mmap-random"]
    if not limited:
        names.append("repack")
    names += ["stream-serial", "stream-pipeline"]
    if userfaultfd_problem() is None:
        names.append("stream-userfaultfd")
    return names


def _expand(text: str, budgets: Sequence[CacheMib]) -> list[Case]:
    kind, *pairs = text.split(":")
    if kind not in KINDS:
        raise OptionError(f"there is no case {kind!r}; there are {', '.join(KINDS)}")
    if pairs and KINDS[kind].stock:
        raise OptionError(f"{text!r}: {kind} is llama.cpp itself and takes no options of labkit")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        options[key] = _value(text, key, value)
    if not kind.startswith("stream"):
        return [Case(text, kind, None, options)]
    if "cache_mib" in options:
        budgets = [options.pop("cache_mib")]
    return [
        Case(text if len(budgets) == 1 else f"{text}@{_budget(b)}", kind, b, options)
        for b in budgets
    ]


def _value(text: str, key: str, value: str) -> Any:
    if key == "cache_mib":
        return parse_budget(value)
    if key not in _KEYS:
        known = ", ".join(_KEYS)
        raise OptionError(f"{text!r}: {key!r} is no option of a case; there are {known}")
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            known = ", ".join(_CHOICES[key])
            raise OptionError(f"{text!r}: there is no {key} {value!r}; there are {known}")
        return value
    if not value.isdecimal() or int(value) < 1:
        raise OptionError(f"{text!r}: {key} must be a whole number from 1 on, not {value!r}")
    return int(value)


def parse_budget(text: str) -> CacheMib:
    """A budget in MiB, or "auto".

    Raises:
        OptionError: neither.
    """
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise OptionError(f"{text!r} is no budget: give MiB, 0 for no cache, or auto")
    return value


def _budget(budget: CacheMib) -> str:
    return "auto" if budget in ("auto", None) else f"{budget:g}"
