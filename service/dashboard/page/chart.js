// Curves over time, drawn as SVG. With the mouse or the arrow keys a moment is chosen, of which the values are told.

import { element } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 120;
/** Room for the labels of values. */
const LEFT = 56;
const BOTTOM = 16;
const TOP = 6;

export class Chart {
  #host;
  #svg;
  #readout;
  #form;
  #times = [];
  #series = [];
  #chosen = null;

  /**
   * `form`: "name" for those who hear it, "text" of a value, "isStacked" for areas one upon the other, and "nice", which
   * gives the value at the top for the largest that is shown.
   */
  constructor(host, form) {
    this.#host = host;
    this.#form = form;
    this.#svg = document.createElementNS(SVG, "svg");
    this.#svg.setAttribute("role", "img");
    this.#svg.setAttribute("tabindex", "0");
    this.#readout = element("p", { className: "readout", "aria-live": "polite" });
    host.append(this.#svg, this.#readout);
    this.#svg.addEventListener("pointermove", (event) => this.#choose(this.#at(event.offsetX)));
    this.#svg.addEventListener("pointerleave", () => this.#choose(null));
    this.#svg.addEventListener("blur", () => this.#choose(null));
    this.#svg.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.#draw()).observe(host);
  }

  /** `times`: seconds, growing. `series`: each with its "name", "colour" and "values", one a moment, null for none. */
  show(times, series) {
    [this.#times, this.#series] = [times, series];
    const last = times.length - 1;
    const told = series.map((each) => `${each.name} ${this.#form.text(each.values[last] ?? 0)}`);
    this.#svg.setAttribute("aria-label", `${this.#form.name}: ${told.join(", ")}`);
    this.#draw();
  }

  #draw() {
    const width = this.#host.clientWidth;
    const [first, last] = [this.#times[0], this.#times.at(-1)];
    this.#svg.replaceChildren();
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (!(last > first)) return this.#text("The curves begin in a moment.", width / 2, HEIGHT / 2, "middle");
    const layers = this.#layers();
    const most = this.#form.nice(Math.max(0, ...layers.flatMap((layer) => layer.tops)));
    const x = (time) => LEFT + ((time - first) / (last - first)) * (width - LEFT - 2);
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
    for (const part of [0, 0.5, 1]) {
      this.#add("line", { class: "grid", x1: LEFT, x2: width, y1: y(part * most), y2: y(part * most) });
      this.#text(trimmed(this.#form.text(part * most)), LEFT - 5, y(part * most) + 3, "end");
    }
    this.#text(ago(last - first), LEFT, HEIGHT - 3, "start");
    this.#text("now", width - 2, HEIGHT - 3, "end");
    // The first one over those that follow, so that what adds nothing hides nothing.
    for (const { colour, tops, bottoms } of layers.toReversed()) {
      for (const run of runs(tops)) {
        const line = run.map((i) => `${x(this.#times[i]).toFixed(1)},${y(tops[i]).toFixed(1)}`);
        if (this.#form.isStacked) {
          const back = run.toReversed().map((i) => `${x(this.#times[i]).toFixed(1)},${y(bottoms[i]).toFixed(1)}`);
          this.#add("path", { class: `area ${colour}`, d: `M${[...line, ...back].join("L")}Z` });
        }
        // Of a single point the round end of the line is seen.
        this.#add("path", { class: `line ${colour}`, d: `M${line.join("L")}h0` });
      }
    }
    if (this.#chosen !== null && this.#chosen < this.#times.length) {
      const at = x(this.#times[this.#chosen]);
      this.#add("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
    }
  }

  /** The series with where each begins and ends. */
  #layers() {
    const upon = this.#times.map(() => 0);
    return this.#series.map(({ colour, values }) => {
      const bottoms = [...upon];
      const tops = values.map((value, i) => (value === null ? null : this.#form.isStacked ? (upon[i] += value) : value));
      return { colour, tops, bottoms };
    });
  }

  #at(offset) {
    const part = (offset - LEFT) / (this.#host.clientWidth - LEFT - 2);
    const wanted = this.#times[0] + part * (this.#times.at(-1) - this.#times[0]);
    const after = this.#times.findIndex((time) => time >= wanted);
    return after < 0 ? this.#times.length - 1 : after;
  }

  #press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (step === undefined || !this.#times.length) return;
    event.preventDefault();
    const from = this.#chosen ?? this.#times.length;
    this.#choose(Math.min(Math.max(from + step, 0), this.#times.length - 1));
  }

  #choose(index) {
    this.#chosen = index;
    this.#readout.textContent = "";
    if (index !== null && this.#times[index] !== undefined) {
      const values = this.#series.map((each) => [each.name, each.values[index]]);
      const told = values.map(([name, value]) => `${name} ${value === null ? "–" : this.#form.text(value)}`);
      const when = new Date(1000 * this.#times[index]).toLocaleTimeString();
      this.#readout.textContent = `${when}: ${told.join(", ")}`;
    }
    this.#draw();
  }

  #add(tag, attributes) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    this.#svg.append(made);
    return made;
  }

  #text(text, x, y, anchor) {
    this.#add("text", { x, y, "text-anchor": anchor }).textContent = text;
  }
}

/** The stretches without a gap. */
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) found.push([]);
    found.at(-1).push(i);
  });
  return found;
}

/** A number without the zeros at its end. */
const trimmed = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

const ago = (span) => (span < 120 ? `${Math.round(span)} s ago` : span < 7200 ? `${Math.round(span / 60)} min ago` : `${Math.round(span / 3600)} h ago`);
