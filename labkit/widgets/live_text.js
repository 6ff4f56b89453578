// The text: one span per token, coloured by one value of it, and the strip of bars above the
// scrubber, which shows the same value along the run.

// What a colouring means: the value of a token, its colour, its unit, its decimals, and the step
// to which its scale is rounded.
const COLOURINGS = {
  entropy: { colour: "--lk-hot", unit: "bits", digits: 2, step: 0.05 },
  misses: { colour: "--lk-miss", unit: "misses", digits: 0, step: 1 },
};
const STRIP_HEIGHT = 40;

class TextPane {
  constructor(pane, strip, scale, store) {
    this.pane = pane;
    this.strip = strip;
    this.scale = scale;
    this.store = store;
    this.colouring = "entropy";
    this.clear();
  }

  clear() {
    this.spans = [];
    this.painted = ""; // colouring and range that the spans show
    this.marked = null;
    this.pane.replaceChildren();
  }

  // Add spans for new tokens; returns true if there were any.
  append(selected) {
    const { tokens } = this.store;
    const from = this.spans.length;
    const fresh = document.createDocumentFragment();
    for (let i = from; i < tokens.length && tokens[i]; i++) {
      const span = document.createElement("span");
      span.dataset.token = i;
      span.className = tokens[i].prompt ? "lk-token lk-of-prompt" : "lk-token";
      span.textContent = tokens[i].text === "" ? "·" : tokens[i].text.replace(/\n/g, "⏎\n");
      this.spans.push(span);
      fresh.appendChild(span);
    }
    this.pane.appendChild(fresh);
    if (this.spans.length === from) return false;
    this.paint(from);
    this.markChoosers(selected, from);
    return true;
  }

  paint(from = 0) {
    const colouring = COLOURINGS[this.colouring];
    const range = colouring ? this.store.range(this.colouring, colouring.step) : null;
    const key = `${this.colouring}:${range}`;
    const start = key === this.painted ? from : 0; // a wider range changes every colour
    this.painted = key;
    for (let i = start; i < this.spans.length; i++) {
      const level = range ? this.level(this.store.tokens[i][this.colouring], range) : 0;
      const percent = Math.round(60 * level);
      this.spans[i].style.background = percent
        ? `color-mix(in srgb, var(${colouring.colour}) ${percent}%, transparent)`
        : "";
    }
    this.showScale(colouring, range);
  }

  level(value, [low, high]) {
    return Number.isFinite(value) ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
  }

  showScale(colouring, range) {
    if (!colouring || !range) {
      this.scale.replaceChildren();
      return;
    }
    const [low, high] = range.map((value) => value.toFixed(colouring.digits));
    const ramp = document.createElement("i");
    ramp.className = "lk-ramp";
    ramp.style.setProperty("--lk-ramp", `color-mix(in srgb, var(${colouring.colour}) 60%, transparent)`);
    this.scale.replaceChildren(low, ramp, `${high} ${colouring.unit}`);
  }

  markChoosers(selected, from = 0) {
    this.pane.classList.toggle("lk-selecting", Boolean(selected));
    for (let i = from; i < this.spans.length; i++) {
      const chose = selected && this.store.chose(this.store.tokens[i], selected.row, selected.expert);
      this.spans[i].classList.toggle("lk-chose", Boolean(chose));
    }
  }

  markCursor(cursor, follow) {
    const span = this.spans[cursor];
    if (follow) this.pane.scrollTop = this.pane.scrollHeight;
    if (span === this.marked) return;
    this.marked?.classList.remove("lk-current");
    span?.classList.add("lk-current");
    this.marked = span;
    if (!span || follow) return;
    const [word, pane] = [span, this.pane].map((element) => element.getBoundingClientRect());
    const seen = word.top >= pane.top && word.bottom <= pane.bottom;
    if (!seen) this.pane.scrollTop += word.top - pane.top - pane.height / 2;
  }

  drawStrip(width, cursor, selected) {
    const canvas = this.strip;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = STRIP_HEIGHT * ratio;
    }
    const name = COLOURINGS[this.colouring] ? this.colouring : "entropy";
    const range = this.store.range(name, COLOURINGS[name].step);
    const { tokens } = this.store;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, STRIP_HEIGHT);
    if (!range) return;
    const style = getComputedStyle(canvas);
    const [plain, select, ink] = [COLOURINGS[name].colour, "--lk-select", "--lk-ink"].map((colour) =>
      style.getPropertyValue(colour).trim(),
    );
    const step = width / tokens.length;
    const bar = Math.max(1, step - (step >= 4 ? 1 : 0));
    tokens.forEach((token, i) => {
      const tall = 4 + (STRIP_HEIGHT - 6) * this.level(token[name], range);
      const chose = selected && this.store.chose(token, selected.row, selected.expert);
      pen.fillStyle = chose ? select : plain;
      pen.globalAlpha = i === cursor || chose ? 1 : token.prompt ? 0.28 : 0.55;
      pen.fillRect(i * step, STRIP_HEIGHT - tall, bar, tall);
    });
    pen.globalAlpha = 1;
    pen.fillStyle = ink;
    pen.fillRect((cursor + 0.5) * step - 1, 0, 2, STRIP_HEIGHT);
  }
}
