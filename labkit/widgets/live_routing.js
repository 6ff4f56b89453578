// The view: controls, figures, heatmap, scrubber, text. State that belongs to one look at the run
// (cursor, selected expert, colouring) lives here; the run itself lives in the store.

const PAGE_MS = 100; // between drawings of the page around the heatmap
const FAST_PAGE_MS = 300; // the same for a model that writes faster than anybody reads
const FAST_TOKENS_PER_SECOND = 50; // as in live_routing.py
const CONTROLS = ["domain", "pick", "prompt-box", "count", "colour"];
const stores = new Map(); // one store per model, shared by all its views

function storeOf(model) {
  const id = model.get("uid");
  if (!stores.has(id)) stores.set(id, new RunStore());
  return stores.get(id);
}

class View {
  constructor(model, element) {
    this.model = model;
    this.store = storeOf(model);
    this.facts = model.get("facts");
    this.root = document.createElement("div");
    this.root.className = "lk-live";
    this.root.innerHTML = TEMPLATE;
    element.appendChild(this.root);
    this.part = (name) => this.root.querySelector(`.lk-${name}`);
    this.heatmap = new Heatmap(this.part("map"), this.store, this.facts.layers);
    this.text = new TextPane(this.part("text"), this.part("strip"), this.part("scale"), this.store);
    this.cursor = 0;
    this.following = true;
    this.selected = null;
    this.focused = null;
    this.shownRun = -1;
    this.pending = 0;
    this.width = 0;
    this.wholeAt = 0;
    this.overdue = true;
    this.fillControls();
    this.recall();
    this.listen();
    this.showStatus();
    this.refresh();
  }

  // ---- controls -------------------------------------------------------------------------------

  fillControls() {
    const domains = Object.keys(this.facts.prompts);
    this.part("domain").replaceChildren(...domains.map((domain) => new Option(domain, domain)));
    this.part("count").value = this.facts.tokens;
    this.part("count").max = this.facts.most_tokens;
    this.fillPrompts();
    this.showPrompt();
  }

  fillPrompts() {
    const prompts = this.facts.prompts[this.part("domain").value] || [];
    const short = (text) => (text.length > 46 ? `${text.slice(0, 45)}…` : text).replace(/\s+/g, " ");
    this.part("pick").replaceChildren(...prompts.map((text, i) => new Option(short(text), i)));
    if (prompts.length) this.part("prompt-box").value = prompts[0];
  }

  // Show the prompt of the last run in the controls.
  showPrompt() {
    const prompt = this.model.get("prompt");
    if (!prompt) return;
    for (const [domain, prompts] of Object.entries(this.facts.prompts)) {
      if (!prompts.includes(prompt)) continue;
      this.part("domain").value = domain;
      this.fillPrompts();
      this.part("pick").value = prompts.indexOf(prompt);
    }
    this.part("prompt-box").value = prompt;
  }

  // Tell the kernel something. A view outlives its kernel: then sending throws.
  ask(message, meanwhile) {
    const say = (words) => (this.part("message").textContent = words);
    const gone = () => say("The kernel was restarted. Run the notebook's cells again.");
    try {
      say(meanwhile);
      Promise.resolve(this.model.send(message)).catch(gone);
    } catch {
      gone();
    }
  }

  listen() {
    const on = (name, event, action) => this.part(name).addEventListener(event, action);
    on("domain", "change", () => this.fillPrompts());
    on("pick", "change", (event) => {
      const prompts = this.facts.prompts[this.part("domain").value];
      this.part("prompt-box").value = prompts[Number(event.target.value)];
    });
    on("play", "click", () => {
      this.selected = null;
      this.following = true;
      const tokens = this.part("count").value; // as it was written: the kernel says what is wrong
      const prompt = this.part("prompt-box").value;
      this.ask({ type: "play", prompt, tokens }, "Waiting for the kernel."); // it may be at other cells
    });
    on("stop", "click", () => this.ask({ type: "stop" }, "Stopping."));
    on("range", "input", (event) => this.goTo(Number(event.target.value)));
    on("last", "click", () => this.goTo(this.store.tokens.length - 1));
    on("colour", "change", (event) => {
      this.text.colouring = event.target.value;
      this.text.paint();
      this.refresh();
    });
    on("strip", "click", (event) => {
      const box = event.target.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      this.goTo(Math.floor(share * this.store.tokens.length));
    });
    on("text", "click", (event) => {
      const span = event.target.closest("[data-token]");
      if (span) this.goTo(Number(span.dataset.token));
    });
    on("map", "click", (event) => this.select(this.cellUnder(event)));
    on("map", "pointermove", (event) => this.focus(this.cellUnder(event)));
    on("map", "pointerleave", () => this.focus(null));
    on("map", "keydown", (event) => this.onKey(event));
    // JupyterLab has shortcuts of its own for plain keys while a cell is selected
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    this.onFrame = () => this.refresh(false);
    this.store.listeners.add(this.onFrame);
    this.onStatus = () => {
      this.showStatus();
      this.refresh();
    };
    this.model.on("change:status", this.onStatus);
    this.onPrompt = () => this.showPrompt();
    this.model.on("change:prompt", this.onPrompt);
    this.resized = new ResizeObserver(() => {
      this.width = this.part("text").offsetWidth; // of the column, without a canvas's own say
      this.refresh();
    });
    this.resized.observe(this.root);
    this.themed = new MutationObserver(() => {
      this.refresh();
      this.later = setTimeout(() => this.refresh(), 400); // the theme's style sheet may come after
    });
    this.themed.observe(document.body, { attributes: true });
  }

