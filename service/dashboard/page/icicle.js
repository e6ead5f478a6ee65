// The tree as an icicle: a row a level, a branch as wide as its bytes and all below it, coloured by its fastest tier.

import { bytes, element, named, plural, seconds, whole } from "./format.js";

const ROW = 26;
/** Branches that are narrower are drawn together, in pixels. */
const NARROW = 3;
/** Narrower ones have no label. */
const LABELLED = 34;

/**
 * It tells what happens: `look(branch, more)` when one is hovered or focused, with `more` instead of it what hangs on it
 * and is too small: the "total" of its sizes and the "narrow" ones that are known. `zoom(number)` when one is to be seen
 * alone.
 */
export class Icicle {
  #host;
  #hears;
  #cells = new Map();
  #shown = new Map();
  #active = null;
  #picture = null;

  constructor(host, hears) {
    this.#host = host;
    this.#hears = hears;
    host.addEventListener("keydown", (event) => this.#press(event));
    host.addEventListener("focusin", (event) => this.#activate(event.target.dataset.key));
    host.addEventListener("pointerover", (event) => this.#look(event.target.closest(".cell")?.dataset.key));
    host.addEventListener("pointerleave", () => this.#look(this.#active));
    host.addEventListener("click", (event) => this.#zoom(event.target.closest(".cell")?.dataset.key));
    new ResizeObserver(() => this.#draw()).observe(host);
  }

  /** Draw what the server has said of the tree. */
  show(picture) {
    const isOther = this.#picture?.focus !== picture.focus;
    const hadFocus = this.#host.contains(document.activeElement);
    this.#picture = picture;
    this.#draw();
    if (isOther || !this.#shown.has(this.#active)) this.#activate(String(picture.focus));
    if (hadFocus) this.#cells.get(this.#active)?.focus({ preventScroll: true });
    this.#look(this.#host.querySelector(".cell:hover")?.dataset.key ?? this.#active);
  }

  #draw() {
    const width = this.#host.clientWidth;
    if (this.#picture === null || width === 0) return;
    this.#shown = layout(this.#picture, width);
    for (const [key, cell] of this.#cells) {
      if (this.#shown.has(key)) continue;
      cell.remove();
      this.#cells.delete(key);
    }
    let levels = 1;
    for (const [key, place] of this.#shown) {
      levels = Math.max(levels, place.level + 1);
      this.#fill(this.#cells.get(key) ?? this.#make(key), place);
    }
    this.#host.style.height = `${levels * ROW}px`;
  }

  #make(key) {
    const cell = element("div", { role: "treeitem", tabIndex: key === this.#active ? 0 : -1 }, element("span"), element("i"));
    cell.dataset.key = key;
    this.#cells.set(key, cell);
    this.#host.append(cell);
    return cell;
  }

  #fill(cell, place) {
    const { branch, isMore } = place;
    const [fastest, ...slower] = isMore ? [] : (branch.tiers ?? []);
    const colour = isMore ? "more" : branch.kind !== "prefix" ? branch.kind : (fastest ?? "coming");
    cell.className = `cell ${colour}${!isMore && branch.leases ? " leased" : ""}`;
    cell.style.left = `${place.x}px`;
    cell.style.width = `${Math.max(place.width - 1, 1)}px`;
    cell.style.top = `${place.level * ROW}px`;
    cell.style.backgroundImage = isMore ? shares(place.total) : "";
    cell.firstChild.textContent = place.width >= LABELLED ? title(place) : "";
    cell.lastChild.className = slower.length ? `also ${slower.at(-1)}` : "";
    cell.ariaLabel = spoken(place);
    cell.ariaLevel = place.level + 1;
    cell.ariaPosInSet = place.position;
    cell.ariaSetSize = place.siblings;
    cell.ariaExpanded = place.below.length > 0 ? "true" : null;
  }

  /** Make one the only one that Tab comes to. */
  #activate(key) {
    if (key === undefined) return;
    if (this.#cells.has(this.#active)) this.#cells.get(this.#active).tabIndex = -1;
    this.#active = key;
    if (this.#cells.has(key)) this.#cells.get(key).tabIndex = 0;
    this.#look(key);
  }

  #look(key) {
    const place = this.#shown.get(key);
    if (place !== undefined) this.#hears.look(place.branch, place.isMore ? place : null);
  }

  #zoom(key) {
    const place = this.#shown.get(key);
    if (place === undefined) return;
    const { id, total, bytes: own } = place.branch;
    if (id !== this.#picture.focus && (place.isMore || total.bytes > (own ?? 0))) this.#hears.zoom(id);
    else this.#cells.get(key).focus();
  }

  #press(event) {
    const place = this.#shown.get(this.#active);
    if (place === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    const beside = this.#shown.get(place.above)?.below ?? [this.#active];
    const at = beside.indexOf(this.#active);
    const keys = {
      ArrowDown: () => place.below[0],
      ArrowUp: () => place.above,
      ArrowRight: () => beside[at + 1] ?? this.#nextAt(place, 1),
      ArrowLeft: () => beside[at - 1] ?? this.#nextAt(place, -1),
      Home: () => String(this.#picture.focus),
      Enter: () => this.#zoom(this.#active),
      " ": () => this.#zoom(this.#active),
      Escape: () => this.#out(),
      Backspace: () => this.#out(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    this.#cells.get(keys[event.key]())?.focus();
  }

  /** The nearest one of the same row, below another branch. */
  #nextAt(place, direction) {
    const row = [...this.#shown].filter(([, other]) => other.level === place.level).sort((a, b) => a[1].x - b[1].x);
    return row[row.findIndex(([, other]) => other === place) + direction]?.[0];
  }

  #out() {
    const above = this.#picture.path.at(-1);
    if (above !== undefined) this.#hears.zoom(above.id);
  }
}

/** Where each branch is drawn, by its key: parents first, and of siblings the largest first. */
function layout({ focus, branches }, width) {
  const children = new Map(branches.map((branch) => [branch.id, []]));
  const byId = new Map(branches.map((branch) => [branch.id, branch]));
  for (const branch of branches) children.get(branch.above)?.push(branch);
  const shown = new Map();
  const scale = width / Math.max(byId.get(focus).total.bytes, 1);
  const pending = [{ branch: byId.get(focus), x: 0, level: 0, above: null, position: 1, siblings: 1 }];
  while (pending.length) {
    const place = pending.pop();
    const { branch, x, level } = place;
    const key = String(branch.id);
    const wide = children.get(branch.id).filter((child) => child.total.bytes * scale >= NARROW).sort(largest);
    const narrow = children.get(branch.id).filter((child) => child.total.bytes * scale < NARROW).sort(largest);
    const rest = sum([branch.more, ...narrow.map((child) => child.total)]);
    const below = wide.map((child) => String(child.id));
    const hasMore = rest.bytes * scale >= 1;
    if (hasMore) below.push(`more ${key}`);
    shown.set(key, { ...place, total: branch.total, width: branch.total.bytes * scale, below });
    let at = x;
    wide.forEach((child, i) => {
      pending.push({ branch: child, x: at, level: level + 1, above: key, position: i + 1, siblings: below.length });
      at += child.total.bytes * scale;
    });
    if (hasMore) {
      const more = { branch, isMore: true, total: rest, narrow, x: at, level: level + 1, above: key, below: [] };
      shown.set(`more ${key}`, { ...more, width: rest.bytes * scale, position: below.length, siblings: below.length });
    }
  }
  return shown;
}

const largest = (one, other) => other.total.bytes - one.total.bytes || one.id - other.id;

function sum(sizes) {
  const total = { bytes: 0, prefixes: 0, leases: 0, tiers: {} };
  for (const each of sizes.filter((size) => size !== null)) {
    for (const name of ["bytes", "prefixes", "leases"]) total[name] += each[name];
    for (const [tier, count] of Object.entries(each.tiers)) total.tiers[tier] = (total.tiers[tier] ?? 0) + count;
  }
  return total;
}

/** How much of it is in which tier, in paler colours. */
function shares({ bytes: all, tiers }) {
  let at = 0;
  const parts = Object.entries(tiers).map(([tier, count]) => {
    const from = at;
    at += (100 * count) / all;
    return `color-mix(in srgb, var(--${tier}) 40%, var(--card)) ${from}% ${at}%`;
  });
  return `linear-gradient(90deg, ${[...parts, `var(--more) ${at}% 100%`].join(", ")})`;
}

function title({ branch, isMore, total }) {
  return isMore ? `… and ${whole(total.prefixes)} more` : branch.label;
}

/** What those hear who do not see it. */
function spoken(place) {
  const { branch, isMore, total } = place;
  if (isMore || branch.kind !== "prefix") {
    return `${title(place)}: ${plural(total.prefixes, "prefix", "prefixes")}, ${bytes(total.bytes)}`;
  }
  const where = branch.tiers.map(named).join(" and ") || "on its way";
  const leases = branch.leases ? `, ${plural(branch.leases, "lease")}` : "";
  const used = `used ${seconds(branch.age_s)} ago${branch.uses ? `, ${plural(branch.uses, "time")} in all` : ""}`;
  return `${branch.label}: ${whole(branch.tokens)} tokens, ${bytes(branch.bytes)}, ${where}, ${used}${leases}`;
}
