"""The live view: text, heatmap of layers x experts, scrubber, while the model generates."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import pandas as pd
import traitlets
from IPython.display import display

from labkit import charts
from labkit.errors import LabkitError, NotMoEError, OptionError
from labkit.widgets import player as players
from labkit.widgets.frames import Decoded, Shape, encode, missed, routing_bits
from labkit.widgets.front_end import draws_widgets
from labkit.widgets.picture import run_picture

if TYPE_CHECKING:
    from labkit.runtime import Session, TokenStep

_HERE = Path(__file__).parent
_PARTS = ("store", "heatmap", "text", "page", "routing")
_MIB = 1024 * 1024
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

#: Time between frames. Drawing one costs the browser some 10 ms of processor time, which it takes
#: from the model on a small machine: a model that writes faster than anybody reads gets fewer.
_FRAME_S = 1 / 25
_FAST_FRAME_S = 1 / 6
_FAST_TOKEN_S = 1 / 50
#: Sending frames never takes more than this share of the generating thread's time.
_MAX_SHARE = 0.03
_MAX_TOKENS = 4096


def budget_words(session: Session) -> str:
    """Say how much of the model's expert weights the session may hold."""
    gguf = session.map
    whole = sum(gguf.entry_bytes(layer) for layer in gguf.moe_layers) * gguf.n_expert / _MIB
    if session.cache_bytes is None:
        return f"all {whole:.3g} MiB in memory"
    if session.cache_bytes == 0:
        return f"off (experts {whole:.3g} MiB)"
    return f"{session.cache_bytes / _MIB:.3g} of {whole:.3g} MiB"