  // A page makes a new view when the output is updated or shown elsewhere: what a hand has set goes
  // over to it through the store.
  remember() {
    const { shownRun, cursor, following, selected } = this;
    const controls = CONTROLS.map((name) => [name, this.part(name).value]);
    this.store.left = { view: { shownRun, cursor, following, selected }, controls };
  }

  recall() {
    if (!this.store.left) return;
    Object.assign(this, this.store.left.view);
    for (const [name, value] of this.store.left.controls) {
      this.part(name).value = value;
      if (name === "domain") this.fillPrompts();
    }
    this.text.colouring = this.part("colour").value;
  }

  dispose() {
    this.remember();
    this.store.listeners.delete(this.onFrame);
    this.model.off("change:status", this.onStatus);
    this.model.off("change:prompt", this.onPrompt);
    this.resized.disconnect();
    this.themed.disconnect();
    clearTimeout(this.later);
    clearTimeout(this.rest);
    cancelAnimationFrame(this.pending);
  }

  cellUnder(event) {
    const box = this.part("map").getBoundingClientRect();
    return this.heatmap.cellAt(event.clientX - box.left, event.clientY - box.top);
  }

  onKey(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in moves) {
      const [rows, experts] = moves[event.key];
      const from = this.focused || this.selected || { row: 0, expert: 0 };
      const clamp = (value, limit) => Math.max(0, Math.min(limit - 1, value));
      this.focus({
        row: clamp(from.row + rows, this.store.rows),
        expert: clamp(from.expert + experts, this.store.experts),
      });
    } else if (event.key === "Enter" || event.key === " ") this.select(this.focused);
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  // ---- what is looked at ----------------------------------------------------------------------

  goTo(index) {
    const last = this.store.tokens.length - 1;
    this.cursor = Math.max(0, Math.min(last, index));
    this.following = this.cursor >= last;
    this.refresh();
  }

  select(cell) {
    const same = cell && this.selected && cell.row === this.selected.row && cell.expert === this.selected.expert;
    this.selected = same ? null : cell;
    this.text.markChoosers(this.selected);
    this.refresh();
  }

  focus(cell) {
    const key = (c) => (c ? `${c.row}:${c.expert}` : "");
    if (key(cell) === key(this.focused)) return;
    this.focused = cell;
    this.refresh();
  }

  // ---- drawing: at most once per animation frame ------------------------------------------------

  // While tokens come, the heatmap follows every frame and the rest of the page, which costs more
  // to lay out, less often. What a hand does is shown at once.
  refresh(everything = true) {
    const fast = this.store.totals.tokensPerSecond > FAST_TOKENS_PER_SECOND;
    this.pageMs = fast ? FAST_PAGE_MS : PAGE_MS;
    this.overdue ||= everything || performance.now() - this.wholeAt > this.pageMs;
    if (!this.pending) this.pending = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.pending = 0;
    if (!this.width) return; // out of sight: the observer of sizes calls when it comes back
    const { store } = this;
    if (store.run !== this.shownRun) this.startRun();
    const last = store.tokens.length - 1;
    if (this.following) this.cursor = Math.max(0, last);
    this.heatmap.draw(this.width, this.cursor, this.selected, this.focused);
    clearTimeout(this.rest);
    if (this.overdue) this.drawPage(last);
    else this.rest = setTimeout(() => this.refresh(), this.pageMs);
    this.root.dataset.run = store.run;
    this.root.dataset.drawn = this.heatmap.drawn;
    this.root.dataset.frames = store.frames;
    this.root.dataset.tokens = store.tokens.length;
  }

  drawPage(last) {
    this.overdue = false;
    this.wholeAt = performance.now();
    this.setDark();
    this.root.classList.toggle("lk-empty", last < 0);
    this.text.append(this.selected);
    this.showFigures();
    this.text.drawStrip(this.width, this.cursor, this.selected);
    this.showCursor(last);
    this.showDetail();
  }

