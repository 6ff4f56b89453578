"""The models and prompts that ship in `data/`, beside the package in a clone.

The package itself carries no data: `pip install -e .` leaves `labkit/` inside the clone, so that
`data/` is its neighbour. A copy installed from a wheel has no data and says so.
"""

from __future__ import annotations

from pathlib import Path

from labkit.errors import LabkitError, NotAModelError

DATA_DIR = Path(__file__).resolve().parent.parent / "data"

_LFS_HEAD = b"version https://git-lfs"


class BundledDataError(LabkitError):
    """A file of `data/` is not where the clone should have it."""


def model_names() -> list[str]:
    """Names that `model_path` knows, such as "main-q8_0" and "sharp-q8_0", main models first."""
    names = [_name_of(path) for path in (DATA_DIR / "models").glob("labkit-moe-*.gguf")]
    return sorted(names, key=lambda name: (not name.startswith("main-"), name))


def model_path(name: str = "main-q8_0") -> Path:
    """Path of a bundled model: "main-" or "sharp-", then "f16", "q8_0", "q4_k_m" or "q4_0".

    Raises `BundledDataError` when there is no such file and `NotAModelError` when the clone holds
    a Git-LFS pointer in its place.
    """
    family, _, quant = name.partition("-")
    stem = quant if family == "main" else f"{family}-{quant}"
    path = DATA_DIR / "models" / f"labkit-moe-{stem}.gguf"
    if not path.is_file():
        raise _absent(f"the bundled model {name!r}", path, model_names())
    with path.open("rb") as file:
        if file.read(len(_LFS_HEAD)) == _LFS_HEAD:
            raise NotAModelError(
                f"{path} is a Git-LFS pointer, not the model itself. Fetch it with `git lfs pull`."
            )
    return path


def prompt_domains() -> list[str]:
    """Domains that have a file of prompts, sorted: "arithmetic", "chinese", ..."""
    return sorted(path.stem for path in (DATA_DIR / "prompts").glob("*.txt"))


def prompts() -> dict[str, list[str]]:
    """The bundled prompts by domain, in file order.

    Raises `BundledDataError` when `data/prompts` is absent.
    """
    domains = prompt_domains()
    if not domains:
        raise _absent("the bundled prompts", DATA_DIR / "prompts", [])
    return {domain: _prompts_of(DATA_DIR / "prompts" / f"{domain}.txt") for domain in domains}


def _prompts_of(path: Path) -> list[str]:
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    return [block.strip("\n") for block in blocks if block.strip()]


def _name_of(path: Path) -> str:
    stem = path.stem.removeprefix("labkit-moe-")
    return stem if stem.startswith("sharp-") else f"main-{stem}"


def _absent(what: str, path: Path, known: list[str]) -> BundledDataError:
    if DATA_DIR.is_dir():
        there = f" There are: {', '.join(known)}." if known else ""
        return BundledDataError(f"{what} is not at {path}.{there} `git status` shows what is lost.")
    return BundledDataError(
        f"{what} is not at {path}: this labkit was installed without its data. Clone the "
        'repository and run `pip install -e ".[test]"` in it, or name a GGUF file of your own.'
    )
