// The four cards: what is in use, what was found, what moves, and what hits have saved.

import { Chart } from "./chart.js";
import { bytes, element, named, plural, seconds, share, short } from "./format.js";

/** Rows over which tokens are counted for one point of the hit rate. */
const WINDOW = 8;
const LANES = ["lane-0", "lane-1", "lane-2", "lane-3", "lane-4", "lane-5"];

export class Cards {
  #charts;
  #rows = { minutes: [], day: [] };
  #boot = null;

  constructor() {
    const chart = (id, form) => new Chart(document.querySelector(`#${id} .chart`), form);
    this.#charts = {
      used: chart("used", { name: "Occupancy", text: percent, nice: () => 1 }),
      found: chart("found", { name: "Tokens found", text: percent, nice: () => 1, isStacked: true }),
      moved: chart("moved", { name: "Lanes", text: (count) => `${bytes(count)}/s`, nice: powerOfTwo }),
      saved: chart("saved", { name: "Prefill saved", text: seconds, nice: roundTime, isStacked: true }),
    };
  }

  /** From which row on the server is to tell what it did. */
  nextRow(span) {
    return this.#rows[span].length ? this.#rows[span].at(-1)[0] + 1 : 0;
  }

  /** Whether rows are known of another start of the server, from which `nextRow` went on; they are forgotten. */
  isStale({ server }) {
    const isOther = this.#boot !== null && this.#boot !== server.boot_id;
    if (isOther) this.#rows = { minutes: [], day: [] };
    this.#boot = server.boot_id;
    return isOther;
  }

  show(now, span) {
    const rows = this.#rows[span];
    rows.push(...now.history.rows.filter(([number]) => number >= this.nextRow(span)));
    rows.splice(0, Math.max(0, rows.length - (span === "minutes" ? 450 : 1440)));
    const column = (name) => rows.map((row) => row[now.history.columns.indexOf(name)]);
    const times = column("time");
    this.#showUsed(now, times, column);
    this.#showFound(now, times, column);
    this.#showMoved(now, times, column);
    this.#showSaved(now, times, column);
  }

  #showUsed({ tiers }, times, column) {
    const parts = Object.entries(tiers).map(([name, tier]) => ({ name, tier, part: tier.used_bytes / tier.capacity_bytes }));
    facts("used", ...parts.map(({ name, tier, part }) => bar(name, part, `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`)));
    const series = parts.map(({ name, tier }) => ({
      name: named(name), colour: name, values: column(`used ${name}`).map((used) => used / tier.capacity_bytes),
    }));
    this.#charts.used.show(times, series);
  }

  #showFound({ tiers }, times, column) {
    const asked = column("asked");
    const before = (i) => Math.max(0, i - WINDOW);
    const series = Object.keys(tiers).map((name) => {
      const found = column(`found ${name}`);
      const rate = (i) => (asked[i] > asked[before(i)] ? (found[i] - found[before(i)]) / (asked[i] - asked[before(i)]) : null);
      return { name: named(name), colour: name, values: found.map((_, i) => rate(i)), all: found.at(-1) - found[0] };
    });
    const all = asked.at(-1) - asked[0];
    const total = series.reduce((found, each) => found + each.all, 0);
    const sources = series.map((each) => fact(each.colour, each.name, share(all ? each.all / all : null)));
    facts("found", big(share(all ? total / all : null), `of ${short(all)} tokens`), ...sources);
    this.#charts.found.show(times, series);
  }

  #showMoved({ lanes }, times, column) {
    const series = Object.keys(lanes).map((name, i) => {
      const moved = column(`lane ${name}`);
      const rate = (at) => (at ? (moved[at] - moved[at - 1]) / (times[at] - times[at - 1]) : null);
      return { name: named(name), colour: LANES[i % LANES.length], values: moved.map((_, at) => rate(at)), lane: lanes[name] };
    });
    const told = series.map(({ name, colour, values, lane }) => {
      const failed = lane.failed ? `, ${plural(lane.failed, "page")} failed` : "";
      const queued = lane.queued_pages ? `, ${short(lane.queued_pages)} queued` : "";
      return fact(colour, name, `${bytes(values.at(-1) ?? 0)}/s${queued}${failed}`);
    });
    facts("moved", ...(told.length ? told : [element("p", {}, "There is one tier: nothing moves.")]));
    this.#charts.moved.show(times, series);
  }

  #showSaved({ saved_s: saved, work }, times, column) {
    const values = column("saved");
    const note = work.prefill_tokens
      ? `${seconds(saved)} since the server started`
      : "no engine has said yet how fast it computes";
    facts("saved", big(seconds(values.at(-1) - values[0]), "of prefill"), element("p", {}, note));
    this.#charts.saved.show(times, [{ name: "saved", colour: "saved", values: values.map((value) => value - values[0]) }]);
  }
}

const percent = (part) => `${Math.round(100 * part)} %`;

const powerOfTwo = (most) => 2 ** Math.ceil(Math.log2(Math.max(most, 1024)));

/** Of which the half is a round time, too. */
const TIMES = [1, 2, 10, 20, 60, 120, 600, 1200, 3600, 7200, 43200, 86400];
const roundTime = (most) => TIMES.find((time) => time >= most) ?? 86400 * Math.ceil(most / 86400);

function facts(id, ...told) {
  document.querySelector(`#${id} .facts`).replaceChildren(...told);
}

const big = (text, about) => element("p", { className: "big" }, element("strong", {}, text), ` ${about}`);

const fact = (colour, name, text) =>
  element("p", { className: "fact" }, element("i", { className: `swatch ${colour}` }), element("span", {}, name), element("b", {}, text));

function bar(tier, part, text) {
  const meter = element("div", { className: "meter", role: "meter", "aria-label": named(tier), "aria-valuenow": Math.round(100 * part), "aria-valuetext": text });
  meter.append(element("i", { className: tier }));
  meter.firstChild.style.width = `${100 * part}%`;
  return element("div", { className: "tier" }, element("span", {}, named(tier)), meter, element("b", {}, text));
}
