// The page of the view: its parts, found by their class names.

const TEMPLATE = `
  <div class="lk-controls">
    <label>Domain<select class="lk-domain"></select></label>
    <label>Prompt<select class="lk-pick"></select></label>
    <label>Tokens<input class="lk-count" type="number" min="1" step="1"></label>
    <button class="lk-play" type="button"><span aria-hidden="true">&#9654;</span> Play</button>
    <button class="lk-stop" type="button"><span aria-hidden="true">&#9632;</span> Stop</button>
    <span class="lk-message" role="status"></span>
    <textarea class="lk-prompt-box" rows="3" spellcheck="false" aria-label="Prompt text"></textarea>
  </div>
  <div class="lk-figures" role="group" aria-label="Figures of this run"></div>
  <div class="lk-head">
    <span class="lk-at"></span>
    <span class="lk-key"><i class="lk-swatch lk-hit"></i>chosen, in the cache</span>
    <span class="lk-key"><i class="lk-swatch lk-miss"></i>chosen, had to be read</span>
    <span class="lk-key"><i class="lk-ramp"></i>chosen by the tokens before</span>
  </div>
  <canvas class="lk-map" tabindex="0" role="application"
    aria-label="Heatmap of layers by experts. Arrow keys move between experts, Enter selects one, Escape clears."></canvas>
  <div class="lk-scrub">
    <canvas class="lk-strip" aria-hidden="true"></canvas>
    <input class="lk-range" type="range" min="0" max="0" step="1" aria-label="Token shown in the heatmap">
  </div>
  <div class="lk-head">
    <label class="lk-colour-by">Colour the text by<select class="lk-colour">
      <option value="entropy">entropy of its routing</option>
      <option value="misses">cache misses</option>
      <option value="none">nothing</option></select></label>
    <span class="lk-scale"></span>
    <button class="lk-last" type="button">Follow the newest token</button>
  </div>
  <div class="lk-text" tabindex="0" role="region" aria-label="Text: the prompt and what the model generated"></div>
  <div class="lk-detail" aria-live="polite"></div>
`;