  startRun() {
    this.shownRun = this.store.run;
    this.selected = null;
    this.following = true;
    this.text.clear();
  }

  setDark() {
    const [r, g, b] = rgb(this.heatmap.context, getComputedStyle(this.root).backgroundColor);
    this.root.dataset.dark = String(0.3 * r + 0.6 * g + 0.1 * b < 110);
  }

  showStatus() {
    const { state, message } = this.model.get("status");
    this.root.dataset.state = state;
    this.part("message").textContent = message;
    this.part("play").disabled = state === "playing";
    this.part("stop").disabled = state !== "playing";
  }

  showFigures() {
    const { tokensPerSecond, hitRate, readMib } = this.store.totals;
    const number = (value, digits, unit) => (Number.isFinite(value) ? `${value.toFixed(digits)}${unit}` : "–");
    const generated = this.store.tokens.filter((token) => token && !token.prompt).length;
    const figures = [
      ["speed", number(tokensPerSecond, tokensPerSecond < 10 ? 1 : 0, " tok/s")],
      ["cache hits", number(100 * hitRate, 0, " %")],
      ["read from the file", number(readMib, 1, " MiB")],
      ["generated", `${generated} tokens`],
      ["expert cache", this.facts.budget],
      ["model", this.facts.model],
    ];
    const text = figures.flat().join("|");
    if (text === this.figuresShown) return;
    this.figuresShown = text;
    this.part("figures").replaceChildren(
      ...figures.map(([name, value]) => {
        const box = document.createElement("div");
        box.append(Object.assign(document.createElement("span"), { textContent: name }));
        box.append(Object.assign(document.createElement("b"), { textContent: value }));
        return box;
      }),
    );
  }

  showCursor(last) {
    const range = this.part("range");
    range.max = String(Math.max(0, last));
    range.value = String(this.cursor);
    range.disabled = last < 0;
    this.part("last").disabled = this.following;
    const token = this.store.tokens[this.cursor];
    if (!token) {
      this.part("at").textContent = "Press Play: each token lights up the experts that it chose.";
      return;
    }
    this.text.markCursor(this.cursor, this.following);
    const words = `Token ${this.cursor + 1} of ${last + 1}, ${token.prompt ? "prompt" : "generated"}: ${quoted(token.text)}`;
    this.part("at").textContent = words;
    const silent = this.facts.layers.filter((_, row) => !this.store.routed(token, row));
    const more = silent.length ? `; layer ${silent.join(", ")} routes only the last token of a prompt` : "";
    const bits = Number.isFinite(token.entropy) ? `${token.entropy.toFixed(2)} bits of routing entropy, ` : "";
    const time = token.prompt ? "" : `, ${token.milliseconds.toFixed(1)} ms`;
    const facts = `${bits}${token.misses} misses${time}${more}`;
    range.setAttribute("aria-valuetext", `${words}; ${facts}`);
    this.cursorFacts = facts;
  }

  showDetail() {
    const cell = this.focused || this.selected;
    const box = this.part("detail");
    if (!this.store.rows) return;
    if (!cell) {
      const text = `This token: ${this.cursorFacts}. Click an expert to see which tokens chose it.`;
      if (box.textContent !== text) box.textContent = text;
      return;
    }
    const { chosen, routed } = this.store.choosers(cell.row, cell.expert);
    const share = routed ? (100 * chosen.length) / routed : 0;
    const fair = (100 * this.store.slots) / this.store.experts;
    const counts = new Map();
    for (const token of chosen) counts.set(token.text, (counts.get(token.text) || 0) + 1);
    const top = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 14);
    const words = top.map(([text, n]) => (n > 1 ? `${quoted(text)} × ${n}` : quoted(text))).join("   ");
    const strong = document.createElement("strong");
    strong.textContent = `Layer ${this.facts.layers[cell.row]}, expert ${cell.expert}`;
    const all = routed === this.store.tokens.length ? "tokens" : "tokens that this layer routed";
    const rest = ` chosen by ${chosen.length} of ${routed} ${all} (${share.toFixed(0)} %; fair share ${fair.toFixed(0)} %). `;
    box.replaceChildren(strong, rest, words);
  }
}

function quoted(text) {
  return text === "" ? "(no text of its own)" : `“${text.replace(/\n/g, "⏎")}”`;
}

export default {
  initialize({ model }) {
    const store = storeOf(model);
    const onFrame = () => store.read(model.get("frame"));
    const onMessage = (message, buffers) => {
      if (message.type === "frame") store.read(buffers[0]);
    };
    model.on("change:frame", onFrame);
    model.on("msg:custom", onMessage);
    onFrame();
    model.send({ type: "history" });
    return () => {
      model.off("change:frame", onFrame);
      model.off("msg:custom", onMessage);
      stores.delete(model.get("uid"));
    };
  },
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.dispose();
  },
};