def _count(text: str) -> int:
    """The number of tokens that the page's field asks for; raises `OptionError` for nonsense."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= _MAX_TOKENS:
        said = f"'{text}' is not one" if text else "the field holds none"
        raise OptionError(f"Tokens: give a whole number from 1 to {_MAX_TOKENS}; {said}.")
    return count


class LiveRouting(anywidget.AnyWidget):
    """Shows which experts every token chooses while `session` generates.

    `prompts` maps a domain to prompts for the picker (default: the bundled ones); `n_tokens` is how
    many tokens Play generates at first. `show` displays the view and runs the first prompt in the
    cell; from then on Play and Stop work from the page, in a worker thread, so that the kernel
    stays free. Each run starts from an empty context. A new view stops what an older one plays.

    Without a front end (papermill, nbconvert) a picture of the last run stands in for the view.

    Raises `NotMoEError` for a dense model.
    """

    _esm = "\n".join((_HERE / f"live_{part}.js").read_text(encoding="utf-8") for part in _PARTS)
    _css = (_HERE / "live_routing.css").read_text(encoding="utf-8")

    uid = traitlets.Unicode().tag(sync=True)
    facts = traitlets.Dict().tag(sync=True)
    status = traitlets.Dict().tag(sync=True)
    frame = traitlets.Bytes().tag(sync=True)
    prompt = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        session: Session,
        *,
        prompts: dict[str, list[str]] | None = None,
        n_tokens: int = 64,
    ) -> None:
        players.stop_all()
        if prompts is None:
            from labkit.bundled import prompts as bundled_prompts

            prompts = bundled_prompts()
        gguf = session.map
        if not gguf.moe_layers:
            raise NotMoEError(f"{gguf.paths[0].name} has no routed experts: there is no routing.")
        self._shape = Shape(tuple(gguf.moe_layers), gguf.n_expert_used, gguf.n_expert)
        self._session = session
        self._player = players.Player(session, self._take_step, self._take_end)
        self._prompts = prompts
        self._n_tokens = n_tokens
        self._steps: list[TokenStep] = []
        self._decoded = Decoded()
        self._sent = 0
        self._run_number = 0
        self._frame_due = 0.0
        super().__init__(
            uid=uuid.uuid4().hex,
            facts={
                "layers": list(self._shape.layers),
                "prompts": prompts,
                "tokens": n_tokens,
                "most_tokens": _MAX_TOKENS,
                "model": gguf.paths[0].name,
                "budget": budget_words(session),
            },
            status={"state": "idle", "message": ""},
        )
        self.on_msg(self._take_message)

    # ---- running --------------------------------------------------------------------------------

    @property
    def steps(self) -> list[TokenStep]:
        """The tokens of the last run so far, those of the prompt first."""
        return list(self._steps)

    @property
    def playing(self) -> bool:
        """True while a run goes on."""
        return self._player.playing

    def show(self, prompt: str | None = None, n_tokens: int | None = None) -> None:
        """Display the view, run one prompt in this cell, and leave a picture of it in the output.

        The default prompt is the first of the first domain. Interrupting the cell ends the run.
        """
        if not draws_widgets():
            self.run(prompt, n_tokens)
            display(self)
            return
        data, _ = self._bundle(picture=False)
        handle = display(data, raw=True, display_id=True)
        try:
            self.run(prompt, n_tokens)
        finally:
            if handle is not None:
                data, metadata = self._bundle(picture=True)
                handle.update(data, raw=True, metadata=metadata)

    def run(self, prompt: str | None = None, n_tokens: int | None = None) -> None:
        """Generate in this thread; raises what the generation raises, and shows it as well."""
        prompt = self._chosen(prompt)
        self._begin(prompt)
        self._player.run(prompt, n_tokens or self._n_tokens)

    def play(self, prompt: str | None = None, n_tokens: int | None = None) -> None:
        """Generate in a worker thread, as the Play button does; raises if a run goes on."""
        prompt = self._chosen(prompt)
        self._begin(prompt)
        self._player.start(prompt, n_tokens or self._n_tokens)

    def stop(self) -> None:
        """End the run that `play` or the Play button started, and wait for it."""
        self._player.stop()

    def close(self) -> None:
        """Stop, and close the connection to the page."""
        if hasattr(self, "_player"):  # not in a view whose creation failed
            self.stop()
        super().close()

    def table(self) -> pd.DataFrame:
        """Return the last run, a row per token: phase, text, entropy_bits, misses, times, bytes.

        Tokens are counted from 1, as in the view, those of the prompt first.
        """
        return pd.DataFrame(
            [
                {
                    "token": index,
                    "phase": step.phase,
                    "text": step.text,
                    "entropy_bits": routing_bits(step.weights),
                    "misses": missed(step),
                    "wall_ms": step.wall_s * 1e3,
                    "read_mib": step.bytes_read / _MIB,
                }
                for index, step in enumerate(self._steps, 1)
            ]
        )

    # ---- what the player calls, in the thread that generates ------------------------------------

    def _begin(self, prompt: str) -> None:
        if self._player.playing:
            return  # the player refuses, and this run's state must stay as it is
        self._run_number += 1
        self._steps = []
        self._sent = 0
        self._frame_due = 0.0
        self._decoded = Decoded()
        self.prompt = prompt
        self.status = {"state": "playing", "message": "Reading the prompt."}

    def _take_step(self, step: TokenStep) -> None:
        self._steps.append(step)
        if step.phase != "prefill":
            if not self._decoded.tokens:
                self.status = {"state": "playing", "message": "Generating."}
            self._decoded.add(step)
        if time.perf_counter() >= self._frame_due:
            self._flush()

    def _take_end(self, ending: players.Ending) -> None:
        self._flush()
        state, message = ending
        if state == "finished":
            message = f"{self._decoded.tokens} tokens generated in {self._decoded.wall_s:.1f} s."
        self.status = {"state": state, "message": message}

    def _flush(self) -> None:
        """Send the steps that the page does not have yet, in frames of bounded size."""
        start, busy = time.perf_counter(), time.thread_time()
        fresh = self._steps[self._sent :]
        for frame in self._frames(fresh, self._sent):
            self.frame = frame
        self._sent += len(fresh)
        now = time.perf_counter()
        fast = self._decoded.wall_s < _FAST_TOKEN_S * self._decoded.tokens
        pause = _FAST_FRAME_S if fast else _FRAME_S
        self._frame_due = max(start + pause, now + (time.thread_time() - busy) / _MAX_SHARE)

    def _frames(self, steps: Sequence[TokenStep], first: int) -> Iterator[bytes]:
        size = self._shape.tokens_per_frame
        for start in range(0, len(steps), size):
            yield encode(
                steps[start : start + size],
                shape=self._shape,
                run=self._run_number,
                first=first + start,
                totals=self._decoded.totals(),
            )

    # ---- the page -------------------------------------------------------------------------------

    def _take_message(self, _: object, content: dict[str, Any], __: object) -> None:
        """Play, stop, or send what a page that opens late has missed."""
        kind = content.get("type")
        if kind == "stop":
            self.stop()
        elif kind == "history":
            for frame in self._frames(self.steps, 0):
                self.send({"type": "frame"}, buffers=[frame])
        elif kind == "play":
            try:
                tokens = _count(str(content.get("tokens", self._n_tokens)))
                self.play(str(content.get("prompt", "")), tokens)
            except LabkitError as error:
                state = "playing" if self.playing else "error"
                self.status = {"state": state, "message": ""}  # the same error again is news too
                self.status = {"state": state, "message": str(error)}

    def _chosen(self, prompt: str | None) -> str:
        if prompt is not None:
            return prompt
        for prompts in self._prompts.values():
            if prompts:
                return prompts[0]
        raise LabkitError("There are no prompts to pick from: give `prompts`, or a prompt.")

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._bundle(picture=True)

    def _bundle(self, *, picture: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the mime bundle of an output and its metadata."""
        data: dict[str, Any] = {"text/plain": f"<live routing of {self.facts['model']}>"}
        metadata: dict[str, Any] = {}
        if draws_widgets():
            view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
            data[_WIDGET_MIME] = view
        if picture:
            spec = run_picture(self._steps, self._shape)
            data["image/png"], metadata["image/png"] = charts.still(spec)
        return data, metadata
