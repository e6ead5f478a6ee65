// All about the branch that is hovered or focused.

import { bytes, element, named, plural, seconds, whole } from "./format.js";

/** Of what is too small to be drawn so many are named. */
const NAMED = 24;
/** So long a branch is looked at before the server is asked about it. */
const DELAY_MS = 120;

export class Details {
  #host;
  #ask;
  #zoom;
  #timer = null;
  #asked = null;
  #known = null;

  /** `ask(number, signal)`: all about one prefix; `zoom(number)`: see it alone. */
  constructor(host, ask, zoom) {
    [this.#host, this.#ask, this.#zoom] = [host, ask, zoom];
  }

  /** Show a branch; `more` instead of it, as `Icicle` tells it. */
  look(branch, more) {
    clearTimeout(this.#timer);
    this.#asked?.abort();
    if (this.#host.contains(document.activeElement)) return;
    if (more !== null || branch.kind !== "prefix") return this.#show(branch, more, null);
    const known = this.#known?.id === branch.id ? this.#known : null;
    this.#show(branch, null, known);
    this.#timer = setTimeout(async () => {
      const mine = (this.#asked = new AbortController());
      try {
        this.#known = await this.#ask(branch.id, mine.signal);
        if (!mine.signal.aborted) this.#show(branch, null, this.#known);
      } catch {
        // It has left meanwhile, or nobody answers: the next picture says so.
      }
    }, DELAY_MS);
  }

  /** The largest of those that are too small to be drawn. They stay as they are while one of them has the focus. */
  #list(branches) {
    const items = branches.slice(0, NAMED).map((branch) => {
      const about = ` ${bytes(branch.total.bytes)}, ${branch.tiers.map(named).join(" and ") || "on its way"}`;
      return element("li", {}, element("button", { type: "button", onclick: () => this.#zoom(branch.id) }, branch.label), about);
    });
    this.#host.append(element("ul", { className: "largest", "aria-label": "The largest of them" }, ...items));
  }

  #show(branch, more, known) {
    const title = more === null ? branch.label : `… and ${whole(more.total.prefixes)} more below ${branch.label}`;
    const told = more !== null || branch.kind !== "prefix" ? sizes((more ?? branch).total) : prefix(branch, known);
    const rows = Object.entries(told).filter(([, text]) => text !== null);
    this.#host.replaceChildren(
      element("h3", {}, title),
      element("dl", {}, ...rows.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text)))),
    );
    if (more?.narrow.length) this.#list(more.narrow);
    if (known?.text) this.#host.append(element("pre", {}, known.text));
    else if (known) this.#host.append(element("pre", {}, known.ids.join(" ") + (known.tokens > known.ids.length ? " …" : "")));
  }
}

function sizes(total) {
  const tiers = Object.entries(total.tiers).map(([tier, count]) => `${named(tier)} ${bytes(count)}`);
  return {
    Prefixes: whole(total.prefixes),
    Bytes: bytes(total.bytes),
    "By fastest tier": tiers.join(", ") || "none",
    Leases: whole(total.leases),
  };
}

function prefix(branch, known) {
  const first = known?.first_token;
  const states = known && Object.entries(known.residency).filter(([, state]) => state !== "absent");
  const told = states?.map(([tier, state]) => (state === "resident" ? named(tier) : `${named(tier)} (${state})`));
  return {
    Tokens: whole(branch.tokens) + (known ? `, the ${ordinal(first)} to ${ordinal(first + branch.tokens - 1)}` : ""),
    Bytes: bytes(branch.bytes),
    In: (told ?? branch.tiers.map(named)).join(", ") || "on its way",
    "Last used": `${seconds(branch.age_s)} ago`,
    Used: branch.uses ? plural(branch.uses, "time") : "not yet",
    Leases: branch.leases ? plural(branch.leases, "lease") : "none",
    Below: `${plural(branch.total.prefixes - 1, "prefix", "prefixes")}, ${bytes(branch.total.bytes - branch.bytes)}`,
    Tenant: known?.tenant || null,
    Priority: known?.priority ? String(known.priority) : null,
    "Retained for": known?.retained_s ? seconds(known.retained_s) : null,
    Published: known?.published ? "to all tenants" : null,
  };
}

function ordinal(index) {
  const number = index + 1;
  const teens = number % 100 >= 11 && number % 100 <= 13;
  return `${whole(number)}${(!teens && ["", "st", "nd", "rd"][number % 10]) || "th"}`;
}
